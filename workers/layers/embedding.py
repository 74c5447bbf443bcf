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

    `vocab`: the token ids that are here, of all `vocab_size`; the rows of others are zeros.
    `scale`, if not 1, is rounded to the weight's dtype first, as the models were trained. With
    `pack`, the weight is kept in the layout of the native products, for a head that shares it.
    """

    def __init__(
        self, vocab: range, vocab_size: int, size: int, scale: float, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.vocab = vocab
        self.is_whole = len(vocab) == vocab_size
        self.size = size
        self.parts = {"embed_tokens": len(vocab)}  # as of a `PackedLinear`, for the head
        self.scale = float(torch.tensor(scale, dtype=dtype))
        self.weight = empty_parameter(len(vocab), size, dtype=dtype)
        self.dtype = dtype
        self.packed: tuple[PackedMatrix, ...] = ()  # one at most

    def pack(self, matrix: PackedMatrix) -> None:
        """Keep the weight in `matrix`, to be filled through `weight_slots`."""
        self.packed = (matrix,)
        self.weight = nn.Parameter(matrix.data, requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] int64 -> [num_tokens, size]"""
        if self.is_whole:
            return self._lookup(token_ids)
        is_here = (token_ids >= self.vocab.start) & (token_ids < self.vocab.stop)
        rows = torch.zeros(len(token_ids), self.size, dtype=self.dtype, device=token_ids.device)
        rows[is_here] = self._lookup(token_ids[is_here] - self.vocab.start)
        return rows

    def _lookup(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.packed:
            return self.packed[0].lookup(token_ids, self.dtype, self.scale)
        rows = functional.embedding(token_ids, self.weight)
        return rows if self.scale == 1.0 else rows * self.scale

    def weight_slots(self, name: str) -> dict[str, WeightSlot]:
        if self.packed:
            return {f"{name}.weight": PackedSlot(self.packed[0], 0, self.packed[0].num_outputs)}
        return {f"{name}.weight": TensorSlot(self.weight)}
