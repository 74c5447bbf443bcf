"""A matrix in the element type of a GGUF file, before anything is computed with it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.configs.model_files.gguf import BLOCK_SIZES
from headrace.kernels.dequantize.reference import CHUNK_ELEMENTS, dequantize

_CHUNKS_TOGETHER = 32  # a few MiB of float32


@dataclass(frozen=True)
class StoredMatrix:
    """[num_rows, num_inputs]; a row is a whole number of blocks, so rows can be moved about."""

    type_name: str  # as `dequantize` takes it
    shape: tuple[int, int]
    rows: np.ndarray  # uint8 [num_rows, bytes of a row]; may be a view of a file: not written to

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """All of it, as a new tensor."""
        data = np.ascontiguousarray(self.rows).data.cast("B")
        return dequantize(data, self.type_name, self.shape, dtype)

    def chunks(self, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """(first row, some rows as new numbers): all of them, a few MiB at a time."""
        num_rows, num_inputs = self.shape
        step = max(1, _CHUNKS_TOGETHER * CHUNK_ELEMENTS // num_inputs)
        for start in range(0, num_rows, step):
            part = self.rows[start : start + step]
            shape = (part.shape[0], num_inputs)
            yield start, StoredMatrix(self.type_name, shape, part).dequantized(dtype)

    def unpermuted(self, num_heads: int) -> "StoredMatrix":
        """Rows [head, pair, first or second half] become [head, half, pair]."""
        paired = self.rows.reshape(num_heads, -1, 2, self.rows.shape[1])
        rows = np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(self.rows.shape)
        return StoredMatrix(self.type_name, self.shape, rows)

    def rows_from(self, start: int, length: int) -> "StoredMatrix":
        """Some of the rows."""
        part = self.rows[start : start + length]
        return StoredMatrix(self.type_name, (length, self.shape[1]), part)

    def columns_from(self, start: int, length: int) -> "StoredMatrix":
        """Some of the inputs, whole blocks of them; ValueError if they are not."""
        elements, num_bytes = BLOCK_SIZES[self.type_name]
        if start % elements or length % elements:
            raise ValueError(f"inputs {start} to {start + length} are no blocks of {elements}")
        first = start // elements * num_bytes
        part = self.rows[:, first : first + length // elements * num_bytes]
        return StoredMatrix(self.type_name, (self.shape[0], length), part)
