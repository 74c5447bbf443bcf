"""Symmetric 8-bit quantization of the rows of a matrix, as native packing does it, bit by bit."""

import torch
from torch import Tensor

_MAX_CODE = 127


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [num_rows, num_inputs] and scales float32 [num_rows, 1] of float `rows`.

    scale = largest magnitude of the row / 127 and code = row / scale to nearest even, in float32.
    A scale below the normal numbers counts as 0, with codes of 0; the scale of a row that is not
    finite is not a number.
    """
    wide = rows.float()
    largest = wide.abs().amax(dim=1, keepdim=True)
    scales = largest / _MAX_CODE
    scales[scales < torch.finfo(torch.float32).tiny] = 0.0
    scales[~largest.isfinite()] = torch.nan
    codes = (wide / scales).round().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return codes.to(torch.int8), scales


def dequantize_rows(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """code * scale in float32, rounded to `dtype`: what the quantized weights are."""
    return (codes * scales).to(dtype)
