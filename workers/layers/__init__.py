"""Building blocks of the model definitions."""

from headrace.workers.layers.attention import Attention, AttentionShape
from headrace.workers.layers.embedding import Embedding
from headrace.workers.layers.linear import Linear, PackedLinear, linear
from headrace.workers.layers.mlp import GatedMLP
from headrace.workers.layers.norm import RMSNorm
from headrace.workers.layers.weight_slot import WeightSlot

__all__ = [
    "Attention",
    "AttentionShape",
    "Embedding",
    "GatedMLP",
    "Linear",
    "PackedLinear",
    "RMSNorm",
    "WeightSlot",
    "linear",
]
