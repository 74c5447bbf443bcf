"""Weight matrices in the layout that the native products read."""

from dataclasses import dataclass

import torch

from headrace.kernels.native.interface import Lanes
from headrace.kernels.native.kernels import NativeKernels

_BLOCK_ROWS = 32
_INPUTS_TOGETHER = 32  # that inputs are padded to


def packed_shape(num_outputs: int, num_inputs: int) -> tuple[int, int, int, int]:
    """[blocks of 32 rows, pairs of inputs, 32 rows, 2]: rows and inputs are padded with zeros."""
    num_pairs = -(-num_inputs // _INPUTS_TOGETHER) * _INPUTS_TOGETHER // 2
    return -(-num_outputs // _BLOCK_ROWS), num_pairs, _BLOCK_ROWS, 2


@dataclass(frozen=True)
class PackedMatrix:
    """A bf16 matrix [num_outputs, num_inputs], packed.

    `is_gated`: the first half of the rows are a gate's, the second half an up projection's, and
    every block holds 16 of either, so that one block of a product has both.
    """

    data: torch.Tensor  # `packed_shape`, bf16, zeros at first
    num_outputs: int
    num_inputs: int
    kernels: NativeKernels
    is_gated: bool = False

    def fill(self, rows: torch.Tensor, first_row: int) -> None:
        """Put `rows` [num_rows, num_inputs] at `first_row`.

        In a gated matrix they must lie in one half.
        """
        lanes, half = Lanes.PLAIN, self.num_outputs // 2
        if self.is_gated:
            lanes = Lanes.GATE if first_row < half else Lanes.UP
            first_row -= 0 if lanes is Lanes.GATE else half
        self.kernels.pack(rows.to(torch.bfloat16).contiguous(), self.data, first_row, lanes)

    def lookup(self, row_ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Rows `row_ids` [num_ids] int64, times `scale`: [num_ids, num_inputs] bf16."""
        return self.kernels.lookup(self.data, self.num_inputs, row_ids, scale)

    def unpacked(self) -> torch.Tensor:
        """The matrix again, [num_outputs, num_inputs]."""
        blocks = self.data.permute(0, 2, 1, 3).flatten(2)[:, :, : self.num_inputs]
        if not self.is_gated:
            return blocks.flatten(0, 1)[: self.num_outputs]
        half, middle = self.num_outputs // 2, _BLOCK_ROWS // 2
        gate, up = blocks[:, :middle].flatten(0, 1), blocks[:, middle:].flatten(0, 1)
        return torch.cat((gate[:half], up[:half]))
