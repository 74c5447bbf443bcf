"""RMS normalization in torch: y = x / sqrt(mean(x^2) + eps) * w (Zhang and Sennrich 2019,
arXiv:1910.07467).

All arithmetic is in float32 with one rounding at the end. Gemma's form multiplies by 1 + w;
`unit_offset` does that, and a caller that runs it often adds the 1 to its float32 weight once
instead (the sum is exact to the same bit).
"""

import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False
) -> torch.Tensor:
    """Normalize the last axis of `x` [..., size].

    `weight` is float32, [size] or broadcastable to `x` (one weight per head, for query and key
    norms). Returns the dtype and shape of `x`.
    """
    scale = weight + 1.0 if unit_offset else weight
    wide = x.float()
    inverse = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * inverse).mul_(scale).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add `x` to the residual stream and normalize the sum: returns (normalized, new residual).

    The sum is rounded to the dtype of `residual` before it is normalized, so the residual stream
    has one dtype whichever layers are fused.
    """
    total = residual + x
    return rms_norm(total, weight, eps), total
