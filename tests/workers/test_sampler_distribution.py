"""Draws against a float64 softmax, by the chi-square test.

Seeds are fixed, so each case passes or fails for good. Every combination of temperature and filters
draws once from each of many seeds in one call, as many rows of a batch.
"""

import itertools

import numpy as np
import pytest
import torch

from headrace.configs.sampling_params import SamplingParams
from headrace.workers.sampler import Sampler
from tests.workers.sampling_reference import Array, make_row, reference_probabilities

NUM_DRAWS = 6000
MIN_P_VALUE = 1e-4
LOGITS = np.log(
    np.array([0.21, 0.04, 0.15, 0.14, 0.1, 0.02, 0.09, 0.05, 0.08, 0.03, 0.06, 0.03])
).astype(np.float32)
PROMPT, OUTPUTS = [0, 1, 2], [2, 3, 3, 4]
FILTERS = {
    "plain": {},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.3},
    "penalties": {
        "repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": -0.5,
    },
    "bias": {"logit_bias": {1: 2.0, 5: 1.5, 0: -1.0}},
    "all": {
        "top_k": 8, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 0.8,
        "frequency_penalty": 0.2, "presence_penalty": 0.3, "logit_bias": {7: 1.0, 9: 1.0},
        "allowed_token_ids": [0, 1, 2, 3, 4, 5, 7, 8, 9, 10],
    },
}  # fmt: skip


def p_value(counts: Array, probabilities: Array) -> float:
    """Of Pearson's chi-square test; 0 if something impossible was drawn."""
    possible = probabilities > 0
    if counts[~possible].any():
        return 0.0
    expected = probabilities[possible] * counts.sum()
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    half_degrees = torch.tensor((possible.sum() - 1) / 2, dtype=torch.float64)
    half_statistic = torch.tensor(statistic / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_degrees, half_statistic))


def draw(options: dict[str, object], first_seed: int) -> Array:
    """Counts of the tokens that many seeds draw, at different places of their streams."""
    rows = [
        make_row(
            SamplingParams(seed=first_seed + i, **options),  # type: ignore[arg-type]
            i % 3,
            vocab=len(LOGITS),
            prompt=PROMPT,
            outputs=OUTPUTS,
        )
        for i in range(NUM_DRAWS)
    ]
    sampled = Sampler().sample(torch.from_numpy(LOGITS).expand(NUM_DRAWS, -1), rows)
    assert all(row.fault is None for row in sampled)
    return np.bincount([row.token_id for row in sampled], minlength=len(LOGITS))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_the_float64_softmax(name: str, temperature: float) -> None:
    options = {"temperature": temperature, **FILTERS[name]}
    params = SamplingParams(seed=0, **options)  # type: ignore[arg-type]
    wanted = reference_probabilities(LOGITS, params, PROMPT, OUTPUTS)
    assert p_value(draw(options, 1000), wanted) > MIN_P_VALUE


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("plain", {"temperature": 1.1}),
        ("top-k", {"top_k": 4}),
        ("top-p", {"top_p": 0.6}),
        ("min-p", {"min_p": 0.4}),
        ("penalties", {"presence_penalty": -0.2}),
        ("penalties", {"frequency_penalty": 0.5}),
        ("penalties", {"repetition_penalty": 1.7}),
        ("bias", {"logit_bias": {1: 1.8, 5: 1.5, 0: -1.0}}),
    ],
)
def test_the_test_sees_small_mistakes(name: str, changed: dict[str, object]) -> None:
    """Draws with a slightly other parameter do not pass as those that were asked for."""
    options = {"temperature": 1.0, **FILTERS[name]}
    params = SamplingParams(seed=0, **options)  # type: ignore[arg-type]
    wanted = reference_probabilities(LOGITS, params, PROMPT, OUTPUTS)
    assert p_value(draw({**options, **changed}, 1000), wanted) < MIN_P_VALUE


def test_seeds_choices_and_outputs_are_independent() -> None:
    """Pairs of draws at neighbouring places fill the square evenly."""
    size = 4
    for step in [(1, 0, 0), (0, 1, 0), (0, 0, 1)]:
        pairs = np.zeros((size, size), dtype=np.int64)
        rows = []
        for i, (seed, choice, output) in itertools.product(range(2500), [(0, 0, 0), step]):
            params = SamplingParams(seed=2 * i + seed)
            rows.append(make_row(params, choice, output, vocab=size))
        sampled = Sampler().sample(torch.zeros(len(rows), size), rows)
        for first, second in zip(sampled[::2], sampled[1::2], strict=True):
            pairs[first.token_id, second.token_id] += 1
        assert p_value(pairs.ravel(), np.full(size**2, 1 / size**2)) > MIN_P_VALUE
