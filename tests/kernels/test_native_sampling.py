"""Native draws and filters against the torch references, for all filters and awkward sizes."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from headrace.configs.sampling_params import SamplingParams
from headrace.kernels.native import DrawRow, NativeKernels
from headrace.kernels.sampling import gumbel_max, gumbel_noise
from headrace.workers.sampler import Sampler, SamplingRow
from tests.kernels.native_ops import available_isas, bits, loaded
from tests.workers.sampling_reference import Array, reference_kept, reference_sample

pytestmark = pytest.mark.skipif(not available_isas(), reason="no native kernels on this machine")

SIZES = (1, 2, 15, 16, 17, 63, 64, 65, 100, 1000, 2049)
TOP_KS = (0, -1, 1, 2, 7, 50, 1000, 10_000)
TOP_PS = (1.0, 1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 2**-53)
MIN_PS = (0.0, 1e-12, 0.01, 0.3, 1.0)
TEMPERATURES = (1.0, 1e-5, 0.01, 0.7, 3.0, 1e30)


@pytest.fixture(scope="module", params=available_isas())
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return loaded(request.param, 2)


def make_logits(rng: np.random.Generator, vocab: int, number: int) -> torch.Tensor:
    """In turn: wide, many ties, with excluded tokens, all but one excluded, peaked, extreme."""
    logits = torch.from_numpy(rng.standard_normal(vocab).astype(np.float32) * 3)
    kind = number % 6
    if kind == 1:
        logits = logits.round()
    if kind == 2:
        logits[torch.from_numpy(rng.random(vocab) < 0.7)] = -math.inf
        logits[int(rng.integers(vocab))] = 0.25
    if kind == 3:
        logits[:] = -math.inf
        logits[int(rng.integers(vocab))] = -5.0
    if kind == 4:
        logits *= 30
    if kind == 5:
        logits[int(rng.integers(vocab))] = -3e38
        logits[int(rng.integers(vocab))] = 3e38
    return logits


def make_params(rng: np.random.Generator) -> SamplingParams:
    return SamplingParams(
        temperature=TEMPERATURES[rng.integers(len(TEMPERATURES))],
        top_k=TOP_KS[rng.integers(len(TOP_KS))],
        top_p=TOP_PS[rng.integers(len(TOP_PS))],
        min_p=MIN_PS[rng.integers(len(MIN_PS))],
        seed=int(rng.integers(-(2**63), 2**63)),
    )


def draw(
    kernels: NativeKernels, logits: torch.Tensor, rows: list[SamplingRow]
) -> tuple[list[int], torch.Tensor]:
    """Token ids, and the scores that were drawn from: the same tokens as without storing them."""
    scores = torch.full_like(logits, torch.nan)
    best = logits.argmax(dim=1).tolist()
    draw_rows = [
        DrawRow(
            row=i,
            best=best[i],
            top_p=row.params.top_p,
            seed=(row.params.seed or 0) % 2**64,
            top_k=max(0, row.params.top_k),
            min_score=math.log(row.params.min_p) if row.params.min_p else -math.inf,
            choice_index=row.choice_index,
            output_index=row.output_index,
            temperature=min(row.params.temperature, torch.finfo(torch.float32).max),
        )
        for i, row in enumerate(rows)
    ]
    before = logits.clone()
    token_ids = kernels.draw(logits, (DrawRow * len(rows))(*draw_rows), scores)
    assert kernels.draw(logits, (DrawRow * len(rows))(*draw_rows)) == token_ids
    assert torch.equal(logits, before)
    backwards = (DrawRow * len(rows))(*reversed(draw_rows))
    assert kernels.draw(logits, backwards) == token_ids[::-1]
    return token_ids, scores


def is_near_target(scores: Array, params: SamplingParams, num_kept: int) -> bool:
    """Whether the mass of the last token kept, or that of those before it, is on the edge."""
    kept = reference_kept(scores, SamplingParams(top_k=params.top_k, min_p=params.min_p))
    mass = np.cumsum(np.exp(np.sort(scores[kept].astype(np.float64))[::-1]))
    around = mass[max(0, num_kept - 2) : num_kept + 1]
    return bool((abs(around / mass[-1] - params.top_p) < 1e-6).any())


@pytest.mark.parametrize("vocab", SIZES)
def test_equal_to_the_references(kernels: NativeKernels, vocab: int) -> None:
    """Scores and kept sets against plain Python; tokens against that and the torch sampler."""
    rng = np.random.default_rng(vocab)
    num_rows = 300 if vocab < 1000 else 120
    logits = torch.stack([make_logits(rng, vocab, i) for i in range(num_rows)])
    rows = [SamplingRow(make_params(rng), int(rng.integers(9)), i * 7) for i in range(num_rows)]
    token_ids, drawn_from = draw(kernels, logits, rows)
    by_torch = [sampled.token_id for sampled in Sampler().sample(logits, rows)]
    num_on_edge = 0
    for i, row in enumerate(rows):
        params = row.params
        temperature = torch.tensor(params.temperature).clamp(max=torch.finfo(torch.float32).max)
        scores = ((logits[i] - logits[i].max()) / temperature).numpy()
        expected = reference_kept(scores, params)
        kept = np.flatnonzero(np.isfinite(drawn_from[i].numpy()))
        assert (drawn_from[i].numpy()[kept] == scores[kept]).all()
        if kept.tolist() != expected:
            num_on_edge += 1
            assert is_near_target(scores, params, len(kept))
        else:
            assert token_ids[i] == by_torch[i]
    assert num_on_edge <= num_rows // 20


def test_thousands_of_draws(kernels: NativeKernels) -> None:
    """From flat and from peaked scores: the same token as with noise for every token."""
    rng = np.random.default_rng(3)
    num_rows, vocab = 3000, 1027
    scale = torch.from_numpy(rng.choice([0.0, 1e-6, 0.5, 3.0, 12.0], (num_rows, 1)))
    logits = torch.from_numpy(rng.standard_normal((num_rows, vocab))).mul(scale).float()
    seed = int(rng.integers(2**63))
    rows = [SamplingRow(SamplingParams(seed=seed), i % 4, i) for i in range(num_rows)]
    token_ids, scores = draw(kernels, logits, rows)
    assert torch.equal(scores, logits - logits.max(-1, keepdim=True).values)
    choices = torch.tensor([row.choice_index for row in rows])
    outputs, seeds = torch.arange(num_rows), torch.full((num_rows,), seed)
    assert token_ids == gumbel_max(scores, seeds, choices, outputs).tolist()
    for i in range(0, num_rows, 100):
        place = (torch.full((vocab,), int(n)) for n in (seed, choices[i], i))
        noise = gumbel_noise(torch.arange(vocab), *place)
        assert token_ids[i] == int((scores[i] + noise).argmax())


def test_a_large_vocabulary(kernels: NativeKernels) -> None:
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(rng.standard_normal((24, 49_157)).astype(np.float32) * 2.5)
    logits[20:] = (logits[20:] * 4).round() / 4
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"top_p": 0.95},
        {"top_k": 50},
        {"top_k": 5000, "top_p": 0.6, "min_p": 1e-5},
    )
    rows = [
        SamplingRow(SamplingParams(temperature=0.8, seed=i, **kinds[i % 4]), 0, i)
        for i in range(24)
    ]
    token_ids, _ = draw(kernels, logits, rows)
    assert token_ids == [sampled.token_id for sampled in Sampler().sample(logits, rows)]
    for i in range(20, 24):
        outputs = [0] * i
        assert token_ids[i] == reference_sample(logits[i].numpy(), rows[i].params, outputs=outputs)


def test_batch_threads_and_instruction_sets(kernels: NativeKernels) -> None:
    """A row's token and scores, bit by bit: alone, in any order, with one thread, on any set."""
    rng = np.random.default_rng(5)
    logits = torch.stack([make_logits(rng, 1111, i) for i in range(60)])
    rows = [SamplingRow(make_params(rng), 1, i) for i in range(60)]
    for row in rows[::7]:
        row.params.temperature = 1e300  # scores become denormal, and are flushed to 0
    token_ids, scores = draw(kernels, logits, rows)
    backwards, turned = draw(kernels, logits.flip(0), rows[::-1])
    assert backwards[::-1] == token_ids
    np.testing.assert_array_equal(bits(turned.flip(0)), bits(scores))
    for other in (loaded(available_isas()[0], 1), loaded(kernels.isa, 3)):
        again, others = draw(other, logits, rows)
        assert again == token_ids
        np.testing.assert_array_equal(bits(others), bits(scores))
    for i in range(0, 60, 7):
        alone, own = draw(kernels, logits[i : i + 1], rows[i : i + 1])
        assert alone == [token_ids[i]]
        np.testing.assert_array_equal(bits(own[0]), bits(scores[i]))


