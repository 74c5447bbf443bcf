"""RMS normalization in torch: y = x / sqrt(mean(x^2) + eps) * w.

Source: Zhang and Sennrich 2019, arXiv:1910.07467.

All arithmetic is in float32 with one rounding at the end. Gemma's form multiplies by 1 + w: its
layers add the 1 to their float32 weight once.
"""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalize the last axis of `x` [..., size].

    `weight` is float32, [size] or broadcastable to `x` (one weight per head, for query and key
    norms). Returns the dtype and shape of `x`.
    """
    wide = x.float()
    inverse = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * inverse).mul_(weight).to(x.dtype)
