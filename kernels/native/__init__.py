"""CPU kernels in C++ behind a plain C interface, loaded with ctypes."""

from headrace.kernels.native.interface import DrawRow, Epilogue, Format, Kind, Lanes, Op, Step
from headrace.kernels.native.kernels import FORMATS, NativeKernels, load_kernels
from headrace.kernels.native.metadata import NativeMetadata, NativePlanner
from headrace.kernels.native.packed import BLOCK_FORMATS, PackedMatrix, packed_shape

__all__ = [
    "BLOCK_FORMATS",
    "FORMATS",
    "DrawRow",
    "Epilogue",
    "Format",
    "Kind",
    "Lanes",
    "NativeKernels",
    "NativeMetadata",
    "NativePlanner",
    "Op",
    "PackedMatrix",
    "Step",
    "load_kernels",
    "packed_shape",
]
