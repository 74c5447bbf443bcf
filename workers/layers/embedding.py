"""Token embedding, which may also be the output head."""

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


class Embedding(nn.Module):
    """Looks up token ids and scales.

    `scale`, if not 1, is rounded to the weight's dtype first, as the models were trained. With
    `pack`, the weight is kept in the layout of the native products, for a head that shares it.
    """

    def __init__(self, vocab_size: int, size: int, scale: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = {"embed_tokens": vocab_size}  # as of a `PackedLinear`, for the head
        self.scale = float(torch.tensor(scale, dtype=dtype))
        self.weight = empty_parameter(vocab_size, size, dtype=dtype)
        self.dtype = dtype
        self.packed: tuple[PackedMatrix, ...] = ()  # one at most

    def pack(self, matrix: PackedMatrix) -> None:
        """Keep the weight in `matrix`, to be filled through `weight_slots`."""
        self.packed = (matrix,)
        self.weight = nn.Parameter(matrix.data, requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] int64 -> [num_tokens, size]"""
        if self.packed:
            return self.packed[0].lookup(token_ids, self.dtype, self.scale)
        rows = functional.embedding(token_ids, self.weight)
        return rows if self.scale == 1.0 else rows * self.scale

    def weight_slots(self, name: str) -> dict[str, WeightSlot]:
        if self.packed:
            return {f"{name}.weight": PackedSlot(self.packed[0], 0, self.packed[0].num_outputs)}
        return {f"{name}.weight": TensorSlot(self.weight)}
