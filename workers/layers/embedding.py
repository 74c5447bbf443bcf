"""Token embedding, which may also be the output head."""

import torch
from torch import nn
from torch.nn import functional

from headrace.workers.layers.weight_slot import WeightSlot, empty_parameter


class Embedding(nn.Module):
    """Looks up token ids and scales.

    `scale`, if not 1, is rounded to the weight's dtype first, as the models were trained.
    """

    def __init__(self, vocab_size: int, size: int, scale: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = float(torch.tensor(scale, dtype=dtype))
        self.weight = empty_parameter(vocab_size, size, dtype=dtype)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] int64 -> [num_tokens, size]"""
        rows = functional.embedding(token_ids, self.weight)
        return rows if self.scale == 1.0 else rows * self.scale

    def weight_slots(self, name: str) -> dict[str, WeightSlot]:
        return {f"{name}.weight": WeightSlot(self.weight)}
