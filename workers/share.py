"""A worker's share of a checkpoint tensor."""

from dataclasses import dataclass

import torch

from headrace.configs.model_files.gguf import BLOCK_SIZES
from headrace.kernels.dequantize import StoredMatrix


@dataclass(frozen=True)
class Share:
    """Part of a tensor: `length` entries from `start` along `axis`."""

    axis: int
    start: int
    length: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of the part."""
        return tensor.narrow(self.axis, self.start, self.length)

    def is_whole_blocks(self, type_name: str) -> bool:
        """Whether a matrix of a GGUF file's type can be cut like that as it is."""
        elements = BLOCK_SIZES[type_name][0]
        return self.axis == 0 or not (self.start % elements or self.length % elements)

    def of_stored(self, matrix: StoredMatrix) -> StoredMatrix:
        """The part of a matrix of a file; if it is not of whole blocks, ValueError."""
        if self.axis == 0:
            return matrix.rows_from(self.start, self.length)
        return matrix.columns_from(self.start, self.length)
