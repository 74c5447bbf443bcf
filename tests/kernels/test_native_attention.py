"""Native attention: truth, and bitwise equal results for any chunks, batch mates and threads."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from headrace.kernels.native import NativeKernels, load_kernels
from tests.kernels.attention_cases import Cache, queries
from tests.kernels.conftest import Amx
from tests.kernels.native_ops import (
    AttentionCall,
    available_isas,
    bits,
    packed_pages,
    unpacked_pages,
)

BF16, F16, F32, INT8 = torch.bfloat16, torch.float16, torch.float32, torch.int8

pytestmark = pytest.mark.skipif(not available_isas(), reason="no native kernels on this machine")


EMULATED_AMX = "emulated amx"


@pytest.fixture(scope="module", params=(*available_isas(), EMULATED_AMX))
def make_kernels(request: pytest.FixtureRequest) -> Callable[[int], NativeKernels]:
    """Makes kernels of one instruction set with some number of threads."""
    if request.param == EMULATED_AMX:
        if "avx512vnni" not in available_isas():
            pytest.skip("this machine has no AVX-512 VNNI")
        return Amx(request.getfixturevalue("emulated_amx")).kernels

    def load(num_threads: int) -> NativeKernels:
        loaded = load_kernels(request.param, num_threads)
        assert loaded is not None
        return loaded

    return load


@pytest.fixture(scope="module")
def kernels(make_kernels: Callable[[int], NativeKernels]) -> NativeKernels:
    return make_kernels(2)


def chunk_starts(length: int, size: int, block_size: int) -> list[int]:
    """All chunks of a short sequence; of a long one, the ends and the boundaries of parts."""
    starts = list(range(0, length, size))
    if len(starts) <= 120:
        return starts
    return [s for s in starts if min(s, length - s, abs(s - 512), abs(s - 1024)) < 9]


def check_chunks(
    kernels: NativeKernels, cache: Cache, query: torch.Tensor, tolerance: float
) -> None:
    """Near the truth as a whole, and the same bits in chunks."""

    def chunk(start: int, end: int) -> torch.Tensor:
        sequence = [cache.sequence(0, end, end - start)]
        return cache.call.attend(kernels, query[start:end], cache.packed, sequence)

    length = len(query)
    whole = chunk(0, length)
    expected = cache.exact(query)
    torch.testing.assert_close(whole.double(), expected, rtol=tolerance, atol=tolerance)
    for size in (1, 3, 16, 17, 64):
        for start in chunk_starts(length, size, cache.call.block_size):
            end = min(length, start + size)
            np.testing.assert_array_equal(bits(chunk(start, end)), bits(whole[start:end]))


CASES = (  # query heads, K and V heads, head_dim, block size, length, window, soft cap, sinks
    (9, 3, 64, 16, 200, None, None, False),
    (9, 3, 64, 16, 1100, None, None, False),
    (4, 1, 256, 16, 150, 50, None, False),
    (6, 2, 8, 4, 100, 20, None, True),
    (2, 2, 80, 32, 130, None, 20.0, False),
    (4, 1, 32, 1, 530, 400, None, False),
    (3, 1, 16, 48, 1300, 700, None, True),
    (8, 1, 128, 16, 140, None, None, True),
    (32, 1, 96, 32, 70, 33, 30.0, False),
    (1, 1, 10, 5, 80, None, None, False),
)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "length", "window", "soft_cap", "has_sinks"), CASES
)
def test_near_the_truth_in_any_chunks(
    kernels: NativeKernels,
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    length: int,
    window: int | None,
    soft_cap: float | None,
    has_sinks: bool,
) -> None:
    sinks = torch.linspace(-3.0, 9.0, heads) if has_sinks else None
    call = AttentionCall(kv_heads, dim, block_size, window, soft_cap, sinks)
    check_chunks(kernels, Cache(call, [length]), queries(length, heads, dim), 0.02)


FORMATS = (  # rows, cache, tolerance beside values of about 1
    (BF16, INT8, 0.04),
    (F16, F16, 2e-3),
    (F16, INT8, 0.03),
    (F32, F32, 1e-5),
    (F32, BF16, 1e-5),
    (F32, F16, 1e-5),
    (F32, INT8, 0.03),
)


@pytest.mark.parametrize(("rows", "dtype", "tolerance"), FORMATS)
@pytest.mark.parametrize(("dim", "block_size"), ((64, 16), (80, 48), (24, 4)))
def test_formats_of_rows_and_cache(
    kernels: NativeKernels,
    rows: torch.dtype,
    dtype: torch.dtype,
    tolerance: float,
    dim: int,
    block_size: int,
) -> None:
    """int8 beside the values that were written: what it loses is part of its tolerance."""
    call = AttentionCall(2, dim, block_size, window=90, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))
    cache = Cache(call, [140], rows, dtype, kernels)
    check_chunks(kernels, cache, queries(140, 4, dim, rows), tolerance)


@pytest.mark.parametrize("rows", (BF16, F16, F32))
@pytest.mark.parametrize(("dim", "block_size"), ((64, 16), (10, 5), (6, 1)))
def test_what_is_written(
    kernels: NativeKernels, rows: torch.dtype, dim: int, block_size: int
) -> None:
    """New keys and values go to their places, and nowhere else."""
    call = AttentionCall(3, dim, block_size)
    expected = Cache(call, [37], rows, rows)
    packed = torch.full_like(expected.packed, torch.nan)
    key_value = torch.stack((expected.keys[0], expected.values[0]), dim=1)
    for start, end in ((0, 20), (20, 21), (21, 37)):
        sequence = expected.sequence(0, end, end - start)
        call.write(kernels, key_value[start:end], packed, sequence)
    torch.testing.assert_close(packed, expected.packed, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", (BF16, F32))
@pytest.mark.parametrize("block_size", (16, 5))
def test_int8_has_a_scale_per_token_and_head(
    kernels: NativeKernels, rows: torch.dtype, block_size: int
) -> None:
    call, length = AttentionCall(2, 16, block_size), 23
    cache = Cache(call, [length], rows, INT8, kernels)
    num_values = 2 * block_size * 2 * 16
    numbers = cache.packed[:, :num_values].contiguous().view(-1, 32)
    plain = unpacked_pages(numbers, block_size, 2, rows)
    scales = cache.packed[:, num_values:].contiguous().view(F32).view(-1, 2, 2, block_size)
    slots = torch.from_numpy(cache.slots[0])
    for offset, index, want in ((0, 0, cache.keys[0]), (block_size, 1, cache.values[0])):
        got = plain[slots + offset].view(length, 2, 16)
        scale = scales[slots // (2 * block_size), :, index, slots % (2 * block_size)]
        largest = want.float().abs().amax(2)
        torch.testing.assert_close(scale, largest / 127, rtol=1e-6, atol=0)
        assert (got.abs().amax(2) == 127).all()
        error = (got * scale[:, :, None] - want.float()).abs()
        assert (error <= 0.5001 * scale[:, :, None]).all()


@pytest.mark.parametrize("dtype", (BF16, INT8))
def test_any_batch_mates_and_threads(
    make_kernels: Callable[[int], NativeKernels], kernels: NativeKernels, dtype: torch.dtype
) -> None:
    """One token each, of which many share threads, and chunks between them."""
    lengths = [1, 700, 64, 65, 130, 40, 1030, 17, 33, 5]
    counts = [1, 1, 1, 1, 1, 1, 1, 17, 2, 5]
    call = AttentionCall(3, 64)
    cache = Cache(call, lengths, BF16, dtype, kernels)
    query = queries(sum(counts), 9, 64)
    sequences = [cache.sequence(i, lengths[i], counts[i]) for i in range(len(lengths))]
    batch = call.attend(kernels, query, cache.packed, sequences)
    parts = query.split(counts)
    alone = [
        call.attend(kernels, q, cache.packed, [sequence])
        for q, sequence in zip(parts, sequences, strict=True)
    ]
    np.testing.assert_array_equal(bits(torch.cat(alone)), bits(batch))
    for num_threads in (1, 3):
        result = call.attend(make_kernels(num_threads), query, cache.packed, sequences)
        np.testing.assert_array_equal(bits(result), bits(batch))


@pytest.mark.parametrize("value", (torch.nan, torch.inf))
@pytest.mark.parametrize(("rows", "dtype"), ((BF16, BF16), (F32, F32), (BF16, INT8)))
@pytest.mark.parametrize("block_size", (16, 4))
def test_what_is_not_finite_is_seen_by_later_queries_only(
    kernels: NativeKernels, value: float, rows: torch.dtype, dtype: torch.dtype, block_size: int
) -> None:
    length, position, window = 150, 77, 60
    call = AttentionCall(2, 64, block_size, window)
    cache, query = Cache(call, [length], rows, dtype, kernels), queries(length, 4, 64, rows)
    sequence = cache.sequence(0, length, length)
    want = call.attend(kernels, query, cache.packed, [sequence])
    key_value = torch.stack((cache.keys[0], cache.values[0]), dim=1)[position : position + 1]
    for poisoned in ((0,), (1,), (0, 1)):
        changed = key_value.clone()
        changed[:, poisoned, :, 3] = value
        call.write(kernels, changed, cache.packed, cache.sequence(0, position + 1, 1))
        result = call.attend(kernels, query, cache.packed, [sequence])
        np.testing.assert_array_equal(bits(result[:position]), bits(want[:position]))
        behind = position + window
        np.testing.assert_array_equal(bits(result[behind:]), bits(want[behind:]))
        if value != torch.inf or poisoned != (0,):  # a key of Inf may give scores of -Inf
            assert not result[position:behind].isfinite().all(-1).any()


def test_queries_that_are_not_finite_spoil_themselves_only(kernels: NativeKernels) -> None:
    call, length = AttentionCall(1, 64), 100
    cache, query = Cache(call, [length]), queries(length, 3, 64)
    want = call.attend(kernels, query, cache.packed, [cache.sequence(0, length, length)])
    query[40, 1, 5] = torch.nan
    query[41, 2] = torch.inf
    result = call.attend(kernels, query, cache.packed, [cache.sequence(0, length, length)])
    spoiled = torch.zeros(length, 3, dtype=torch.bool)
    spoiled[40, 1] = spoiled[41, 2] = True
    assert result[spoiled].isnan().any(-1).all()
    np.testing.assert_array_equal(bits(result[~spoiled]), bits(want[~spoiled]))


def test_extreme_scores(kernels: NativeKernels) -> None:
    """One key far above all others takes all the weight, wherever it lies; and so may a sink."""
    call, length = AttentionCall(1, 16), 1100
    for position in (0, 63, 64, 511, 512, 1099):
        cache = Cache(call, [length])
        cache.keys[0].mul_(0.001)
        cache.keys[0][position] = 100.0
        plain = torch.full((len(cache.packed) * 32, 16), torch.nan).bfloat16()
        slots = torch.from_numpy(cache.slots[0])
        plain[slots], plain[slots + 16] = cache.keys[0][:, 0], cache.values[0][:, 0]
        packed = packed_pages(plain, 16, 1)
        query = torch.full((1, 1, 16), 30.0).bfloat16()
        sequence = [cache.sequence(0, length, 1)]
        result = call.attend(kernels, query, packed, sequence)
        torch.testing.assert_close(result[0, 0], cache.values[0][position, 0])
        sunk = AttentionCall(1, 16, sinks=torch.tensor([1e6]))
        assert sunk.attend(kernels, query, packed, sequence).abs().max() < 1e-30
        no_sink = AttentionCall(1, 16, sinks=torch.tensor([-torch.inf]))
        same = no_sink.attend(kernels, query, packed, sequence)
        np.testing.assert_array_equal(bits(same), bits(result))
