"""Scores, ranks and best tokens: bit by bit against a scalar model, and against float64."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from headrace.configs.config import LogprobsMode
from headrace.kernels.native import NativeKernels
from headrace.workers.argmax import argmax_rows
from headrace.workers.logprobs import SCORE_ROWS, score_rows
from tests.kernels.native_ops import available_isas, fused, loaded

pytestmark = pytest.mark.skipif(not available_isas(), reason="no native kernels on this machine")

SIZES = (1, 3, 8, 15, 16, 17, 100, 1000, 2049)
Array = np.ndarray


@pytest.fixture(scope="module", params=available_isas())
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return loaded(request.param, 2)


def model_exponential(x: Array) -> Array:
    """`exponential` of simd.h, of float32 numbers up to 88."""
    f = np.float32
    bounded = np.maximum(x, f(-87.3))
    n = np.rint(bounded * f(1.44269504))
    r = fused(n, f(-0.693359375), bounded)
    r = fused(n, f(2.12194440e-4), r)
    p = np.full_like(x, f(1.0) / f(5040.0))
    for divisor in (720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0):
        p = fused(p, r, np.full_like(x, f(1.0) / f(divisor)))
    return np.where(x < f(-87.3), f(0.0), np.ldexp(p, n.astype(np.int32))).astype(f)


def model_log_sum(logits: Array) -> np.float32:
    """Sixteen float64 sums, each of every sixteenth token in order; then halves onto halves."""
    weights = model_exponential(logits - logits.max())
    padded = np.pad(weights, (0, -len(weights) % 16)).astype(np.float64)
    sums = np.zeros(16)
    for row in padded.reshape(-1, 16):
        sums += row
    for half in (8, 4, 2, 1):
        sums = sums[:half] + sums[half:]
    return np.float32(math.log(sums[0]))


def make_logits(rng: np.random.Generator, num_rows: int, vocab: int) -> torch.Tensor:
    """In turn: wide, many ties, with excluded tokens, all but one excluded, flat, extreme."""
    logits = rng.standard_normal((num_rows, vocab)).astype(np.float32) * 3
    logits[1::6] = logits[1::6].round()
    logits[2::6][rng.random(logits[2::6].shape) < 0.7] = -math.inf
    logits[3::6] = -math.inf
    logits[4::6] = 7.25
    logits[5::6] *= 1e37
    logits[:, rng.integers(vocab)] = 0.125
    return torch.from_numpy(logits)


def assert_entry(ids: Array, scores: Array, rank: int, expected: Array, token: int) -> None:
    """Exactly what a plain sort of the `expected` scores of all tokens gives."""
    order = np.lexsort((np.arange(len(expected)), -expected))
    wanted = [token, *order[: len(ids) - 1].tolist()]
    assert ids.tolist() == wanted
    np.testing.assert_array_equal(scores, expected[wanted])
    assert rank == 1 + int((expected > expected[token]).sum())


@pytest.mark.parametrize("vocab", SIZES)
def test_equal_to_the_model(kernels: NativeKernels, vocab: int) -> None:
    """Bit by bit, with every number of best tokens together, and logits in the same way."""
    rng = np.random.default_rng(vocab)
    logits = make_logits(rng, 18, vocab)
    rows = rng.permutation(18)[:13].tolist()
    token_ids = rng.integers(vocab, size=13).tolist()
    num_tops = [min(num, vocab) for num in (0, 1, 2, 7, 20, 300, vocab, vocab, 5, 5, 5, 5, 5)]
    maxima = logits.amax(dim=1)[rows].tolist()
    got = kernels.score(logits, rows, token_ids, num_tops, maxima)
    plain = kernels.score(logits, rows, token_ids, num_tops, None)
    for i, (row, token, top) in enumerate(zip(rows, token_ids, num_tops, strict=True)):
        values = logits[row].numpy()
        with np.errstate(over="ignore"):
            expected = (values - values.max()) - model_log_sum(values)
        exact = logits[row].double().log_softmax(dim=0).numpy()
        finite = np.isfinite(expected)
        np.testing.assert_allclose(expected[finite], exact[finite], rtol=3e-7, atol=2e-6)
        for (scores, ids, ranks), wanted in ((got, expected), (plain, values)):
            last = 1 + top
            assert_entry(ids[i, :last], scores[i, :last], int(ranks[i]), wanted, token)


@pytest.mark.parametrize("vocab", (49_152, 262_144))
def test_large_vocabularies(kernels: NativeKernels, vocab: int) -> None:
    """Near float64, flat and peaked, where float32 sums would be off."""
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(rng.standard_normal((3, vocab)).astype(np.float32))
    logits[1] *= 1e-4
    logits[2] *= 5
    rows, token_ids = [0, 1, 2], [5, vocab - 1, 7]
    scores, ids, ranks = kernels.score(
        logits, rows, token_ids, [20] * 3, logits.amax(dim=1).tolist()
    )
    exact = logits.double().log_softmax(dim=1)
    expected = exact.gather(1, torch.from_numpy(ids)).numpy()
    np.testing.assert_allclose(scores, expected, rtol=3e-7, atol=2e-6)
    assert ids[:, 0].tolist() == token_ids
    np.testing.assert_array_equal(scores[:, 1:], -np.sort(-scores[:, 1:], axis=1))
    np.testing.assert_allclose(expected[:, 1:], exact.topk(20).values.numpy(), atol=2e-6)
    above = (exact > exact.gather(1, torch.tensor(token_ids)[:, None]) + 4e-6).sum(dim=1)
    assert (ranks > above.numpy()).all()


def entries(
    kernels: NativeKernels | None,
    logits: torch.Tensor,
    rows: Sequence[int],
    num_tops: Sequence[int],
    mode: LogprobsMode,
) -> list[tuple[list[int], list[float], int]]:
    maxima, token_ids = argmax_rows(logits[list(rows)], kernels)
    scored = score_rows(logits, rows, token_ids, num_tops, maxima, mode, kernels)
    return [(entry.token_ids, entry.logprobs, entry.rank) for entry in scored]


@pytest.mark.parametrize("mode", ("raw_logprobs", "processed_logits"))
def test_batch_threads_and_instruction_sets(kernels: NativeKernels, mode: LogprobsMode) -> None:
    """A row's entry, bit by bit: alone, among others, with one thread or three, on any set."""
    logits = make_logits(np.random.default_rng(9), 3 * SCORE_ROWS - 5, 1111)
    rows = list(range(len(logits)))
    num_tops = [row % 6 for row in rows]
    together = entries(kernels, logits, rows, num_tops, mode)
    for other in (loaded(available_isas()[0], 1), loaded(kernels.isa, 3)):
        assert entries(other, logits, rows, num_tops, mode) == together
    assert entries(kernels, logits, rows[::-1], num_tops[::-1], mode) == together[::-1]
    for row in rows[::7]:
        assert entries(kernels, logits, [row], [num_tops[row]], mode) == [together[row]]


@pytest.mark.parametrize("mode", ("raw_logprobs", "raw_logits", "processed_logprobs"))
def test_equal_to_torch(kernels: NativeKernels, mode: LogprobsMode) -> None:
    """The same tokens and ranks; logits exactly, log-probabilities within 1e-5."""
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.standard_normal((40, 777)).astype(np.float32) * 3)
    logits[::2] = (logits[::2] * 4).round() / 4
    rows, num_tops = list(range(39, -1, -1)), [0, 1, 5, 2000] * 10
    for got, wanted in zip(
        entries(kernels, logits, rows, num_tops, mode),
        entries(None, logits, rows, num_tops, mode),
        strict=True,
    ):
        assert (got[0], got[2]) == (wanted[0], wanted[2])
        np.testing.assert_allclose(got[1], wanted[1], atol=0 if mode == "raw_logits" else 1e-5)


def test_refuses_what_is_not_there(kernels: NativeKernels) -> None:
    logits = torch.zeros(2, 5)
    for rows, token_ids, num_tops in (
        ([2], [0], [0]), ([-1], [0], [0]), ([0], [5], [0]), ([0], [0], [6]), ([0, 1], [0], [1, 1]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="cannot score"):
            kernels.score(logits, rows, token_ids, num_tops, None)
