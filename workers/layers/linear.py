"""Linear layers, alone or several packed into one product."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional

from headrace.kernels.native import PackedMatrix
from headrace.workers.layers.weight_slot import (
    PackedSlot,
    TensorSlot,
    WeightSlot,
    empty_parameter,
)

_STEPS_PER_OCTAVE = 4


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b: [num_rows, in] -> [num_rows, out].

    In 16 bits, torch's library compiles and keeps a kernel for every number of rows that it meets,
    megabytes in all for each: rows are padded to a few sizes (four per power of two), so that
    memory stops growing after the first requests.
    """
    num_rows = x.shape[0]
    padded = num_rows if x.dtype is torch.float32 else _padded(num_rows)
    if padded == num_rows:
        return functional.linear(x, weight, bias)
    wide = x.new_zeros(padded, x.shape[1])
    wide[:num_rows] = x
    return functional.linear(wide, weight, bias)[:num_rows]


def _padded(num_rows: int) -> int:
    step = max(1, (1 << (num_rows - 1).bit_length()) // (2 * _STEPS_PER_OCTAVE))
    return -(-num_rows // step) * step


class PackedLinear(nn.Module):
    """Several linear layers of the same input as one: y = x W^T + b, outputs side by side.

    `parts` maps the checkpoint's name of each layer to its number of outputs, in the order of the
    packed rows. With `pack`, the weight is kept in the layout of the native products, which then
    take the place of `forward`.
    """

    def __init__(
        self, parts: Mapping[str, int], in_features: int, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.parts = dict(parts)
        num_rows = sum(parts.values())
        self.weight = empty_parameter(num_rows, in_features, dtype=dtype)
        self.bias = empty_parameter(num_rows, dtype=dtype) if bias else None
        self.packed: PackedMatrix | None = None

    def pack(self, matrix: PackedMatrix) -> None:
        """Keep the weight in `matrix`, to be filled through `weight_slots`."""
        self.packed = matrix
        self.weight = nn.Parameter(matrix.data, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, in_features] -> [num_tokens, sum of outputs]"""
        return linear(x, self.weight, self.bias)

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]:
        slots: dict[str, WeightSlot] = {}
        start = 0
        for name, num_rows in self.parts.items():
            rows = slice(start, start + num_rows)
            if self.packed is not None:
                slots[f"{prefix}{name}.weight"] = PackedSlot(self.packed, start, num_rows)
            else:
                slots[f"{prefix}{name}.weight"] = TensorSlot(self.weight[rows])
            if self.bias is not None:
                slots[f"{prefix}{name}.bias"] = TensorSlot(self.bias[rows])
            start += num_rows
        return slots


class Linear(PackedLinear):
    """One linear layer, called `name` in the checkpoint."""

    def __init__(
        self, name: str, in_features: int, out_features: int, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__({name: out_features}, in_features, bias, dtype)
