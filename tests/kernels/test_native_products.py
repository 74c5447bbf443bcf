"""Native products: truth, order of the sums bit for bit, independence of rows and threads."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from headrace.kernels.native import Epilogue, NativeKernels, load_kernels
from tests.kernels.native_ops import available_isas, bits, pack, product

SHAPES = ((1, 96, 64), (7, 100, 63), (5, 63, 100), (3, 33, 2000), (16, 576, 1536), (129, 70, 576))

pytestmark = pytest.mark.skipif(not available_isas(), reason="no native kernels on this machine")


@pytest.fixture(scope="module", params=available_isas())
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    loaded = load_kernels(request.param, 2)
    assert loaded is not None
    return loaded


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16()


def ordered_product(isa: str, x: torch.Tensor, weight: torch.Tensor) -> np.ndarray:
    """Numerics rule N1 in scalar steps; float32 [rows, outputs].

    In float64 the sum of a float32 and a product of two bfloat16 is exact wherever its rounding
    could go either way, so casting it gives the fused result.
    """
    a = np.pad(x.float().numpy(), ((0, 0), (0, -x.shape[1] % 32)))
    b = np.pad(weight.float().numpy(), ((0, 0), (0, -x.shape[1] % 32)))
    a, b = a.astype(np.float64)[:, None, :], b.astype(np.float64)[None, :, :]
    zeros = np.zeros((a.shape[0], b.shape[1]), np.float32)

    def chain(total: np.ndarray, k: int) -> np.ndarray:
        return (total + a[:, :, k] * b[:, :, k]).astype(np.float32)

    total = zeros
    for start in range(0, a.shape[2], 32):
        if isa == "avx512bf16":  # each pair: the odd k first, then the even one
            for k in range(start, start + 32, 2):
                total = chain(chain(total, k + 1), k)
            continue
        even, odd = zeros, zeros
        for k in range(start, start + 32, 2):
            even, odd = chain(even, k), chain(odd, k + 1)
        total = total + (even + odd)
    return total


@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
def test_near_the_truth(kernels: NativeKernels, rows: int, outputs: int, inputs: int) -> None:
    x, weight = random(rows, inputs), random(outputs, inputs, seed=1)
    expected = x.double() @ weight.double().T
    result = product(kernels, x, pack(kernels, weight))
    torch.testing.assert_close(result.double(), expected, rtol=0.0, atol=1e-4 * inputs**0.5)


@pytest.mark.parametrize(("rows", "outputs", "inputs"), ((1, 40, 31), (3, 35, 96), (9, 64, 577)))
def test_order_of_the_sums(kernels: NativeKernels, rows: int, outputs: int, inputs: int) -> None:
    x, weight = random(rows, inputs), random(outputs, inputs, seed=1)
    result = product(kernels, x, pack(kernels, weight))
    np.testing.assert_array_equal(result.numpy(), ordered_product(kernels.isa, x, weight))


@pytest.mark.parametrize(("outputs", "inputs"), ((96, 64), (71, 101)))
def test_a_row_is_the_same_alone(kernels: NativeKernels, outputs: int, inputs: int) -> None:
    x, matrix = random(512, inputs), pack(kernels, random(outputs, inputs, seed=1))
    whole = bits(product(kernels, x, matrix))
    for rows in (*range(1, 130), 512):
        np.testing.assert_array_equal(bits(product(kernels, x[:rows], matrix)), whole[:rows])
    alone = [bits(product(kernels, x[i : i + 1], matrix))[0] for i in range(64)]
    np.testing.assert_array_equal(np.stack(alone), whole[:64])


def test_any_number_of_threads(kernels: NativeKernels) -> None:
    x, weight = random(33, 100), random(200, 100, seed=1)
    want = bits(product(kernels, x, pack(kernels, weight)))
    for num_threads in (1, 3, 5):
        others = load_kernels(kernels.isa, num_threads)
        assert others is not None
        np.testing.assert_array_equal(bits(product(others, x, pack(others, weight))), want)


def test_what_is_not_finite_stays_in_its_row(kernels: NativeKernels) -> None:
    x, matrix = random(13, 100), pack(kernels, random(50, 100, seed=1))
    want = bits(product(kernels, x, matrix))
    x[3, 7], x[6, 8], x[9, 99] = torch.nan, torch.inf, -torch.inf
    result = product(kernels, x, matrix)
    rows = [i for i in range(13) if i not in (3, 6, 9)]
    np.testing.assert_array_equal(bits(result)[rows], want[rows])
    assert not result[[3, 6, 9]].isfinite().any()


def test_denormals_are_zero(kernels: NativeKernels) -> None:
    x = torch.full((2, 32), 1e-39).bfloat16()
    assert not product(kernels, x, pack(kernels, torch.full((32, 32), 1e30).bfloat16())).any()
    x = torch.full((2, 32), 1e-20).bfloat16()
    assert not product(kernels, x, pack(kernels, torch.full((32, 32), 1e-20).bfloat16())).any()


@pytest.mark.parametrize("has_bias", (False, True))
@pytest.mark.parametrize(("rows", "inner", "inputs"), ((1, 80, 64), (7, 37, 96), (70, 256, 130)))
def test_epilogues(
    kernels: NativeKernels, has_bias: bool, rows: int, inner: int, inputs: int
) -> None:
    x, weight = random(rows, inputs) / 8, random(2 * inner, inputs, seed=1)
    bias = random(2 * inner, seed=2) if has_bias else None
    exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    close = {"rtol": 2**-7, "atol": 2e-3}
    plain, gated = pack(kernels, weight), pack(kernels, weight, is_gated=True)
    stored = product(kernels, x, plain, Epilogue.STORE, bias)
    torch.testing.assert_close(stored.double(), exact, **close)
    residual = random(rows, 2 * inner, seed=3)
    added = product(kernels, x, plain, Epilogue.ADD, bias, residual)
    torch.testing.assert_close(added.double(), exact + residual.double(), **close)
    gate, up = exact[:, :inner], exact[:, inner:]
    silu = product(kernels, x, gated, Epilogue.SILU_MUL, bias)
    torch.testing.assert_close(silu.double(), functional.silu(gate) * up, **close)
    gelu = product(kernels, x, gated, Epilogue.GELU_MUL, bias)
    expected = functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(gelu.double(), expected, **close)


@pytest.mark.parametrize("is_gated", (False, True))
def test_packing(kernels: NativeKernels, is_gated: bool) -> None:
    for outputs, inputs in ((96, 64), (70, 33), (2, 1)):
        weight = random(outputs, inputs)
        assert torch.equal(pack(kernels, weight, is_gated).unpacked(), weight)
    weight = random(100, 65)
    matrix = pack(kernels, weight)
    matrix.fill(random(30, 65, seed=1), 41)
    weight[41:71] = random(30, 65, seed=1)
    assert torch.equal(matrix.unpacked(), weight)
    ids = torch.tensor([0, 99, 31, 32, 99] * 5)
    assert torch.equal(matrix.lookup(ids, torch.bfloat16), weight[ids])
    scaled = matrix.lookup(ids, torch.bfloat16, 25.25)
    assert torch.equal(scaled, weight[ids] * 25.25)
