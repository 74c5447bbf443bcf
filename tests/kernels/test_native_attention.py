"""Native attention: truth, and bitwise equal results for any chunks, batch mates and threads."""

import numpy as np
import pytest
import torch

from headrace.kernels.attention import SequenceSlots, block_slots
from headrace.kernels.native import NativeKernels, load_kernels
from tests.kernels.native_ops import attention, available_isas, bits

BLOCK_SIZE = 16

pytestmark = pytest.mark.skipif(not available_isas(), reason="no native kernels on this machine")


@pytest.fixture(scope="module", params=available_isas())
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    loaded = load_kernels(request.param, 2)
    assert loaded is not None
    return loaded


class Cache:
    """Pages with random K and V in shuffled blocks; everything else in them is NaN."""

    def __init__(self, lengths: list[int], num_kv_heads: int, head_dim: int) -> None:
        generator = torch.Generator().manual_seed(0)
        counts = [-(-length // BLOCK_SIZE) for length in lengths]
        ids = (torch.randperm(sum(counts), generator=generator) + 1).split(counts)
        size = num_kv_heads * head_dim
        num_rows = 2 * BLOCK_SIZE * (sum(counts) + 1)
        self.pages = torch.full((num_rows, size), torch.nan).bfloat16()
        self.slots, self.keys, self.values = [], [], []
        for length, blocks in zip(lengths, ids, strict=True):
            slots = block_slots(blocks.tolist(), BLOCK_SIZE)[:length]
            rows = torch.from_numpy(slots)
            for offset, kept in ((0, self.keys), (BLOCK_SIZE, self.values)):
                data = torch.randn(length, size, generator=generator).bfloat16()
                self.pages[rows + offset] = data
                kept.append(data.view(length, num_kv_heads, head_dim))
            self.slots.append(slots)

    def sequence(self, index: int, end: int, num_queries: int) -> SequenceSlots:
        return SequenceSlots(self.slots[index][:end], num_queries)


def queries(length: int, num_heads: int, head_dim: int, seed: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(length, num_heads, head_dim, generator=generator)).bfloat16()


def exact(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """All queries of one sequence in float64."""
    copies = query.shape[1] // keys.shape[1]
    q, k, v = (t.double().transpose(0, 1) for t in (query, keys, values))
    k, v = k.repeat_interleave(copies, 0), v.repeat_interleave(copies, 0)
    scores = q @ k.transpose(1, 2) * query.shape[2] ** -0.5
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    ages = torch.arange(len(keys))[:, None] - torch.arange(len(keys))
    hidden = (ages < 0) | (ages >= (window or len(keys)))
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1)


CASES = (  # heads, K and V heads, head_dim, length, window, soft cap
    (9, 3, 64, 200, None, None),
    (4, 1, 256, 150, 50, None),
    (6, 2, 8, 100, 20, None),
    (2, 2, 80, 130, None, 20.0),
    (9, 3, 64, 1100, None, None),
    (4, 1, 32, 1300, 700, None),
)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "length", "window", "soft_cap"), CASES)
def test_near_the_truth_in_any_chunks(
    kernels: NativeKernels,
    heads: int,
    kv_heads: int,
    dim: int,
    length: int,
    window: int | None,
    soft_cap: float | None,
) -> None:
    cache, query = Cache([length], kv_heads, dim), queries(length, heads, dim)

    def chunk(start: int, end: int) -> torch.Tensor:
        sequence = [cache.sequence(0, end, end - start)]
        q = query[start:end]
        return attention(kernels, q, cache.pages, sequence, BLOCK_SIZE, kv_heads, window, soft_cap)

    whole = chunk(0, length)
    expected = exact(query, cache.keys[0], cache.values[0], window, soft_cap)
    torch.testing.assert_close(whole.double(), expected, rtol=0.02, atol=0.02)
    for size in (1, 3, 16, 17, 64):
        starts = range(0, length, size)
        if len(starts) > 200:  # the ends and the boundaries of parts are enough
            starts = [s for s in starts if min(s, length - s, abs(s - 512), abs(s - 1024)) < 9]
        for start in starts:
            end = min(length, start + size)
            np.testing.assert_array_equal(bits(chunk(start, end)), bits(whole[start:end]))


def test_any_batch_mates_and_threads(kernels: NativeKernels) -> None:
    """One token each, of which many share threads, and chunks between them."""
    lengths = [1, 700, 64, 65, 130, 40, 1030, 17, 33, 5]
    counts = [1, 1, 1, 1, 1, 1, 1, 17, 2, 5]
    cache = Cache(lengths, 3, 64)
    query = queries(sum(counts), 9, 64)
    sequences = [cache.sequence(i, lengths[i], counts[i]) for i in range(len(lengths))]
    batch = attention(kernels, query, cache.pages, sequences, BLOCK_SIZE, 3)
    parts = query.split(counts)
    alone = [
        attention(kernels, q, cache.pages, [sequence], BLOCK_SIZE, 3)
        for q, sequence in zip(parts, sequences, strict=True)
    ]
    np.testing.assert_array_equal(bits(torch.cat(alone)), bits(batch))
    for num_threads in (1, 3):
        others = load_kernels(kernels.isa, num_threads)
        assert others is not None
        result = attention(others, query, cache.pages, sequences, BLOCK_SIZE, 3)
        np.testing.assert_array_equal(bits(result), bits(batch))


@pytest.mark.parametrize("value", (torch.nan, torch.inf))
def test_what_is_not_finite_is_seen_by_later_queries_only(
    kernels: NativeKernels, value: float
) -> None:
    length, position = 150, 77
    cache, query = Cache([length], 2, 64), queries(length, 4, 64)

    def run() -> torch.Tensor:
        sequence = [cache.sequence(0, length, length)]
        return attention(kernels, query, cache.pages, sequence, BLOCK_SIZE, 2)

    want = run()
    slot = int(cache.slots[0][position])
    for row in (slot, slot + BLOCK_SIZE):  # K, then V as well
        cache.pages[row] = value
        result = run()
        np.testing.assert_array_equal(bits(result[:position]), bits(want[:position]))
        assert not result[position:].isfinite().all(-1).any()
