"""Dequantize the block formats of GGUF files."""

from headrace.kernels.dequantize.reference import SUPPORTED_TYPES, dequantize

__all__ = ["SUPPORTED_TYPES", "dequantize"]
