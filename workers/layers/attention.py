"""Self-attention layer over the paged KV cache."""

from dataclasses import dataclass

import torch
from torch import nn

from headrace.kernels.attention import AttentionMetadata, paged_attention
from headrace.kernels.rotary import RotaryAngles, apply_rotary_
from headrace.workers.layers.linear import Linear, PackedLinear
from headrace.workers.layers.norm import HeadNorm
from headrace.workers.layers.weight_slot import WeightSlot


@dataclass(frozen=True)
class AttentionShape:
    """Sizes and options of a model's attention layers.

    `scale` multiplies the scores; `norm_eps` None: no query and key normalization.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    output_bias: bool = False
    norm_eps: float | None = None
    norm_unit_offset: bool = False
    soft_cap: float | None = None


class Attention(nn.Module):
    """Projections, optional head norms, rotary embedding, paged attention, output projection.

    `adds_bias`: whether the output's bias, if the model has one, is added here, and not by another
    shard.
    """

    def __init__(
        self,
        hidden_size: int,
        shape: AttentionShape,
        dtype: torch.dtype,
        adds_bias: bool = True,
    ) -> None:
        super().__init__()
        self.shape = shape
        heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        sizes = {
            "q_proj": heads * head_dim,
            "k_proj": kv_heads * head_dim,
            "v_proj": kv_heads * head_dim,
        }
        self.qkv = PackedLinear(sizes, hidden_size, shape.qkv_bias, dtype)
        has_bias = shape.output_bias and adds_bias
        self.output = Linear("o_proj", heads * head_dim, hidden_size, has_bias, dtype)
        self.head_norm = None
        if shape.norm_eps is not None:
            self.head_norm = HeadNorm(
                heads, kv_heads, head_dim, shape.norm_eps, shape.norm_unit_offset
            )

    def forward(
        self,
        x: torch.Tensor,
        angles: RotaryAngles,
        pages: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """[num_tokens, hidden_size] -> the same; writes the new K and V to `pages`."""
        shape = self.shape
        num_rotated = shape.num_heads + shape.num_kv_heads
        qkv = self.qkv(x).view(-1, num_rotated + shape.num_kv_heads, shape.head_dim)
        rotated = qkv[:, :num_rotated]
        if self.head_norm is not None:
            rotated.copy_(self.head_norm(rotated))
        apply_rotary_(rotated, angles)
        key_value = qkv[:, shape.num_heads :].unflatten(1, (2, shape.num_kv_heads))
        query = qkv[:, : shape.num_heads]
        out = paged_attention(query, key_value, pages, metadata, shape.scale, shape.soft_cap)
        return self.output(out.flatten(1))

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]:
        slots = self.qkv.weight_slots(prefix) | self.output.weight_slots(prefix)
        return slots | (self.head_norm.weight_slots(prefix) if self.head_norm is not None else {})
