"""RMS normalization layer."""

import torch
from torch import nn

from headrace.kernels.rms_norm import rms_norm
from headrace.workers.layers.weight_slot import TensorSlot, WeightSlot, empty_parameter


class RMSNorm(nn.Module):
    """Normalizes the last axis.

    The weight is kept in float32, with Gemma's 1 already added if `unit_offset`.
    """

    def __init__(self, size: int, eps: float, unit_offset: bool) -> None:
        super().__init__()
        self.eps = eps
        self.offset = 1.0 if unit_offset else 0.0
        self.weight = empty_parameter(size, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def weight_slots(self, name: str) -> dict[str, WeightSlot]:
        return {f"{name}.weight": TensorSlot(self.weight, self.offset)}


class HeadNorm(nn.Module):
    """Query and key normalization: one weight for all query heads, another for all key heads.

    Both are applied in one call; the weight has a row per head.
    """

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, unit_offset: bool
    ) -> None:
        super().__init__()
        self.eps = eps
        self.num_heads = num_heads
        self.offset = 1.0 if unit_offset else 0.0
        self.weight = empty_parameter(num_heads + num_kv_heads, head_dim, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, num_heads + num_kv_heads, head_dim]: query heads, then key heads."""
        return rms_norm(x, self.weight, self.eps)

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]:
        head_dim = self.weight.shape[1:]
        queries, keys = self.weight[: self.num_heads], self.weight[self.num_heads :]
        return {
            f"{prefix}q_norm.weight": TensorSlot(queries, self.offset, head_dim),
            f"{prefix}k_norm.weight": TensorSlot(keys, self.offset, head_dim),
        }
