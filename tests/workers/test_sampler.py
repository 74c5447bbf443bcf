"""The sampler against a numpy reference written from the documented order, and against its laws."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.configs.errors import NonFiniteLogitsError, RequestFailedError, error_from_code
from headrace.configs.sampling_params import SamplingParams
from headrace.workers.sampler import SampledRow, Sampler, SamplingRow
from tests.workers.sampling_reference import Array, make_row, reference_sample


def random_logits(num_rows: int, vocab: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy((rng.standard_normal((num_rows, vocab)) * scale).astype(np.float32))


def tokens(sampled: list[SampledRow]) -> list[int]:
    assert all(row.fault is None for row in sampled)
    return [row.token_id for row in sampled]


def draws(params: SamplingParams, logits: Array, num_draws: int) -> Array:
    """Counts of the tokens drawn at `num_draws` successive outputs with the same logits."""
    rows = [make_row(params, 0, i, vocab=len(logits)) for i in range(num_draws)]
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
    rows = [make_row(p, i % 3, i, vocab=vocab) for i, p in enumerate(params)]
    sampled = tokens(Sampler().sample(logits, rows))
    expected = [
        reference_sample(logits[i].numpy(), p, i % 3, outputs=[0] * i) for i, p in enumerate(params)
    ]
    assert sampled == expected
    assert torch.equal(logits, before)


def test_a_long_nucleus_over_a_large_vocabulary() -> None:
    """The head that top-p looks at grows until it is long enough; ties at its end go by id."""
    logits = torch.zeros(3000)
    logits[:2999] = torch.arange(2999).flip(0) // 7 * 0.01
    params = SamplingParams(top_p=0.97, seed=3)
    rows = [SamplingRow(params, 0, i) for i in range(50)]
    got = tokens(Sampler().sample(logits.expand(50, 3000), rows))
    assert got == [reference_sample(logits.numpy(), params, outputs=[0] * i) for i in range(50)]


def test_rows_alone_and_among_others() -> None:
    choices = [
        SamplingParams(temperature=0.0, min_tokens=i % 2, stop_token_ids=[1]) if i % 3 == 0
        else SamplingParams(temperature=0.2 + i / 20, top_k=i % 7, top_p=1 - i / 200, seed=i)
        for i in range(64)
    ]  # fmt: skip
    rows = [make_row(p, i % 4, i % 5, num_logprobs=3, vocab=5003) for i, p in enumerate(choices)]
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
    params.update_from_generation_config({"eos_token_id": [2]}, 3)
    logits = torch.tensor([0.0, 1.0, 100.0, 101.0, 102.0]).expand(3, 5)
    rows = [make_row(params, 0, output, vocab=5) for output in range(3)]
    sampled = tokens(Sampler().sample(logits, rows))
    assert all(token in (0, 1) for token in sampled[:2])
    assert sampled[2] in (3, 4)
    if temperature == 0:
        assert sampled == [1, 1, 4]


def test_min_tokens_that_leave_nothing_fail_that_row() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[0, 1])
    rows = [make_row(params, 0, i, vocab=2) for i in (1, 2)]
    sampled = Sampler().sample(torch.zeros(2, 2), rows)
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


def test_no_rows() -> None:
    assert Sampler().sample(torch.zeros(0, 3), []) == []
    with pytest.raises(ValueError, match="1 rows of logits for 0"):
        Sampler().sample(torch.zeros(1, 3), [])


def _parts(sampled: SampledRow) -> tuple[str, str]:
    assert sampled.fault is not None
    return sampled.fault.code, sampled.fault.message
