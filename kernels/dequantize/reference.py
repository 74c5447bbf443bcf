"""Dequantize ggml blocks with plain torch operations, in fp32 as the formats define, then cast.

A tensor is a sequence of blocks of 32 or 256 elements with their scales. Every product of scale,
sub-scale and code is exact in fp32 (fp16 has 11 significant bits, sub-scales at most 7, codes at
most 8, never more than 24 together), so the only rounding is in adding a minimum, and the result is
bitwise that of any other correct implementation. Each function shows the bytes of its block; the
formats are the structs `block_q4_0` … `block_q6_K` of ggml.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from headrace.configs.errors import ModelFileError
from headrace.configs.model_files.gguf import BLOCK_SIZES

# Elements dequantized at a time: bounds the temporaries, and is the largest operation that torch
# does not split over threads. Splitting these short operations gains little on an idle machine, and
# on a busy one each of thousands of hand-overs waits for a time slice (measured: seconds a model).
CHUNK_ELEMENTS = 1 << 15


def dequantize(
    data: memoryview | Tensor, type_name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """The tensor stored in `data`, as a new contiguous CPU tensor of `shape` and `dtype`.

    `data` is [num_bytes], a read-only view or a uint8 tensor, blocks in row-major order of the
    elements. Raises `ModelFileError` if the type is unknown or the number of bytes is not that of
    `shape`.
    """
    num_elements = math.prod(shape)
    raw = data.numpy() if isinstance(data, Tensor) else np.frombuffer(data, np.uint8)
    if type_name not in SUPPORTED_TYPES:
        raise ModelFileError(
            f"not supported: tensor type {type_name}; supported: {', '.join(SUPPORTED_TYPES)}"
        )
    block_elements, block_bytes = BLOCK_SIZES[type_name]
    num_blocks, rest = divmod(num_elements, block_elements)
    if rest or raw.size != num_blocks * block_bytes:
        raise ModelFileError(
            f"{list(shape)} elements of type {type_name} take {block_bytes} bytes per "
            f"{block_elements} elements, but there are {raw.size} bytes. The file is corrupt: "
            "download it again"
        )
    out = torch.empty(shape, dtype=dtype)
    if type_name in _FLOAT_TYPES:
        _convert_floats(raw, _FLOAT_TYPES[type_name], out.view(-1))
    else:
        blocks = raw.reshape(num_blocks, block_bytes)
        _convert_blocks(blocks, _BLOCK_TYPES[type_name], out.view(num_blocks, block_elements))
    return out


def _convert_floats(raw: np.ndarray, source: torch.dtype, out: Tensor) -> None:
    """`raw` [num_bytes] holds numbers of type `source`; `out` is [num_elements]."""
    if source == out.dtype:
        np.copyto(out.view(torch.uint8).numpy(), raw)
        return
    size = source.itemsize
    for start in range(0, out.numel(), CHUNK_ELEMENTS):
        stop = min(start + CHUNK_ELEMENTS, out.numel())
        out[start:stop] = _copy(raw[start * size : stop * size]).view(source).float()


def _convert_blocks(
    blocks: np.ndarray, dequantize_blocks: Callable[[Tensor, Tensor], None], out: Tensor
) -> None:
    """`blocks` is uint8 [num_blocks, block_bytes]; `out` is [num_blocks, block_elements]."""
    num_blocks, block_elements = out.shape
    step = CHUNK_ELEMENTS // block_elements
    scratch = torch.empty(min(step, num_blocks), block_elements)
    for start in range(0, num_blocks, step):
        stop = min(start + step, num_blocks)
        values = scratch[: stop - start]
        dequantize_blocks(_copy(blocks[start:stop]), values)
        out[start:stop] = values


def _copy(raw: np.ndarray) -> Tensor:
    """A private copy: torch has no read-only tensors, so it cannot look at a read-only mapping."""
    return torch.from_numpy(raw.copy())


# Functions below read `raw`, uint8 [n, block_bytes], and write `out`, fp32 [n, block_elements].


def _halves(raw: Tensor, offset: int, count: int) -> tuple[Tensor, ...]:
    """`count` fp16 numbers from byte `offset` of each block, as fp32 [n, 1] each."""
    halves = raw[:, offset : offset + 2 * count].contiguous().view(torch.float16)
    return halves.float().split(1, dim=1)


def _nibbles(raw: Tensor, offset: int) -> Tensor:
    """Codes [n, 32]: the low halves of the 16 bytes at `offset`, then the high halves."""
    packed = raw[:, offset : offset + 16].contiguous()
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _fifth_bits(raw: Tensor, offset: int) -> Tensor:
    """Bit j of the 32 bits at byte `offset` is the fifth bit of code j: 0 or 16, [n, 32]."""
    packed = raw[:, offset : offset + 4].numpy()
    return torch.from_numpy(np.unpackbits(packed, axis=1, bitorder="little")) << 4


def _q8_0(raw: Tensor, out: Tensor) -> None:
    """scale fp16 | 32 codes int8: x = scale * code."""
    (scale,) = _halves(raw, 0, 1)
    out.copy_(raw[:, 2:].view(torch.int8))
    out.mul_(scale)


def _q4_0(raw: Tensor, out: Tensor) -> None:
    """scale fp16 | 32 codes of 4 bits: x = scale * (code - 8)."""
    (scale,) = _halves(raw, 0, 1)
    out.copy_(_nibbles(raw, 2))
    out.sub_(8.0).mul_(scale)


def _q4_1(raw: Tensor, out: Tensor) -> None:
    """scale fp16 | minimum fp16 | 32 codes of 4 bits: x = scale * code + minimum."""
    scale, minimum = _halves(raw, 0, 2)
    out.copy_(_nibbles(raw, 4))
    out.mul_(scale).add_(minimum)


def _q5_0(raw: Tensor, out: Tensor) -> None:
    """scale fp16 | 32 fifth bits | 32 codes of 4 bits: x = scale * (code - 16)."""
    (scale,) = _halves(raw, 0, 1)
    out.copy_(_nibbles(raw, 6).bitwise_or_(_fifth_bits(raw, 2)))
    out.sub_(16.0).mul_(scale)


def _q5_1(raw: Tensor, out: Tensor) -> None:
    """scale, minimum fp16 | 32 fifth bits | 32 codes of 4 bits: x = scale * code + minimum."""
    scale, minimum = _halves(raw, 0, 2)
    out.copy_(_nibbles(raw, 8).bitwise_or_(_fifth_bits(raw, 4)))
    out.mul_(scale).add_(minimum)


def _k_scales(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum of the 8 sub-blocks of Q4_K and Q5_K, fp32 [n, 8, 1] each.

    fp16 scale and minimum of the whole block are at bytes 0 and 2; bytes 4…15 hold 8 scales and 8
    minima of 6 bits: 0…3 in the low 6 bits of bytes 0…3 (scales) and 4…7 (minima); the low 4 bits
    of 4…7 in the halves of bytes 8…11, their top 2 bits in the top bits of bytes 0…3 and 4…7.
    """
    first, second, rest = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = torch.cat((first & 63, (rest & 15) | ((first >> 6) << 4)), dim=1)
    minima = torch.cat((second & 63, (rest >> 4) | ((second >> 6) << 4)), dim=1)
    scale, minimum = _halves(raw, 0, 2)
    return (scale * scales).unsqueeze(2), (minimum * minima).unsqueeze(2)


