"""Counter-based noise and the Gumbel-max draw, against published vectors and scalar definitions."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels.sampling import (
    GUMBEL_MAX,
    PURPOSE_SAMPLE,
    gumbel_max,
    gumbel_noise,
    philox4x32,
    seed_to_int64,
)

WORD = 0xFFFFFFFF
# (counter, key, output) of philox4x32 with 10 rounds: known answers published with Random123.
KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (WORD, WORD, WORD, WORD),
        (WORD, WORD),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def scalar_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for i in range(10):
        if i > 0:
            k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
        hi0, lo0 = divmod(0xD2511F53 * x0, 2**32)
        hi1, lo1 = divmod(0xCD9E8D57 * x2, 2**32)
        x0, x1, x2, x3 = hi1 ^ x1 ^ k0, lo1, hi0 ^ x3 ^ k1, lo0
    return x0, x1, x2, x3


def scalar_noise(token: int, seed: int, choice: int, output: int, purpose: int = 0) -> np.float32:
    seed %= 2**64
    words = scalar_philox((token // 4, output, choice, purpose), (seed % 2**32, seed // 2**32))
    u = (words[token % 4] + 0.5) / 2**32
    return np.float32(-math.log(-math.log(u)))


def tensors(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


def rows_of(num_rows: int, seed: int = 0, choice: int = 0) -> tuple[torch.Tensor, ...]:
    """Seeds, choice indices and output indices of `num_rows` successive outputs."""
    full = torch.full((num_rows,), 0)
    return full + seed_to_int64(seed), full + choice, torch.arange(num_rows)


@pytest.mark.parametrize("case", KNOWN_ANSWERS)
def test_philox_known_answers(
    case: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
) -> None:
    counter, key, expected = case
    assert scalar_philox(counter, key) == expected
    c0, c1, c2, c3 = tensors(*counter)
    k0, k1 = tensors(*key)
    assert tuple(int(w) for w in philox4x32((c0, c1, c2, c3), (k0, k1))) == expected


words = st.integers(0, WORD)


@given(counter=st.tuples(words, words, words, words), key=st.tuples(words, words))
def test_philox_equals_the_scalar_form(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> None:
    c0, c1, c2, c3 = tensors(*counter)
    k0, k1 = tensors(*key)
    got = tuple(int(w) for w in philox4x32((c0, c1, c2, c3), (k0, k1)))
    assert got == scalar_philox(counter, key)


@given(
    token=st.integers(0, 2**20),
    seed=st.integers(-(2**63), 2**64 - 1),
    choice=st.integers(0, 1000),
    output=st.integers(0, 2**31),
    purpose=st.integers(0, 3),
)
def test_noise_is_as_defined(token: int, seed: int, choice: int, output: int, purpose: int) -> None:
    token_ids, seeds, choices, outputs = tensors(token, seed_to_int64(seed), choice, output)
    got = gumbel_noise(token_ids, seeds, choices, outputs, purpose)
    want = scalar_noise(token, seed, choice, output, purpose)
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(float(want), rel=2e-7, abs=1e-9)


def test_noise_bounds() -> None:
    largest = -math.log(-math.log((WORD + 0.5) / 2**32))
    assert largest < GUMBEL_MAX < largest + 0.01
    assert math.isfinite(-math.log(-math.log(0.5 / 2**32)))


def test_noise_does_not_depend_on_shards_or_order() -> None:
    token_ids = torch.arange(1003)
    seeds, choices, outputs = (torch.full((1003,), value) for value in (7, 1, 5))
    whole = gumbel_noise(token_ids, seeds, choices, outputs)
    cuts = [0, 1, 6, 500, 1003]
    shards = [
        gumbel_noise(token_ids[a:b], seeds[a:b], choices[a:b], outputs[a:b])
        for a, b in itertools.pairwise(cuts)
    ]
    assert torch.equal(torch.cat(shards), whole)
    order = torch.randperm(1003)
    assert torch.equal(gumbel_noise(token_ids[order], seeds, choices, outputs), whole[order])
    assert len(set(whole.tolist())) == 1003


def draw_with_all_noise(scores: torch.Tensor, rows: tuple[torch.Tensor, ...]) -> list[int]:
    """Gumbel-max without skipping: noise for every token, first maximum."""
    result = []
    for i, row in enumerate(scores.numpy()):
        token_ids = torch.arange(len(row))
        places = [tensor[i].expand(len(row)) for tensor in rows]
        noise = gumbel_noise(token_ids, *places).numpy()
        result.append(int(np.argmax(row + noise)))
    return result


@settings(deadline=None, max_examples=60)
@given(
    num_rows=st.integers(1, 7),
    vocab=st.sampled_from([1, 2, 3, 4, 5, 63, 64, 1001]),
    scale=st.sampled_from([0.0, 0.3, 3.0, 12.0, 1000.0]),
    seed=st.integers(0, 2**63 - 8),
)
def test_skipping_changes_nothing(num_rows: int, vocab: int, scale: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = torch.from_numpy((rng.standard_normal((num_rows, vocab)) * scale).astype(np.float32))
    scores[:, 1:][torch.from_numpy(rng.random((num_rows, vocab - 1)) < 0.2)] = -math.inf
    rows = rows_of(num_rows, seed)
    assert gumbel_max(scores, *rows).tolist() == draw_with_all_noise(scores, rows)


def test_excluded_tokens_are_never_drawn() -> None:
    scores = torch.full((200, 9), -math.inf)
    scores[:, 3] = -1e30
    assert gumbel_max(scores, *rows_of(200)).tolist() == [3] * 200


def test_rows_do_not_depend_on_each_other() -> None:
    scores = torch.randn(64, 501, generator=torch.Generator().manual_seed(0)) * 2
    rows = rows_of(64, seed=2**64 - 3)
    together = gumbel_max(scores, *rows)
    for i in range(64):
        alone = gumbel_max(scores[i : i + 1], *(tensor[i : i + 1] for tensor in rows))
        assert alone.item() == together[i].item()


@pytest.mark.parametrize("axis", ["output", "seed", "choice"])
def test_distribution(axis: str) -> None:
    """Chi-square over successive outputs, seeds or choices: the draws follow the softmax."""
    num_draws = 20_000
    probabilities = np.array([0.4, 0.25, 0.2, 0.1, 0.04, 0.01])
    scores = torch.from_numpy(np.log(probabilities).astype(np.float32)).expand(num_draws, 6)
    zeros, counts = torch.zeros(num_draws, dtype=torch.int64), torch.arange(num_draws)
    seeds = counts if axis == "seed" else zeros + 1234
    choices = counts if axis == "choice" else zeros
    outputs = counts if axis == "output" else zeros
    drawn = np.bincount(gumbel_max(scores.contiguous(), seeds, choices, outputs), minlength=6)
    expected = probabilities * num_draws
    chi_square = float(((drawn - expected) ** 2 / expected).sum())
    assert chi_square < 20.5  # 5 degrees of freedom: exceeded with probability 0.001


def test_distribution_of_pairs() -> None:
    """Successive draws are independent: chi-square on the joint table of neighbours."""
    num_draws = 20_000
    seeds, choices, outputs = rows_of(num_draws, seed=99)
    scores = torch.zeros(num_draws, 3)
    drawn = gumbel_max(scores, seeds, choices, outputs).numpy()
    pairs = np.bincount(drawn[::2] * 3 + drawn[1::2], minlength=9)
    expected = num_draws / 2 / 9
    assert float(((pairs - expected) ** 2 / expected).sum()) < 26.1  # 8 degrees, 0.001


def test_seed_bits() -> None:
    assert [seed_to_int64(seed) for seed in (0, 5, -1, 2**64 - 1, 2**63, -(2**63))] == [
        0,
        5,
        -1,
        -1,
        -(2**63),
        -(2**63),
    ]
    assert PURPOSE_SAMPLE == 0