@pytest.mark.parametrize("mode", ("raw_logprobs", "processed_logprobs", "processed_logits"))
def test_the_sampler_on_kernels(kernels: NativeKernels, mode: str) -> None:
    """Greedy and random rows together, with scores and faults: all as with torch."""
    rng = np.random.default_rng(6)
    logits = torch.from_numpy(rng.standard_normal((40, 333)).astype(np.float32) * 3)
    logits[3, 5], logits[4] = math.nan, -math.inf
    rows = []
    for i in range(40):
        greedy: dict[str, Any] = (
            {"temperature": 0.0} if i % 3 == 0 else {"temperature": 0.7, "seed": i}
        )
        rows.append(SamplingRow(SamplingParams(top_p=0.9, top_k=40, **greedy), 0, i, 3))
    expected = Sampler(mode).sample(logits, rows)  # type: ignore[arg-type]
    sampled = Sampler(mode, kernels).sample(logits, rows)  # type: ignore[arg-type]
    for got, wanted in zip(sampled, expected, strict=True):
        assert (got.token_id, got.fault) == (wanted.token_id, wanted.fault)
        assert (got.logprobs is None) == (wanted.logprobs is None)
        if got.logprobs is not None and wanted.logprobs is not None:
            assert got.logprobs.token_ids == wanted.logprobs.token_ids
            assert got.logprobs.rank == wanted.logprobs.rank
            np.testing.assert_allclose(got.logprobs.logprobs, wanted.logprobs.logprobs, atol=1e-5)


def test_refuses_what_it_cannot_read(kernels: NativeKernels) -> None:
    rows = (DrawRow * 4)()
    for logits in (torch.zeros(6, 4).T, torch.zeros(4, 6).double(), torch.zeros(24)):
        with pytest.raises(ValueError, match="no kernel for"):
            kernels.draw(logits, rows)
    with pytest.raises(ValueError, match="no place for scores of 4 rows"):
        kernels.draw(torch.zeros(4, 6), rows, torch.zeros(3, 6))
    for field in ("row", "best"):
        for number in (-1, 6):
            wrong = (DrawRow * 1)(DrawRow(**{field: number}))
            with pytest.raises(ValueError, match="rows to draw from are not in"):
                kernels.draw(torch.zeros(6, 6), wrong)
