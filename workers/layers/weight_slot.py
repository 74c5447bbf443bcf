"""Where a checkpoint tensor goes: a slice of a preallocated parameter, plain or packed."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from headrace.kernels.dequantize import StoredMatrix
from headrace.kernels.native import PackedMatrix


class WeightSlot(Protocol):
    """A target for one checkpoint tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the checkpoint tensor."""

    def fill(self, source: torch.Tensor | StoredMatrix) -> None:
        """Copy the checkpoint tensor to its place."""


@dataclass(frozen=True)
class TensorSlot:
    """A parameter, or a slice of one that several tensors share.

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

    def fill(self, source: torch.Tensor | StoredMatrix) -> None:
        if isinstance(source, StoredMatrix):
            source = source.dequantized(self.target.dtype)
        self.target.copy_(source)
        if self.offset:
            self.target.add_(self.offset)


@dataclass(frozen=True)
class PackedSlot:
    """Rows `first_row` to `first_row + num_rows` of a matrix in the native layout."""

    matrix: PackedMatrix
    first_row: int
    num_rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.num_rows, self.matrix.num_inputs

    def fill(self, source: torch.Tensor | StoredMatrix) -> None:
        self.matrix.fill(source, self.first_row)


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter without memory: sizes are known, and checked, before anything is allocated."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


def allocated(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter with (uninitialized) memory.

    `nn.Module.to_empty` would do the same, but imports half a second's worth of torch for it.
    """
    memory = torch.empty(parameter.shape, dtype=parameter.dtype)
    return nn.Parameter(memory, requires_grad=False)
