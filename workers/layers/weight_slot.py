"""Where a checkpoint tensor goes: a slice of a preallocated parameter."""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class WeightSlot:
    """A target for one checkpoint tensor: a parameter, or a slice of a packed one.

    `offset` is added after the copy, in the dtype of `target` (Gemma's norms scale by 1 + w).
    `source_shape` is the checkpoint tensor's shape where it is repeated over the leading axis of
    `target`; None: the shape of `target`.
    """

    target: torch.Tensor
    offset: float = 0.0
    source_shape: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.target.shape if self.source_shape is None else self.source_shape)

    def fill(self, source: torch.Tensor) -> None:
        self.target.copy_(source)
        if self.offset:
            self.target.add_(self.offset)


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter without memory: sizes are known, and checked, before anything is allocated."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


def allocated(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter with (uninitialized) memory.

    `nn.Module.to_empty` would do the same, but imports half a second's worth of torch for it.
    """
    memory = torch.empty(parameter.shape, dtype=parameter.dtype)
    return nn.Parameter(memory, requires_grad=False)
