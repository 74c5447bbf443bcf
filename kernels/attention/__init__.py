"""Attention over a paged KV cache."""

from headrace.kernels.attention.metadata import (
    AttentionMetadata,
    AttentionPlanner,
    DecodeRows,
    PrefillChunk,
    SequenceSlots,
    block_slots,
)
from headrace.kernels.attention.reference import paged_attention

__all__ = [
    "AttentionMetadata",
    "AttentionPlanner",
    "DecodeRows",
    "PrefillChunk",
    "SequenceSlots",
    "block_slots",
    "paged_attention",
]
