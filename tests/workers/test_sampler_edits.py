"""Penalties, bias, allowed ids and bad words against brute force over random histories."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.configs.sampling_params import SamplingParams
from headrace.workers.logit_edits import LogitEdits, LogitRules, apply_edits
from headrace.workers.sampler import Sampler
from tests.workers.sampling_reference import (
    Array,
    make_row,
    reference_edited,
    reference_sample,
    reference_scores,
)

VOCAB = 12
ids = st.integers(0, VOCAB - 1)
histories = st.lists(ids, max_size=12)


@st.composite
def edited_params(draw: st.DrawFn) -> SamplingParams:
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])),
        top_p=draw(st.sampled_from([1.0, 0.8])),
        seed=draw(st.integers(0, 2**64 - 1)),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7, 1e-300, 1e300])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.7, -2.0, 2.0])),
        presence_penalty=draw(st.sampled_from([0.0, 1.1, -2.0])),
        logit_bias=draw(st.none() | st.dictionaries(ids, st.floats(-1e6, 1e6), max_size=4)),
        allowed_token_ids=draw(st.none() | st.lists(ids, min_size=4, max_size=9)),
        min_tokens=draw(st.sampled_from([0, 4])),
        max_tokens=None,
        stop_token_ids=draw(st.lists(ids, max_size=2)),
    )
    words = st.lists(st.integers(0, 3), min_size=1, max_size=4)
    params._bad_words_token_ids = draw(st.none() | st.lists(words, max_size=5))
    return params


def random_logits(num_rows: int, seed: int, rounded: bool = False) -> torch.Tensor:
    values = np.random.default_rng(seed).standard_normal((num_rows, VOCAB)) * 3
    return torch.from_numpy((values.round() if rounded else values).astype(np.float32))


def make_edits(params: SamplingParams, prompt: list[int], outputs: list[int]) -> LogitEdits:
    return LogitEdits(LogitRules(params, VOCAB), np.array(prompt, dtype=np.int64), outputs)


def edited(logits: torch.Tensor, edits: list[LogitEdits | None]) -> Array:
    scores = logits.clone()
    apply_edits(scores, edits)
    return scores.numpy()


@settings(deadline=None, max_examples=150)
@given(
    rows=st.lists(st.tuples(edited_params(), histories, histories), min_size=1, max_size=5),
    seed=st.integers(0, 2**32),
    rounded=st.booleans(),
)
def test_edits_equal_brute_force(
    rows: list[tuple[SamplingParams, list[int], list[int]]], seed: int, rounded: bool
) -> None:
    """Bit for bit, in one batch, and the tokens drawn from them, too."""
    logits = random_logits(len(rows), seed, rounded)
    with np.errstate(over="ignore"):
        wanted = [
            reference_edited(logits[i].numpy(), params, prompt, outputs)
            for i, (params, prompt, outputs) in enumerate(rows)
        ]
    got = edited(logits, [make_edits(*row) for row in rows])
    np.testing.assert_array_equal(got, np.array(wanted))
    sampling_rows = [
        make_row(params, i, vocab=VOCAB, prompt=prompt, outputs=outputs)
        for i, (params, prompt, outputs) in enumerate(rows)
    ]
    for i, sampled in enumerate(Sampler().sample(logits, sampling_rows)):
        params, prompt, outputs = rows[i]
        if (wanted[i] == -np.inf).all():
            assert sampled.fault is not None and sampled.fault.code == "request_failed"
            assert "leave nothing to sample" in sampled.fault.message
            continue
        with np.errstate(over="ignore"):
            expected = reference_sample(logits[i].numpy(), params, i, prompt, outputs)
        assert (sampled.token_id, sampled.fault) == (expected, None)


@settings(deadline=None, max_examples=80)
@given(
    params=edited_params(),
    prompt=histories,
    outputs=histories,
    cuts=st.lists(st.integers(0, 12), max_size=4),
    seed=st.integers(0, 2**32),
)
def test_state_that_grew_equals_state_that_was_rebuilt(
    params: SamplingParams, prompt: list[int], outputs: list[int], cuts: list[int], seed: int
) -> None:
    logits = random_logits(1, seed)
    places = sorted({0, len(outputs), *(cut for cut in cuts if cut < len(outputs))})
    grown = make_edits(params, prompt, [])
    for start, end in itertools.pairwise(places):
        grown.extend(outputs[start:end])
    rebuilt = make_edits(params, prompt, outputs)
    assert grown.is_active == rebuilt.is_active
    np.testing.assert_array_equal(edited(logits, [grown]), edited(logits, [rebuilt]))


def test_no_row_depends_on_the_others() -> None:
    rng = np.random.default_rng(1)
    vocab = 5003
    rows = []
    for i in range(48):
        params = SamplingParams(
            temperature=i % 3 / 2, seed=i, repetition_penalty=1 + i % 4 / 10,
            frequency_penalty=i % 5 / 10, presence_penalty=i % 2, logprobs=3,
            logit_bias={int(t): float(t % 7) for t in rng.integers(0, vocab, i % 6)} or None,
            allowed_token_ids=rng.integers(0, vocab, 900).tolist() if i % 7 == 0 else None,
        )  # fmt: skip
        params._bad_words_token_ids = [[int(t)] for t in rng.integers(0, vocab, 3)]
        prompt, outputs = rng.integers(0, vocab, i * 9).tolist(), rng.integers(0, 50, i).tolist()
        rows.append(make_row(params, i % 4, None, 3, vocab=vocab, prompt=prompt, outputs=outputs))
    logits = torch.from_numpy(rng.standard_normal((48, vocab)).astype(np.float32) * 3)
    for mode in ("raw_logprobs", "processed_logprobs", "processed_logits"):
        sampler = Sampler(mode)  # type: ignore[arg-type]
        together = sampler.sample(logits, rows)
        backwards = sampler.sample(logits.flip(0), rows[::-1])[::-1]
        for i in range(48):
            alone = sampler.sample(logits[i : i + 1], rows[i : i + 1])[0]
            assert alone == together[i] == backwards[i]


def test_only_the_last_token_of_a_bad_word_is_banned_after_the_others() -> None:
    params = SamplingParams(temperature=0.0)
    params._bad_words_token_ids = [[7], [1, 2, 3], [2, 5], [4, 4]]
    cases: list[tuple[list[int], list[int], list[int]]] = [
        ([], [], [7]),
        ([1, 2], [], [7]),  # prompt tokens do not count
        ([1], [2], [5, 7]),
        ([], [1, 2], [3, 5, 7]),
        ([], [1, 2, 9], [7]),
        ([], [9, 4], [4, 7]),
    ]
    for prompt, outputs, banned in cases:
        edits = make_edits(params, prompt, outputs)
        assert edits.banned_ids() == banned
        got = edited(torch.zeros(1, VOCAB), [edits])[0]
        assert np.flatnonzero(got == -np.inf).tolist() == banned


def test_repetition_counts_the_prompt_and_the_other_penalties_do_not() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0, 2.0, 0.0]])
    prompt, outputs = [0, 1, 5], [2, 3, 3]
    for factors, wanted in [
        ({"repetition_penalty": 2.0}, [1.0, -4.0, 1.0, -4.0, 2.0, 0.0]),
        ({"frequency_penalty": 0.5}, [2.0, -2.0, 1.5, -3.0, 2.0, 0.0]),
        ({"presence_penalty": 0.5}, [2.0, -2.0, 1.5, -2.5, 2.0, 0.0]),
    ]:
        params = SamplingParams(temperature=0.0, **factors)  # type: ignore[arg-type]
        assert edited(logits, [make_edits(params, prompt, outputs)])[0].tolist() == wanted


@pytest.mark.parametrize("repetition", [1e-320, 1e-30, 1e30, 1.7e308])
def test_extreme_factors_stay_finite(repetition: float) -> None:
    params = SamplingParams(
        temperature=1.0, seed=1, repetition_penalty=repetition, logit_bias={0: math.inf, 1: -1e300}
    )
    logits = torch.tensor([[3e38, -3e38, 0.0, 1.0, -1.0, -math.inf]])
    got = edited(logits, [make_edits(params, [0, 1, 2, 3, 4, 5], [])])[0]
    assert np.isfinite(got[:5]).all() and got[5] == -np.inf
    row = make_row(params, num_logprobs=5, vocab=6, prompt=[0, 1, 2, 3, 4, 5])
    for mode in ("raw_logprobs", "processed_logprobs", "processed_logits"):
        (sampled,) = Sampler(mode).sample(logits, [row])  # type: ignore[arg-type]
        assert sampled.fault is None and sampled.logprobs is not None
        assert not any(math.isnan(value) for value in sampled.logprobs.logprobs)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("allowed_token_ids", []),
        ("allowed_token_ids", [VOCAB]),
        ("logit_bias", {-1: 1.0}),
        ("_bad_words_token_ids", [[1], []]),
        ("_bad_words_token_ids", [[1, VOCAB]]),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(field: str, value: Any) -> None:
    """Whoever checked before: they would be used as indices."""
    params = SamplingParams()
    setattr(params, field, value)
    with pytest.raises(ValueError, match=r"must lie in 0 \.\.\. 11|no tokens"):
        LogitRules(params, VOCAB)


def test_plain_parameters_have_no_edits() -> None:
    assert make_row(SamplingParams(temperature=0.0), vocab=VOCAB).is_plain_greedy
    assert not LogitRules(SamplingParams(top_k=3, min_tokens=5), VOCAB).is_active(0)
    stopping = LogitRules(SamplingParams(min_tokens=2, stop_token_ids=[1]), VOCAB)
    assert [stopping.is_active(count) for count in range(4)] == [True, True, False, False]


def test_temperature_comes_after_the_edits() -> None:
    """A bias of 2 at temperature 2 counts as 1; a bias that came after would count as 2."""
    params = SamplingParams(temperature=2.0, seed=0, logit_bias={0: 2.0})
    scores = reference_scores(np.zeros(4, dtype=np.float32), params)
    row = make_row(params, num_logprobs=4, vocab=4)
    (sampled,) = Sampler("processed_logits").sample(torch.zeros(1, 4), [row])
    assert sampled.logprobs is not None
    values = dict(zip(sampled.logprobs.token_ids, sampled.logprobs.logprobs, strict=True))
    assert [values[token] for token in range(4)] == [1.0, 0.0, 0.0, 0.0]
    assert scores.tolist() == [0.0, -1.0, -1.0, -1.0]
