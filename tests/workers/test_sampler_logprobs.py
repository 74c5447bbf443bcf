"""Reported scores against a float64 softmax, in each mode (PP22)."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.configs.sampling_params import SamplingParams
from headrace.workers.logprobs import SCORE_ROWS, reported_scores, score_tokens
from headrace.workers.protocol import TokenLogprobs
from headrace.workers.sampler import Sampler
from tests.workers.sampling_reference import (
    Array,
    log_softmax,
    make_row,
    reference_edited,
    reference_kept,
    reference_scores,
)

MODES = ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
VOCAB = 40
PROMPT, OUTPUTS = [3, 4, 5, 6], [6, 7, 7]
CASES: list[dict[str, Any]] = [
    {},
    {"top_p": 0.6},
    {"top_k": 7, "min_p": 0.02},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"top_p": 0.8, "repetition_penalty": 1.2, "logit_bias": {9: 3.0, 10: -50.0}},
    {"allowed_token_ids": [1, 5, 7, 9], "presence_penalty": 0.5},
]


def random_logits(seed: int, vocab: int = VOCAB) -> Array:
    return (np.random.default_rng(seed).standard_normal(vocab) * 3).astype(np.float32)


def reference_reported(logits: Array, params: SamplingParams, mode: str) -> Array:
    """What the mode reports of every token, in float64, straight from the documentation."""
    exact = logits.astype(np.float64)
    if mode.startswith("processed"):
        exact = reference_edited(exact, params, PROMPT, OUTPUTS)
        if not params.is_greedy:
            kept = reference_kept(reference_scores(logits, params, PROMPT, OUTPUTS), params)
            scaled = np.full(len(logits), -np.inf)
            scaled[kept] = exact[kept] / params.temperature
            exact = scaled
    return exact if mode.endswith("logits") else log_softmax(exact)


def assert_entry(entry: TokenLogprobs, token_id: int, wanted: Array, num_top: int) -> None:
    """The token first, then the best in order; ranks by the scores as they are reported."""
    num_top = min(num_top, len(wanted))
    got = np.array(entry.logprobs)
    assert entry.token_ids[0] == token_id
    assert len(entry.token_ids) == len(got) == 1 + num_top
    np.testing.assert_allclose(got, wanted[entry.token_ids], atol=1e-5)
    assert got[1:].tolist() == sorted(got[1:], reverse=True)
    best = np.sort(wanted)[::-1][:num_top]
    np.testing.assert_allclose(got[1:], best, atol=1e-5)
    assert entry.rank == 1 + int((wanted > wanted[token_id] + 1e-6).sum())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("case", CASES)
def test_scores_equal_the_reference(mode: str, temperature: float, case: dict[str, Any]) -> None:
    params = SamplingParams(temperature=temperature, seed=5, **case)
    for seed, num_top in enumerate([0, 1, 5, VOCAB, 1000]):
        logits = random_logits(seed)
        row = make_row(params, 0, None, num_top, vocab=VOCAB, prompt=PROMPT, outputs=OUTPUTS)
        (sampled,) = Sampler(mode).sample(torch.from_numpy(logits)[None], [row])  # type: ignore[arg-type]
        assert sampled.logprobs is not None
        wanted = reference_reported(logits, params, mode)
        assert math.isfinite(sampled.logprobs.logprobs[0])
        assert_entry(sampled.logprobs, sampled.token_id, wanted, num_top)


@pytest.mark.parametrize("mode", MODES)
def test_modes_do_not_change_the_tokens(mode: str) -> None:
    rows, logits = [], []
    for i, case in enumerate(CASES * 8):
        params = SamplingParams(temperature=i % 3 / 2, seed=i, **case)
        rows.append(
            make_row(params, i % 2, None, i % 4, vocab=VOCAB, prompt=PROMPT, outputs=OUTPUTS)
        )
        logits.append(torch.from_numpy(random_logits(i)))
    batch = torch.stack(logits)
    before = batch.clone()
    plain = [row.token_id for row in Sampler().sample(batch, rows)]
    assert [row.token_id for row in Sampler(mode).sample(batch, rows)] == plain  # type: ignore[arg-type]
    assert torch.equal(batch, before)


def test_processed_modes_report_masked_tokens_as_minus_infinity() -> None:
    """At a fixed place: after all others, lower ids first."""
    params = SamplingParams(seed=1, allowed_token_ids=[2, 4])
    row = make_row(params, 0, 0, 4, vocab=6)
    logits = torch.tensor([[9.0, 8.0, 1.0, 7.0, 1.0, 9.0]])
    (sampled,) = Sampler("processed_logprobs").sample(logits, [row])
    assert sampled.logprobs is not None
    assert sampled.logprobs.token_ids[1:] == [2, 4, 0, 1]
    assert sampled.logprobs.logprobs[3:] == [-math.inf, -math.inf]
    assert sampled.logprobs.rank == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-6, 1e-5, 1e-3, 0.1, 0.5, 1.0, 1.5, 2.0])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e38])
def test_pp27_sweep(mode: str, temperature: float, scale: float) -> None:
    """The sampled token's score is finite, and no score is NaN or +Inf."""
    logits = torch.tensor([-1.0, 0.25, 1.0, 0.5, -0.5, 0.999]).mul(scale).expand(20, 6)
    params = SamplingParams(
        temperature=temperature, top_p=0.95, min_p=0.01, seed=9, repetition_penalty=1.1,
        frequency_penalty=0.1, logit_bias={1: 0.5},
    )  # fmt: skip
    rows = [make_row(params, 0, i, 6, vocab=6, prompt=[0, 2]) for i in range(20)]
    for sampled in Sampler(mode).sample(logits, rows):  # type: ignore[arg-type]
        assert sampled.fault is None and sampled.logprobs is not None
        values = sampled.logprobs.logprobs
        assert not any(math.isnan(value) or value == math.inf for value in values)
        assert math.isfinite(values[0]) or (mode == "raw_logprobs" and scale == 1e38)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    num_rows=st.integers(1, 5),
    vocab=st.sampled_from([1, 7, 300]),
    num_top=st.sampled_from([0, 1, 3, 20, 300, 1000]),
    rounded=st.booleans(),
)
def test_entries_equal_a_plain_sort(
    seed: int, num_rows: int, vocab: int, num_top: int, rounded: bool
) -> None:
    """Ties by lower id, whatever topk does with them."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((num_rows, vocab)) * 3).astype(np.float32)
    logits = logits.round() if rounded else logits
    chosen = rng.integers(0, vocab, num_rows)
    scores = torch.from_numpy(logits)
    entries = score_tokens(scores, torch.from_numpy(chosen), num_top)
    for entry, row, token in zip(entries, logits, chosen.tolist(), strict=True):
        order = sorted(range(vocab), key=lambda t: (-row[t], t))
        assert entry.token_ids == [token, *order[:num_top]]
        assert entry.logprobs == row[entry.token_ids].tolist()
        assert entry.rank == 1 + int((row > row[token]).sum())


def test_scores_do_not_depend_on_how_many_rows_are_scored_at_once() -> None:
    logits = torch.randn(3 * SCORE_ROWS, 5003, generator=torch.Generator().manual_seed(0))
    token_ids = torch.arange(len(logits))
    together = score_tokens(reported_scores(logits, "raw_logprobs"), token_ids, 4)
    for i in range(0, len(logits), 7):
        part = reported_scores(logits[i : i + 1], "raw_logprobs")
        assert score_tokens(part, token_ids[i : i + 1], 4)[0] == together[i]


def test_no_scores_unless_asked() -> None:
    row = make_row(SamplingParams(temperature=0.0), vocab=3)
    for mode in MODES:
        assert Sampler(mode).sample(torch.zeros(1, 3), [row])[0].logprobs is None  # type: ignore[arg-type]