def _q4_k(raw: Tensor, out: Tensor) -> None:
    """scale, minimum fp16 | 12 bytes of scales | 4 x 32 bytes, each with 32 low and 32 high codes.

    x = scale * sub-scale * code - minimum * sub-minimum.
    """
    packed = raw[:, 16:144].contiguous().view(-1, 4, 1, 32)
    codes = torch.cat((packed & 15, packed >> 4), dim=2).view(-1, 8, 32)
    scales, minima = _k_scales(raw)
    values = out.view(-1, 8, 32)
    values.copy_(codes)
    values.mul_(scales).sub_(minima)


def _q5_k(raw: Tensor, out: Tensor) -> None:
    """scale, minimum fp16 | 12 bytes of scales | 32 bytes of fifth bits | codes as in Q4_K.

    Bit s of fifth-bit byte l belongs to element l of sub-block s; x as in Q4_K.
    """
    packed = raw[:, 48:176].contiguous().view(-1, 4, 1, 32)
    codes = torch.cat((packed & 15, packed >> 4), dim=2).view(-1, 8, 32)
    high = raw[:, 16:48].contiguous().view(-1, 1, 32)
    shifts = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    codes |= ((high >> shifts) & 1) << 4
    scales, minima = _k_scales(raw)
    values = out.view(-1, 8, 32)
    values.copy_(codes)
    values.mul_(scales).sub_(minima)


def _q6_k(raw: Tensor, out: Tensor) -> None:
    """128 bytes of low halves | 64 bytes of high bit pairs | 16 sub-scales int8 | scale fp16.

    Each half block of 128 elements has 64 bytes `low` and 32 bytes `high`: codes 0…63 have the low,
    64…127 the high nibbles of `low`; pair p of bits of `high` belongs to codes 32 p … 32 p + 31.
    x = scale * sub-scale * (code - 32), a sub-scale for 16 elements.
    """
    low = raw[:, :128].contiguous().view(-1, 2, 1, 64)
    codes = torch.cat((low & 15, low >> 4), dim=2).view(-1, 2, 4, 32)
    high = raw[:, 128:192].contiguous().view(-1, 2, 1, 32)
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8).view(1, 1, 4, 1)
    codes |= ((high >> shifts) & 3) << 4
    (scale,) = _halves(raw, 208, 1)
    scales = scale * raw[:, 192:208].view(torch.int8)
    values = out.view(-1, 16, 16)
    values.copy_(codes.view(-1, 16, 16))
    values.sub_(32.0).mul_(scales.unsqueeze(2))


_FLOAT_TYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)
_BLOCK_TYPES: Mapping[str, Callable[[Tensor, Tensor], None]] = MappingProxyType(
    {
        "Q8_0": _q8_0,
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
    }
)
SUPPORTED_TYPES: tuple[str, ...] = (*_FLOAT_TYPES, *_BLOCK_TYPES)
