"""Weight matrices in the layout that the native products read."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from headrace.kernels.dequantize import StoredMatrix
from headrace.kernels.native.interface import Format, Lanes
from headrace.kernels.native.kernels import NativeKernels

_BLOCK_ROWS = 32

# Types of a GGUF file that products are computed with as they are.
BLOCK_FORMATS: Mapping[str, Format] = MappingProxyType(
    {f.name: f for f in Format if f >= Format.Q8_0}
)
_FLOAT_FORMATS: Mapping[torch.dtype, Format] = MappingProxyType(
    {torch.bfloat16: Format.BF16, torch.float16: Format.F16, torch.float32: Format.F32}
)


def packed_shape(num_outputs: int, num_inputs: int) -> tuple[int, int, int, int]:
    """[blocks of 32 rows, pairs of inputs, 32 rows, 2]: rows and inputs are padded with zeros."""
    return -(-num_outputs // _BLOCK_ROWS), -(-num_inputs // 2), _BLOCK_ROWS, 2


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [num_outputs, num_inputs], packed in bf16 or in a quantized format.

    `is_gated`: the first half of the rows are a gate's, the second half an up projection's, and
    every block holds 16 of either, so that one block of a product has both.
    """

    data: torch.Tensor  # zeros at first; bf16: `packed_shape`, else bytes
    num_outputs: int
    num_inputs: int
    kernels: NativeKernels
    is_gated: bool = False
    format: Format = Format.BF16

    def fill(self, rows: torch.Tensor | StoredMatrix, first_row: int) -> None:
        """Put `rows` [num_rows, num_inputs] at `first_row`.

        In a gated matrix they must lie in one half. Numbers are rounded to bf16 or quantized to
        int8; blocks of a file are taken as they are if they have this format, which a matrix of
        blocks needs. Raises ValueError for what cannot be packed.
        """
        if isinstance(rows, torch.Tensor):
            self._fill_numbers(rows, first_row)
        elif BLOCK_FORMATS.get(rows.type_name) == self.format:
            lanes, first_row = self._lanes(first_row)
            self.kernels.pack(
                rows.rows.ctypes.data, self.format, rows.shape, self.data, self.format, first_row,
                lanes,
            )  # fmt: skip
        else:
            for start, chunk in rows.chunks(torch.float32):
                self._fill_numbers(chunk, first_row + start)

    def _fill_numbers(self, rows: torch.Tensor, first_row: int) -> None:
        if self.format is Format.BF16:
            rows = rows.to(torch.bfloat16)
        elif rows.dtype not in _FLOAT_FORMATS:
            rows = rows.float()
        rows = rows.contiguous()
        lanes, first_row = self._lanes(first_row)
        num_rows, num_inputs = rows.shape
        self.kernels.pack(
            rows.data_ptr(), _FLOAT_FORMATS[rows.dtype], (num_rows, num_inputs), self.data,
            self.format, first_row, lanes,
        )  # fmt: skip

    def _lanes(self, first_row: int) -> tuple[Lanes, int]:
        """Which rows are filled, and the number of the first among these."""
        half = self.num_outputs // 2
        if not self.is_gated:
            return Lanes.PLAIN, first_row
        return (Lanes.GATE, first_row) if first_row < half else (Lanes.UP, first_row - half)

    def lookup(self, row_ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Rows `row_ids` [num_ids] int64, times `scale`: [num_ids, num_inputs] bf16."""
        return self.kernels.lookup(self.data, self.format, self.num_inputs, row_ids, scale)

    def unpacked(self) -> torch.Tensor:
        """A bf16 matrix again, [num_outputs, num_inputs]."""
        blocks = self.data.permute(0, 2, 1, 3).flatten(2)[:, :, : self.num_inputs]
        if not self.is_gated:
            return blocks.flatten(0, 1)[: self.num_outputs]
        half, middle = self.num_outputs // 2, _BLOCK_ROWS // 2
        gate, up = blocks[:, :middle].flatten(0, 1), blocks[:, middle:].flatten(0, 1)
        return torch.cat((gate[:half], up[:half]))
