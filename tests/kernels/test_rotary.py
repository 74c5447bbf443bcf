import cmath
import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace.kernels.rotary import (
    apply_rotary_,
    inverse_frequencies,
    rotary_table,
    select_angles,
)

ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}


def rotate_alone(row: list[float], position: int, theta: float) -> list[float]:
    """One head at one position, pair by pair, as complex numbers."""
    half = len(row) // 2
    turned = [
        complex(row[i], row[i + half]) * cmath.rect(1.0, position * theta ** (-i / half))
        for i in range(half)
    ]
    return [z.real for z in turned] + [z.imag for z in turned]


@pytest.mark.parametrize("head_dim", [2, 16, 64])
def test_equals_complex_rotation(head_dim: int) -> None:
    positions = [0, 1, 15, 16, 63, 100]
    x = torch.randn(len(positions), 3, head_dim)
    table = rotary_table(inverse_frequencies(head_dim, ROPE), 101)
    turned = x.clone()
    apply_rotary_(turned, select_angles(table, torch.tensor(positions)))
    for token, position in enumerate(positions):
        for head in range(3):
            expected = rotate_alone(x[token, head].tolist(), position, 10000.0)
            torch.testing.assert_close(
                turned[token, head], torch.tensor(expected), rtol=1e-4, atol=1e-5
            )


def test_slice_of_a_wider_tensor_in_place_and_bfloat16() -> None:
    wide = torch.randn(5, 6, 8).bfloat16()
    before = wide.clone()
    angles = select_angles(rotary_table(inverse_frequencies(8, ROPE), 64), torch.arange(5) * 7)
    expected = before[:, :4].float()
    apply_rotary_(expected, angles)
    apply_rotary_(wide[:, :4], angles)
    assert torch.equal(wide[:, :4], expected.bfloat16())
    assert torch.equal(wide[:, 4:], before[:, 4:])


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_scaling_equals_transformers(rope: dict[str, Any]) -> None:
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=512,
        rope_parameters=dict(rope),
    )
    expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    assert factor == 1.0
    torch.testing.assert_close(inverse_frequencies(64, rope), expected, rtol=1e-6, atol=0.0)


def test_unknown_scaling_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'yarn'"):
        inverse_frequencies(8, {"rope_type": "yarn", "rope_theta": 1e4})


def test_angles_of_large_positions_keep_their_precision() -> None:
    table = rotary_table(inverse_frequencies(64, ROPE), 32768)
    cos, _ = select_angles(table, torch.tensor([32767]))
    assert cos[0, 0, 0].item() == pytest.approx(math.cos(32767.0), abs=1e-6)
