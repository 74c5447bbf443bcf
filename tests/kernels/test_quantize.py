"""Rows in 8 bits: within half a step, exact where they can be, the same as packing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.kernels.native import Format, PackedMatrix, load_kernels
from headrace.kernels.quantize import dequantize_rows, quantize_rows
from tests.kernels.native_ops import available_isas


@given(st.integers(1, 70), st.integers(1, 5), st.integers(0, 99))
def test_within_half_a_step(num_inputs: int, num_rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, num_inputs, generator=generator) * 10.0 ** (seed % 7 - 3)
    codes, scales = quantize_rows(rows)
    assert codes.dtype is torch.int8 and codes.shape == rows.shape
    assert scales.dtype is torch.float32 and scales.shape == (num_rows, 1)
    assert (codes.abs().amax(1) == 127).all()
    error = (dequantize_rows(codes, scales, torch.float32) - rows).abs()
    assert (error <= 0.5001 * scales).all()


def test_rows_of_nothing_and_of_what_is_not_finite() -> None:
    rows = torch.tensor([[0.0, 0.0], [1e-44, -1e-42], [torch.inf, 1.0], [1.0, torch.nan]])
    codes, scales = quantize_rows(rows)
    assert not codes.any()
    assert scales[:2].eq(0).all() and scales[2:].isnan().all()


@pytest.mark.skipif(not available_isas(), reason="no native kernels on this machine")
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16, torch.float64))
def test_packing_gives_the_same_bits(dtype: torch.dtype) -> None:
    kernels = load_kernels("auto", 2)
    assert kernels is not None
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(70, 77, generator=generator).to(dtype)
    rows[:, ::5] *= torch.arange(70)[:, None]  # some halves between two codes, some zeros
    rows[9] = 0
    data = torch.zeros(kernels.packed_bytes(Format.INT8, 70, 77), dtype=torch.uint8)
    matrix = PackedMatrix(data, Format.INT8, 70, 77, kernels)
    matrix.fill(rows[:33], 0)
    matrix.fill(rows[33:], 33)
    expected = dequantize_rows(*quantize_rows(rows), torch.float32)
    assert torch.equal(matrix.lookup(torch.arange(70), torch.float32), expected)
