"""The sampler against a numpy reference written from the documented order, and against its laws."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.configs.errors import NonFiniteLogitsError, RequestFailedError, error_from_code
from headrace.configs.sampling_params import SamplingParams
from headrace.workers.sampler import SampledRow, Sampler, SamplingRow, token_logprobs

Array = np.ndarray[Any, Any]


def reference_noise(vocab: int, seed: int, choice: int, output: int) -> Array:
    """Gumbel noise of a whole vocabulary, float32, from Philox4x32-10 in numpy."""
    tokens = np.arange(vocab, dtype=np.uint64)
    low32, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    x = [tokens // np.uint64(4)] + [
        np.full(vocab, word, dtype=np.uint64) for word in (output, choice, 0)
    ]
    key = [(seed % 2**64) % 2**32, (seed % 2**64) // 2**32]
    for _ in range(10):
        first, second = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        x = [
            (second >> shift) ^ x[1] ^ np.uint64(key[0]),
            second & low32,
            (first >> shift) ^ x[3] ^ np.uint64(key[1]),
            first & low32,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    words = np.choose((tokens % np.uint64(4)).astype(int), x)
    noise: Array = -np.log(-np.log((words + 0.5) / 2**32))
    return noise.astype(np.float32)


def reference_kept(scores: Array, params: SamplingParams) -> list[int]:
    """Tokens that survive min-p, top-k and top-p, by plain sorting."""
    allowed = [t for t in range(len(scores)) if scores[t] > -np.inf]
    if params.min_p > 0:
        allowed = [t for t in allowed if scores[t] >= np.float32(math.log(params.min_p))]
    order = sorted(allowed, key=lambda t: (-scores[t], t))
    if 0 < params.top_k < len(order):
        order = [t for t in order if scores[t] >= scores[order[params.top_k - 1]]]
    if params.top_p < 1:
        weights = [math.exp(float(scores[t])) for t in order]
        total, mass, kept = math.fsum(weights), 0.0, 0
        while kept == 0 or (mass < params.top_p * total and kept < len(order)):
            mass += weights[kept]
            kept += 1
        order = order[:kept]
    return sorted(order)


def reference_scores(logits: Array, params: SamplingParams, output: int) -> Array:
    masked = logits.copy()
    if output < params.min_tokens:
        masked[[t for t in params.all_stop_token_ids if t < len(masked)]] = -np.inf
    if params.is_greedy:
        return masked
    temperature = np.float32(min(params.temperature, 3.4e38))
    scores: Array = (masked - masked.max()) / temperature
    return scores


def reference_sample(logits: Array, params: SamplingParams, choice: int, output: int) -> int:
    scores = reference_scores(logits, params, output)
    if params.is_greedy:
        return int(np.argmax(scores))
    kept = reference_kept(scores, params)
    assert params.seed is not None
    noise = reference_noise(len(scores), params.seed, choice, output)
    return kept[int(np.argmax(scores[kept] + noise[kept]))]


def random_logits(num_rows: int, vocab: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy((rng.standard_normal((num_rows, vocab)) * scale).astype(np.float32))


def tokens(sampled: list[SampledRow]) -> list[int]:
    assert all(row.fault is None for row in sampled)
    return [row.token_id for row in sampled]


def draws(params: SamplingParams, logits: Array, num_draws: int) -> Array:
    """Counts of the tokens drawn at `num_draws` successive outputs with the same logits."""
    rows = [SamplingRow(params, 0, i) for i in range(num_draws)]
    batch = torch.from_numpy(logits.astype(np.float32)).expand(num_draws, len(logits))
    return np.bincount(tokens(Sampler().sample(batch, rows)), minlength=len(logits))


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-12, 1e-6, 1e-5, 1e-3, 0.3, 1.0, 2.0, 1e300]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 50, 10_000]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.001, 0.2, 1.0]),
    seed=st.integers(-(2**63), 2**64 - 1),
    min_tokens=st.sampled_from([0, 3]),
    stop_token_ids=st.sampled_from([[], [0], [1, 2, 10**9]]),
)


@settings(deadline=None, max_examples=80)
@given(
    params=st.lists(params_strategy, min_size=1, max_size=6),
    vocab=st.sampled_from([5, 17, 1000]),
    scale=st.sampled_from([0.0, 0.5, 4.0]),
    rounding=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 2**32),
)
def test_sampler_equals_reference(
    params: list[SamplingParams], vocab: int, scale: float, rounding: int, seed: int
) -> None:
    logits = random_logits(len(params), vocab, seed, scale)
    if rounding:  # many ties
        logits = (logits * rounding).round() / rounding
    before = logits.clone()
    rows = [SamplingRow(p, i % 3, i) for i, p in enumerate(params)]
    sampled = tokens(Sampler().sample(logits, rows))
    expected = [reference_sample(logits[i].numpy(), p, i % 3, i) for i, p in enumerate(params)]
    assert sampled == expected
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.5, 0, 1.0, 0.0),
        (2.0, 0, 1.0, 0.0),
        (1.0, 3, 1.0, 0.0),
        (1.0, 0, 0.7, 0.0),
        (1.0, 0, 1.0, 0.3),
        (1.5, 5, 0.8, 0.1),
    ],
)
def test_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    num_draws = 8000
    logits = np.log(np.array([0.3, 0.05, 0.2, 0.2, 0.1, 0.02, 0.08, 0.05]))
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=17)
    counts = draws(params, logits, num_draws)
    kept = reference_kept(reference_scores(logits.astype(np.float32), params, 0), params)
    weights = np.exp(logits[kept] / temperature)
    expected = num_draws * weights / weights.sum()
    assert counts.sum() == counts[kept].sum() == num_draws
    chi_square = float(((counts[kept] - expected) ** 2 / expected).sum())
    assert chi_square < 24.4  # at most 7 degrees of freedom: exceeded with probability 0.001


def test_a_long_nucleus_over_a_large_vocabulary() -> None:
    """The head that top-p looks at grows until it is long enough; ties at its end go by id."""
    logits = torch.zeros(3000)
    logits[:2999] = torch.arange(2999).flip(0) // 7 * 0.01
    params = SamplingParams(top_p=0.97, seed=3)
    rows = [SamplingRow(params, 0, i) for i in range(50)]
    got = tokens(Sampler().sample(logits.expand(50, 3000), rows))
    assert got == [reference_sample(logits.numpy(), params, 0, i) for i in range(50)]


def test_rows_alone_and_among_others() -> None:
    choices = [
        SamplingParams(temperature=0.0, min_tokens=i % 2, stop_token_ids=[1]) if i % 3 == 0
        else SamplingParams(temperature=0.2 + i / 20, top_k=i % 7, top_p=1 - i / 200, seed=i)
        for i in range(64)
    ]  # fmt: skip
    rows = [SamplingRow(p, i % 4, i % 5, num_logprobs=3) for i, p in enumerate(choices)]
    logits = random_logits(64, 5003, seed=5)
    logits[9, 7] = math.nan
    together = Sampler().sample(logits, rows)
    backwards = Sampler().sample(logits.flip(0), rows[::-1])[::-1]
    for i in range(64):
        alone = Sampler().sample(logits[i : i + 1], rows[i : i + 1])[0]
        assert alone == together[i] == backwards[i]  # log-probabilities too, bit for bit


def test_results_do_not_depend_on_threads() -> None:
    rows = [SamplingRow(SamplingParams(top_p=0.9, seed=i), 0, i, 2) for i in range(4)]
    logits = random_logits(4, 70_001, seed=6)
    num_threads = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(Sampler().sample(logits, rows))
    finally:
        torch.set_num_threads(num_threads)
    assert results[0] == results[1]


def test_seeds_repeat_and_choices_differ() -> None:
    logits = torch.zeros(1, 1000)

    def draw(seed: int, choice: int, output: int) -> int:
        row = SamplingRow(SamplingParams(seed=seed), choice, output)
        return Sampler().sample(logits, [row])[0].token_id

    assert draw(1, 0, 0) == draw(1, 0, 0)
    places = [(1, 0, 0), (1, 1, 0), (1, 0, 1), (2, 0, 0), (2, 1, 0), (1 + 2**32, 0, 0), (-1, 0, 0)]
    streams = [[draw(seed, c, o + 10 * i) for i in range(4)] for seed, c, o in places]
    assert len({tuple(stream) for stream in streams}) == len(places)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_min_tokens_masks_all_stop_tokens(temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature, min_tokens=2, stop_token_ids=[4, 50], ignore_eos=True, seed=1
    )
    params.add_eos_token_ids(3, (2,))
    logits = torch.tensor([0.0, 1.0, 100.0, 101.0, 102.0]).expand(3, 5)
    rows = [SamplingRow(params, 0, output) for output in range(3)]
    sampled = tokens(Sampler().sample(logits, rows))
    assert all(token in (0, 1) for token in sampled[:2])
    assert sampled[2] in (3, 4)
    if temperature == 0:
        assert sampled == [1, 1, 4]


def test_min_tokens_that_leave_nothing_fail_that_row() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[0, 1])
    sampled = Sampler().sample(torch.zeros(2, 2), [SamplingRow(params, 0, i) for i in (1, 2)])
    assert sampled[0].fault is not None and "min_tokens=2" in sampled[0].fault.message
    assert type(error_from_code(*_parts(sampled[0]))) is RequestFailedError
    assert tokens(sampled[1:]) == [0]


def test_a_random_row_without_a_seed_fails_alone() -> None:
    rows = [SamplingRow(SamplingParams(), 0, 0), SamplingRow(SamplingParams(seed=0), 0, 0)]
    sampled = Sampler().sample(torch.zeros(2, 4), rows)
    assert sampled[0].fault is not None and sampled[1].fault is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_rows_fail_alone(temperature: float) -> None:
    logits = random_logits(6, 33, seed=8)
    row = SamplingRow(SamplingParams(temperature=temperature, seed=4), 0, 0, num_logprobs=2)
    healthy = Sampler().sample(logits, [row] * 6)
    broken = logits.clone()
    broken[1, 5] = math.nan
    broken[2, 32] = math.inf
    broken[3] = -math.inf
    broken[4, 0] = -math.inf  # one excluded token is no fault
    sampled = Sampler().sample(broken, [row] * 6)
    assert sampled[0] == healthy[0] and sampled[5] == healthy[5] and sampled[4].fault is None
    for i in (1, 2, 3):
        assert sampled[i].token_id == -1 and sampled[i].logprobs is None
        assert type(error_from_code(*_parts(sampled[i]))) is NonFiniteLogitsError


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-6, 1e-5, 1e-3, 0.1, 0.5, 1.0, 1.5, 2.0])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e38])
def test_pp27_temperature_sweep(temperature: float, scale: float) -> None:
    logits = torch.tensor([-1.0, 0.25, 1.0, 0.5, -math.inf, 0.999]).mul(scale).expand(20, 6)
    params = SamplingParams(temperature=temperature, top_p=0.95, min_p=0.01, seed=9)
    rows = [SamplingRow(params, 0, i, num_logprobs=5) for i in range(20)]
    sampled = Sampler().sample(logits, rows)
    assert 4 not in tokens(sampled)
    for row in sampled:
        assert row.logprobs is not None
        assert all(math.isfinite(value) for value in row.logprobs.logprobs) or scale == 1e38
        assert not any(math.isnan(value) for value in row.logprobs.logprobs)
    if temperature < 1e-5 or scale == 1e38:
        assert tokens(sampled) == [2] * 20


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.zeros(2, 300)
    logits[1, 200:] = 1.0
    row = SamplingRow(SamplingParams(temperature=0.0), 0, 0)
    assert tokens(Sampler().sample(logits, [row, row])) == [0, 200]


def test_top_k_keeps_ties_at_the_kth_score() -> None:
    counts = draws(SamplingParams(top_k=2, seed=1), np.array([3.0, 2.0, 2.0, 1.0]), 500)
    assert (counts[:3] > 0).all() and counts[3] == 0


def test_top_p_breaks_ties_by_id() -> None:
    counts = draws(SamplingParams(top_p=0.5, seed=1), np.zeros(4), 200)
    assert (counts[:2] > 0).all() and counts[2:].sum() == 0


def test_top_p_is_taken_after_top_k() -> None:
    # Over all tokens 0.6 needs two; over the best three (0.3, 0.2, 0.2) it needs two of 0.7.
    logits = np.log(np.array([0.3, 0.2, 0.2, 0.1, 0.1, 0.1]))
    without = draws(SamplingParams(top_p=0.7, seed=1), logits, 300)
    within = draws(SamplingParams(top_p=0.7, top_k=3, seed=1), logits, 300)
    assert (without > 0).tolist() == [True, True, True, False, False, False]
    assert (within > 0).tolist() == [True, True, False, False, False, False]


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    vocab=st.sampled_from([1, 7, 300]),
    num_top=st.sampled_from([0, 1, 3, 20, 1000]),
    rounded=st.booleans(),
)
def test_logprobs_are_raw(seed: int, vocab: int, num_top: int, rounded: bool) -> None:
    logits = random_logits(2, vocab, seed)
    logits = logits.round() if rounded else logits
    params = SamplingParams(temperature=0.3, top_k=2, seed=seed, min_tokens=1, stop_token_ids=[2])
    row = SamplingRow(params, 0, 0, num_logprobs=num_top)
    for sampled, row_logits in zip(Sampler().sample(logits, [row, row]), logits, strict=True):
        exact = row_logits.double().numpy()
        exact = exact - exact.max() - math.log(np.exp(exact - exact.max()).sum())
        assert sampled.logprobs is not None
        ids, values = sampled.logprobs.token_ids, sampled.logprobs.logprobs
        order = sorted(range(vocab), key=lambda t: (-row_logits[t].item(), t))
        assert ids == [sampled.token_id, *order[:num_top]]
        assert np.allclose(values, exact[ids], atol=1e-5)
        better = int((row_logits > row_logits[sampled.token_id]).sum())
        assert sampled.logprobs.rank == better + 1


def test_no_logprobs_unless_asked() -> None:
    row = SamplingRow(SamplingParams(temperature=0.0), 0, 0)
    assert Sampler().sample(torch.zeros(1, 3), [row])[0].logprobs is None
    assert token_logprobs(torch.zeros(3), 2, 0).token_ids == [2]


def test_no_rows() -> None:
    assert Sampler().sample(torch.zeros(0, 3), []) == []
    with pytest.raises(ValueError, match="1 rows of logits for 0"):
        Sampler().sample(torch.zeros(1, 3), [])


def _parts(sampled: SampledRow) -> tuple[str, str]:
    assert sampled.fault is not None
    return sampled.fault.code, sampled.fault.message
