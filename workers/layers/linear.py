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
    take the place of `forward`: in one matrix, or in several that follow each other, where parts
    are kept in different formats.
    """

    def __init__(
        self, parts: Mapping[str, int], in_features: int, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.parts = dict(parts)
        num_rows = sum(parts.values())
        self.weight = empty_parameter(num_rows, in_features, dtype=dtype)
        self.bias = empty_parameter(num_rows, dtype=dtype) if bias else None
        self.packed: tuple[PackedMatrix, ...] = ()

    def pack(self, *matrices: PackedMatrix) -> None:
        """Keep the weight in `matrices`, each of whole parts, to be filled by `weight_slots`."""
        self.packed = matrices
        for index, matrix in enumerate(matrices):
            name = f"weight_{index}" if index else "weight"
            self.register_parameter(name, nn.Parameter(matrix.data, requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, in_features] -> [num_tokens, sum of outputs]"""
        return linear(x, self.weight, self.bias)

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]:
        slots: dict[str, WeightSlot] = {}
        start = 0
        for name, num_rows in self.parts.items():
            slots[f"{prefix}{name}.weight"] = self._slot(start, num_rows)
            if self.bias is not None:
                slots[f"{prefix}{name}.bias"] = TensorSlot(self.bias[start : start + num_rows])
            start += num_rows
        return slots

    def _slot(self, start: int, num_rows: int) -> WeightSlot:
        """Of the weight's rows from `start`."""
        if not self.packed:
            return TensorSlot(self.weight[start : start + num_rows])
        matrices = iter(self.packed)
        while start >= (matrix := next(matrices)).num_outputs:
            start -= matrix.num_outputs
        return PackedSlot(matrix, start, num_rows)


class Linear(PackedLinear):
    """One linear layer, called `name` in the checkpoint."""

    def __init__(
        self, name: str, in_features: int, out_features: int, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__({name: out_features}, in_features, bias, dtype)
