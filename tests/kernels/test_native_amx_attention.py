"""Attention by tiles, bit for bit that of plain AVX-512: emulated, and on AMX where it is there."""

import pytest
import torch

from headrace.kernels.native import NativeKernels
from tests.kernels.attention_cases import Cache, queries
from tests.kernels.conftest import Amx
from tests.kernels.native_ops import AttentionCall, assert_same, available_isas

BF16, INT8 = torch.bfloat16, torch.int8
DIMS = (32, 64, 80, 96, 128, 256)

pytestmark = pytest.mark.skipif(
    "avx512vnni" not in available_isas(), reason="no native kernels with AVX-512 VNNI"
)


def exacting(
    call: AttentionCall, plain: NativeKernels, length: int, heads: int, dtype: torch.dtype = BF16
) -> tuple[Cache, torch.Tensor]:
    """Products that cancel: another order of sums shows a hundred times as often."""
    cache, query = Cache(call, [length], BF16, dtype, plain), queries(length, heads, call.head_dim)
    keys, values = cache.keys[0], cache.values[0]
    for factor in (query, keys):
        factor[..., ::8] *= 32.0
        factor[..., 4::8] = factor[..., ::8]
    keys[..., 4::8] *= -1.0
    values[::8] *= 1024.0
    keys[4::8], values[4::8] = keys[::8], -values[::8]
    key_value = torch.stack((keys, values), dim=1)
    call.write(plain, key_value, cache.packed, cache.sequence(0, length, length))
    return cache, query


def check_chunks(
    kernels: NativeKernels, plain: NativeKernels, cache: Cache, query: torch.Tensor
) -> None:
    """Chunks around the boundaries of groups, tiles and parts, and the whole."""
    length = len(query)
    for size in (1, 3, 16, 17, 64, length):
        for end in {size, 17, 33, 64, 81, 512, 513, 535, length}:
            if not size <= end <= length:
                continue
            chunk, sequence = query[end - size : end], [cache.sequence(0, end, size)]
            got = cache.call.attend(kernels, chunk, cache.packed, sequence)
            assert_same(got, cache.call.attend(plain, chunk, cache.packed, sequence))


CASES = (  # query heads, K and V heads, block size, window, soft cap, sinks, format of the cache
    (8, 1, 16, None, None, False, BF16),
    (9, 3, 64, None, None, True, BF16),
    (6, 2, 32, 77, 20.0, False, BF16),
    (7, 1, 4, 40, None, False, BF16),
    (16, 2, 48, None, None, False, INT8),
)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "block_size", "window", "soft_cap", "has_sinks", "dtype"), CASES
)
def test_chunks(
    amx: Amx,
    plain: NativeKernels,
    heads: int,
    kv_heads: int,
    block_size: int,
    window: int | None,
    soft_cap: float | None,
    has_sinks: bool,
    dtype: torch.dtype,
    dim: int,
) -> None:
    sinks = torch.linspace(-3.0, 9.0, heads) if has_sinks else None
    call = AttentionCall(kv_heads, dim, block_size, window, soft_cap, sinks)
    cache, query = exacting(call, plain, 560, heads, dtype)
    check_chunks(amx.kernels(), plain, cache, query)


@pytest.mark.parametrize("dim", (16, 48, 64, 112))
def test_any_number_of_rows(amx: Amx, plain: NativeKernels, dim: int) -> None:
    """Around every boundary of tiles and pairs of them."""
    kernels, length = amx.kernels(), 152
    call = AttentionCall(1, dim, 16)
    cache, query = exacting(call, plain, length, 1)
    for size in range(1, 101):
        chunk, sequence = query[-size:], [cache.sequence(0, length, size)]
        want = call.attend(plain, chunk, cache.packed, sequence)
        assert_same(call.attend(kernels, chunk, cache.packed, sequence), want)


@pytest.mark.parametrize("dim", (64, 80))
@pytest.mark.parametrize("block_size", (16, 64, 5))
def test_what_is_not_finite(amx: Amx, plain: NativeKernels, block_size: int, dim: int) -> None:
    """In keys, in values and in queries; sums that overflow, too."""
    length = 150
    call = AttentionCall(2, dim, block_size, window=60)
    cache, query = Cache(call, [length]), queries(length, 8, dim)
    key_value = torch.stack((cache.keys[0], cache.values[0]), dim=1)
    values = (torch.nan, torch.inf, -torch.inf, 3e38)
    for position, value in zip((20, 60, 100, 149), values, strict=True):
        key_value[position, position % 2, :, 3:9] = value
    call.write(plain, key_value, cache.packed, cache.sequence(0, length, length))
    query[40, 1, 5], query[41, 2], query[90] = torch.nan, torch.inf, 3e38
    check_chunks(amx.kernels(), plain, cache, query)


@pytest.mark.parametrize("dim", (64, 80))
@pytest.mark.parametrize("block_size", (16, 64))
def test_what_is_tiny(amx: Amx, plain: NativeKernels, block_size: int, dim: int) -> None:
    """Products and sums around the smallest normal number: flushing leaves zeros with signs."""
    length = 150
    call = AttentionCall(2, dim, block_size)
    cache, query = Cache(call, [length]), queries(length, 8, dim) * 2.0**-63
    key_value = torch.stack((cache.keys[0], cache.values[0]), dim=1)
    key_value[:, 0] *= 2.0**-63
    key_value[:, 1] *= 2.0**-121
    key_value[::3] *= -0.0
    key_value[1::5, 1] = -(2.0**-126)
    call.write(plain, key_value, cache.packed, cache.sequence(0, length, length))
    check_chunks(amx.kernels(), plain, cache, query)
