"""Rotary position embeddings in torch (Su et al. 2021, arXiv:2104.09864).

The layout is the half-split one of GPT-NeoX.

A head's values i and i + head_dim/2 are one pair, turned by position * inverse_frequency[i].
Cosines and sines are float32, made once for every position; a step selects its rows once and all
layers use them. Positions are a tensor of their own, so that they need not equal token indexes.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch


class RotaryAngles(NamedTuple):
    """What a step's tokens are turned by: float32, [num_tokens, 1, head_dim] each.

    `cos` repeats the cosines for both halves; `sin` is negative in the first half.
    """

    cos: torch.Tensor
    sin: torch.Tensor


def inverse_frequencies(head_dim: int, rope: Mapping[str, Any]) -> torch.Tensor:
    """[head_dim / 2] float32 from a config's `rope_parameters`: default, linear or llama3.

    Raises ValueError for another `rope_type`.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (float(rope["rope_theta"]) ** exponents)
    kind = rope["rope_type"]
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / float(rope["factor"])
    if kind == "llama3":
        return _llama3_frequencies(frequencies, rope)
    raise ValueError(f"rope_type {kind!r} is not supported; supported: default, linear, llama3")


def _llama3_frequencies(frequencies: torch.Tensor, rope: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1's scaling: long wavelengths slowed, short ones kept, a linear blend between."""
    factor, original = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    turns = original * frequencies / (2.0 * math.pi)  # full turns over the original context
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - blend) * frequencies / factor + blend * frequencies


def rotary_table(frequencies: torch.Tensor, num_positions: int) -> torch.Tensor:
    """Cosines, then sines, of every position: [num_positions, head_dim] float32."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def select_angles(table: torch.Tensor, positions: torch.Tensor) -> RotaryAngles:
    """The rows of `table` for a step's tokens.

    `positions`: [num_tokens] int64, each below the table's length.
    """
    cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    return RotaryAngles(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


def apply_rotary_(x: torch.Tensor, angles: RotaryAngles) -> None:
    """Turn `x` [num_tokens, num_heads, head_dim] in place.

    Arithmetic is in float32, rounded once to the dtype of `x`.
    """
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    torch.addcmul(x * angles.cos, swapped, angles.sin, out=x)
