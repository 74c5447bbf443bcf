"""Quantize matrices to 8 bits, with a scale per row."""

from headrace.kernels.quantize.reference import dequantize_rows, quantize_rows

__all__ = ["dequantize_rows", "quantize_rows"]
