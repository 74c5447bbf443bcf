"""The best token of each row against torch and numpy: awkward sizes, ties, NaN and infinities."""

import math

import numpy as np
import pytest
import torch

from headrace.kernels.native import NativeKernels, load_kernels
from tests.kernels.native_ops import available_isas, bits

pytestmark = pytest.mark.skipif(not available_isas(), reason="no native kernels on this machine")

SIZES = (1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 1023, 1024, 1025, 2049, 49_152, 262_144)
ODD_VALUES = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38)


@pytest.fixture(
    scope="module",
    params=[(isa, threads) for isa in available_isas()[:2] for threads in (1, 2)]
    + [(isa, 3) for isa in available_isas()],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    result = load_kernels(*request.param)
    assert result is not None
    return result


def assert_best(
    kernels: NativeKernels, logits: torch.Tensor, maxima: np.ndarray, token_ids: np.ndarray
) -> None:
    found, found_ids = kernels.argmax(logits)
    assert found_ids == token_ids.tolist()
    np.testing.assert_array_equal(np.array(found, dtype=np.float32), maxima)  # NaN equals NaN


@pytest.mark.parametrize("vocab", SIZES)
def test_equal_to_torch(kernels: NativeKernels, vocab: int) -> None:
    """Rows that are random, that have ties, and whose best is at each end."""
    rng = np.random.default_rng(vocab)
    num_rows = 65 if vocab < 49_152 else 5
    logits = torch.from_numpy(rng.standard_normal((num_rows, vocab)).astype(np.float32) * 3)
    logits[1::5] = logits[1::5].round()
    logits[2::5, 0] = logits[3::5, -1] = 99.0
    logits[4::5] = 0.5
    before = logits.clone()
    expected = logits.max(dim=1)
    assert_best(kernels, logits, expected.values.numpy(), expected.indices.numpy())
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab", (1, 3, 16, 17, 100, 2049))
def test_numbers_that_are_none_and_others(kernels: NativeKernels, vocab: int) -> None:
    """The first NaN wins over all; -Inf everywhere is the first id; denormals are numbers.

    To torch's threads they may not be, once a worker has run in this process: numpy judges.
    """
    rng = np.random.default_rng(vocab)
    background = rng.choice(np.array([-1.0, -math.inf, 0.0, -0.0, -1e-39]), (200, vocab))
    logits = torch.from_numpy(background.astype(np.float32))
    for row in range(150):
        for value in rng.choice(ODD_VALUES, 1 + row % 3):
            logits[row, int(rng.integers(vocab))] = float(value)
    logits[150:160] = -math.inf
    logits[160:165] = math.nan
    numbers = logits.numpy()
    assert_best(kernels, logits, numbers.max(axis=1), numbers.argmax(axis=1))


def test_every_place(kernels: NativeKernels) -> None:
    """A best token and a NaN at each place of a row that all parts share."""
    vocab = 1111
    logits = torch.zeros(vocab, vocab).fill_diagonal_(1.0)
    assert kernels.argmax(logits) == ([1.0] * vocab, list(range(vocab)))
    logits.fill_diagonal_(math.nan)
    logits[:, 5] = math.inf
    maxima, token_ids = kernels.argmax(logits)
    assert token_ids == [*range(5), 5, *range(6, vocab)]
    assert np.isnan(maxima[:5] + maxima[6:]).all() and maxima[5] == math.inf


def test_number_of_rows(kernels: NativeKernels) -> None:
    """A row's bits need no other rows, and what is behind the last row is not looked at."""
    generator = torch.Generator().manual_seed(0)
    memory = torch.randn(66, 333, generator=generator)
    memory[::7].clamp_(max=0.0)  # many zeros
    whole = kernels.argmax(memory)
    for num_rows in range(65, 0, -1):
        memory[num_rows] = math.nan
        maxima, token_ids = kernels.argmax(memory[:num_rows])
        assert token_ids == whole[1][:num_rows]
        np.testing.assert_array_equal(
            bits(torch.tensor(maxima)), bits(torch.tensor(whole[0][:num_rows]))
        )
    assert kernels.argmax(memory[:0]) == ([], [])


def test_refuses_memory_in_another_order(kernels: NativeKernels) -> None:
    for logits in (torch.zeros(6, 4).T, torch.zeros(4, 6).double(), torch.zeros(24)):
        with pytest.raises(ValueError, match="no kernel for"):
            kernels.argmax(logits)
