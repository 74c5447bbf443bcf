"""Rotary position embeddings."""

from headrace.kernels.rotary.reference import (
    RotaryAngles,
    apply_rotary_,
    inverse_frequencies,
    rotary_table,
    select_angles,
)

__all__ = [
    "RotaryAngles",
    "apply_rotary_",
    "inverse_frequencies",
    "rotary_table",
    "select_angles",
]
