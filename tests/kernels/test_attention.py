"""Paged attention against dense attention in float64, one query at a time."""

import math
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from headrace.kernels.attention import (
    AttentionMetadata,
    AttentionPlanner,
    SequenceSlots,
    block_slots,
    paged_attention,
)

BLOCK_SIZE = 16
HEAD_DIM = 8


@dataclass
class Case:
    """Sequences (context length, number of queries), with their K and V of all tokens."""

    lengths: list[tuple[int, int]]
    num_heads: int
    num_kv_heads: int
    window: int | None = None
    soft_cap: float | None = None
    dtype: torch.dtype = torch.float32


def visible(context: int, queries: int, query: int, window: int | None) -> range:
    position = context - queries + query
    first = 0 if window is None else max(0, position - window + 1)
    return range(first, position + 1)


def dense(
    query: torch.Tensor, kv: torch.Tensor, tokens: range, scale: float, cap: float | None
) -> torch.Tensor:
    """[num_heads, head_dim] query over [context, 2, num_kv_heads, head_dim], all float64."""
    out = []
    group = query.shape[0] // kv.shape[2]
    for head in range(query.shape[0]):
        keys, values = kv[list(tokens), 0, head // group], kv[list(tokens), 1, head // group]
        scores = keys @ query[head] * scale
        if cap is not None:
            scores = torch.tanh(scores / cap) * cap
        out.append(scores.softmax(0) @ values)
    return torch.stack(out)


def run(case: Case, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
    """(paged result, dense result, metadata). Unused slots, those of older tokens that no query
    sees included, hold NaN.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    num_blocks = 1 + sum(-(-context // BLOCK_SIZE) for context, _ in case.lengths) + 5
    free = list(range(1, num_blocks))
    rng.shuffle(free)
    row_size = case.num_kv_heads * HEAD_DIM
    pages = torch.full((num_blocks * 2 * BLOCK_SIZE, row_size), math.nan, dtype=case.dtype)
    pages[: 2 * BLOCK_SIZE] = 0.0
    sequences, queries, new_kv, expected = [], [], [], []
    scale = HEAD_DIM**-0.5
    for context, num_queries in case.lengths:
        table = [free.pop() for _ in range(-(-context // BLOCK_SIZE))]
        slots = block_slots(table, BLOCK_SIZE)[:context]
        kv = torch.randn(context, 2, case.num_kv_heads, HEAD_DIM).to(case.dtype)
        query = torch.randn(num_queries, case.num_heads, HEAD_DIM).to(case.dtype)
        first_seen = visible(context, num_queries, 0, case.window).start
        for token in range(first_seen, context - num_queries):
            pages[slots[token]] = kv[token, 0].flatten()
            pages[slots[token] + BLOCK_SIZE] = kv[token, 1].flatten()
        sequences.append(SequenceSlots(slots, num_queries))
        queries.append(query)
        new_kv.append(kv[context - num_queries :])
        for i in range(num_queries):
            tokens = visible(context, num_queries, i, case.window)
            expected.append(dense(query[i].double(), kv.double(), tokens, scale, case.soft_cap))
    planner = AttentionPlanner(BLOCK_SIZE, case.num_kv_heads, HEAD_DIM, case.dtype, case.window)
    metadata = planner.plan(sequences)
    result = paged_attention(
        torch.cat(queries), torch.cat(new_kv), pages, metadata, scale, case.soft_cap
    )
    assert torch.equal(
        pages[: 2 * BLOCK_SIZE], torch.zeros(2 * BLOCK_SIZE, row_size).to(case.dtype)
    )
    return result, torch.stack(expected), metadata


AWKWARD = [1, 15, 16, 17, 63, 100]
DECODES = [(context, 1) for context in reversed(AWKWARD)]
CHUNKS = [(1, 1), (15, 15), (17, 2), (63, 63), (100, 17), (100, 99)]
MIXED = DECODES + CHUNKS[1:]


@pytest.mark.parametrize("lengths", [DECODES, CHUNKS, MIXED], ids=["decode", "prefill", "mixed"])
@pytest.mark.parametrize("window", [None, 1, 16, 20, 64])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 1), (6, 2), (4, 1)])
def test_equals_dense(
    lengths: list[tuple[int, int]], window: int | None, num_heads: int, num_kv_heads: int
) -> None:
    result, expected, _ = run(Case(lengths, num_heads, num_kv_heads, window))
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 20])
def test_soft_cap(window: int | None) -> None:
    result, expected, _ = run(Case(MIXED, 6, 2, window, soft_cap=0.5))
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)


def test_bfloat16() -> None:
    result, expected, _ = run(Case(MIXED, 6, 2, 20, dtype=torch.bfloat16))
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), expected, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("window", [None, 300, 700])
def test_long_chunks_are_tiled(window: int | None) -> None:
    """More queries than a tile, more keys than one block of the fused kernel."""
    result, expected, metadata = run(Case([(1200, 1), (1100, 600)], 2, 1, window))
    assert len(metadata.prefills[0].tiles) > 1
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)


def test_decodes_are_bucketed_by_length_and_memory() -> None:
    lengths = [(length, 1) for length in (1000, 900, 600, 400, 70, 60, 50, 3)]
    result, expected, metadata = run(Case(lengths, 2, 1))
    assert [(rows.start, rows.end, rows.length) for rows in metadata.decodes] == [
        (0, 3, 1000),
        (3, 4, 400),
        (4, 7, 70),
        (7, 8, 3),
    ]
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)


def test_equal_lengths_need_no_mask_and_windows_bound_what_is_read() -> None:
    _, _, metadata = run(Case([(63, 1), (63, 1), (63, 1)], 2, 1))
    assert len(metadata.decodes) == 1
    assert metadata.decodes[0].mask is None
    _, _, metadata = run(Case([(100, 1), (63, 1), (100, 10)], 2, 1, window=16))
    assert metadata.decodes[0].length == 16
    assert metadata.prefills[0].length == 16 + 9


def test_slots_of_blocks() -> None:
    assert block_slots([], 4).tolist() == []
    assert block_slots([2, 1], 4).tolist() == [16, 17, 18, 19, 8, 9, 10, 11]
    assert block_slots([1], 2).dtype == np.int64
