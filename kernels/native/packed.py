"""Weight matrices in the layout that the native products read."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from headrace.kernels.dequantize import StoredMatrix
from headrace.kernels.native.interface import Format, Lanes
from headrace.kernels.native.kernels import FORMATS, NativeKernels

_BLOCK_ROWS = 32
_INPUTS_TOGETHER = 32  # that inputs are padded to

# Types of a GGUF file that products are computed with as they are.
BLOCK_FORMATS: Mapping[str, Format] = MappingProxyType(
    {format.name: format for format in Format if format >= Format.Q8_0}
)


def packed_shape(
    num_outputs: int, num_inputs: int, format: Format = Format.BF16
) -> tuple[int, ...]:
    """Of a float matrix, in elements; rows and, in bf16, inputs are padded with zeros.

    In bf16 [blocks of 32 rows, pairs of inputs, 32 rows, 2], with a multiple of 32 inputs; in f16
    and f32 [blocks of 32 rows, inputs, 32 rows].
    """
    num_blocks = -(-num_outputs // _BLOCK_ROWS)
    if format is Format.BF16:
        return num_blocks, -(-num_inputs // 32) * 16, _BLOCK_ROWS, 2
    return num_blocks, num_inputs, _BLOCK_ROWS


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [num_outputs, num_inputs] in a format, packed.

    `is_gated`: the first half of the rows are a gate's, the second half an up projection's, and
    every block holds 16 of either, so that one block of a product has both.
    """

    data: torch.Tensor  # `kernels.packed_bytes` of memory, zeros at first
    format: Format
    num_outputs: int
    num_inputs: int
    kernels: NativeKernels
    is_gated: bool = False

    def fill(self, rows: torch.Tensor | StoredMatrix, first_row: int) -> None:
        """Put `rows` [num_rows, num_inputs] at `first_row`.

        In a gated matrix they must lie in one half. Numbers are rounded to a float format or
        quantized to int8. Blocks of a file are taken as they are, if they have the format of this
        matrix, and dequantized otherwise. A matrix of blocks takes nothing else: ValueError.
        """
        if isinstance(rows, StoredMatrix) and BLOCK_FORMATS.get(rows.type_name) == self.format:
            lanes, first = self._lanes(first_row)
            self.kernels.pack_blocks(
                rows.rows, self.data, self.format, self.num_inputs, first, lanes
            )
        elif isinstance(rows, StoredMatrix):
            for start, chunk in rows.chunks(torch.float32):
                self.fill(chunk, first_row + start)
        else:
            if rows.dtype not in FORMATS:
                rows = rows.float()
            if self.format is Format.BF16:
                rows = rows.bfloat16()
            lanes, first = self._lanes(first_row)
            self.kernels.pack(rows.contiguous(), self.data, self.format, first, lanes)

    def _lanes(self, first_row: int) -> tuple[Lanes, int]:
        """Which rows `first_row` is among, and its number there."""
        half = self.num_outputs // 2
        if not self.is_gated:
            return Lanes.PLAIN, first_row
        return (Lanes.GATE, first_row) if first_row < half else (Lanes.UP, first_row - half)

    def lookup(self, row_ids: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
        """Rows `row_ids` [num_ids] int64, times `scale`: [num_ids, num_inputs] of `dtype`."""
        return self.kernels.lookup(self.data, self.format, self.num_inputs, row_ids, scale, dtype)

    def unpacked(self) -> torch.Tensor:
        """The matrix again, [num_outputs, num_inputs]; of a float format."""
        [dtype] = [dtype for dtype, format in FORMATS.items() if format is self.format]
        blocks = self.data.view(-1).view(dtype)
        blocks = blocks.view(packed_shape(self.num_outputs, self.num_inputs, self.format))
        if self.format is Format.BF16:
            blocks = blocks.transpose(2, 3).flatten(1, 2)
        blocks = blocks.transpose(1, 2)[:, :, : self.num_inputs]
        if not self.is_gated:
            return blocks.flatten(0, 1)[: self.num_outputs]
        half, middle = self.num_outputs // 2, _BLOCK_ROWS // 2
        gate, up = blocks[:, :middle].flatten(0, 1), blocks[:, middle:].flatten(0, 1)
        return torch.cat((gate[:half], up[:half]))
