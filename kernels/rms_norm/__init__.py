"""Root-mean-square normalization."""

from headrace.kernels.rms_norm.reference import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm"]
