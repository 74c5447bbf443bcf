"""Dequantize the block formats of GGUF files."""

from headrace.kernels.dequantize.reference import SUPPORTED_TYPES, dequantize
from headrace.kernels.dequantize.stored_matrix import StoredMatrix

__all__ = ["SUPPORTED_TYPES", "StoredMatrix", "dequantize"]
