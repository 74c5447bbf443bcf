"""Native products: truth, order of the sums bit for bit, independence of rows and threads."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn import functional

from headrace.kernels.native import FORMATS, Epilogue, Format, NativeKernels, load_kernels
from tests.kernels.native_ops import GATED, available_isas, bits, fused, pack, product

SHAPES = ((1, 96, 64), (7, 100, 63), (5, 63, 100), (3, 33, 2000), (16, 576, 1536), (129, 70, 576))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

pytestmark = pytest.mark.skipif(not available_isas(), reason="no native kernels on this machine")


@pytest.fixture(scope="module", params=available_isas())
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    loaded = load_kernels(request.param, 2)
    assert loaded is not None
    return loaded


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    loaded: torch.dtype = request.param
    return loaded


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def ordered_product(isa: str, x: torch.Tensor, weight: torch.Tensor) -> np.ndarray:
    """Numerics rule N1 in scalar steps, or one chain for f16 and f32; float32 [rows, outputs]."""
    padding = ((0, 0), (0, -x.shape[1] % 32))
    a = np.pad(x.float().numpy(), padding)[:, None, :]
    b = np.pad(weight.float().numpy(), padding)[None, :, :]
    zeros = np.zeros((a.shape[0], b.shape[1]), np.float32)

    def chain(total: np.ndarray, k: int) -> np.ndarray:
        return fused(a[:, :, k], b[:, :, k], total)

    total = zeros
    if x.dtype is not torch.bfloat16:
        for k in range(x.shape[1]):
            total = chain(total, k)
        return total
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
def test_near_the_truth(
    kernels: NativeKernels, dtype: torch.dtype, rows: int, outputs: int, inputs: int
) -> None:
    x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, seed=1)
    expected = x.double() @ weight.double().T
    result = product(kernels, x, pack(kernels, weight))
    torch.testing.assert_close(result.double(), expected, rtol=0.0, atol=1e-4 * inputs**0.5)


def test_every_tail(kernels: NativeKernels, dtype: torch.dtype) -> None:
    for size in range(1, 34):
        other = 34 - size
        x, weight = random(3, size, dtype=dtype), random(other, size, dtype=dtype, seed=1)
        result = product(kernels, x, pack(kernels, weight))
        expected = x.double() @ weight.double().T
        torch.testing.assert_close(result.double(), expected, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), ((1, 40, 31), (3, 35, 96), (9, 64, 577), (14, 33, 1100))
)
def test_order_of_the_sums(
    kernels: NativeKernels, dtype: torch.dtype, rows: int, outputs: int, inputs: int
) -> None:
    x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, seed=1)
    result = product(kernels, x, pack(kernels, weight))
    np.testing.assert_array_equal(result.numpy(), ordered_product(kernels.isa, x, weight))


@pytest.mark.parametrize(("outputs", "inputs"), ((96, 64), (71, 101), (40, 1061)))
def test_a_row_is_the_same_alone(
    kernels: NativeKernels, dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    x = random(512, inputs, dtype=dtype)
    matrix = pack(kernels, random(outputs, inputs, dtype=dtype, seed=1))
    whole = bits(product(kernels, x, matrix))
    for rows in (*range(1, 130), 512):
        np.testing.assert_array_equal(bits(product(kernels, x[:rows], matrix)), whole[:rows])
    alone = [bits(product(kernels, x[i : i + 1], matrix))[0] for i in range(64)]
    np.testing.assert_array_equal(np.stack(alone), whole[:64])


def test_any_number_of_threads(kernels: NativeKernels, dtype: torch.dtype) -> None:
    x, weight = random(33, 100, dtype=dtype), random(200, 100, dtype=dtype, seed=1)
    want = bits(product(kernels, x, pack(kernels, weight)))
    for num_threads in (1, 3, 5):
        others = load_kernels(kernels.isa, num_threads)
        assert others is not None
        np.testing.assert_array_equal(bits(product(others, x, pack(others, weight))), want)


def test_what_is_not_finite_stays_in_its_row(kernels: NativeKernels, dtype: torch.dtype) -> None:
    x = random(13, 100, dtype=dtype)
    matrix = pack(kernels, random(50, 100, dtype=dtype, seed=1))
    want = bits(product(kernels, x, matrix))
    x[3, 7], x[6, 8], x[9, 99] = torch.nan, torch.inf, -torch.inf
    result = product(kernels, x, matrix)
    rows = [i for i in range(13) if i not in (3, 6, 9)]
    np.testing.assert_array_equal(bits(result)[rows], want[rows])
    assert not result[[3, 6, 9]].isfinite().any()
    assert result[3].isnan().all() and not result[[6, 9]].isnan().any()
    stored = product(kernels, x, matrix, Epilogue.STORE)
    torch.testing.assert_close(stored, result.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_denormals_are_zero(kernels: NativeKernels, dtype: torch.dtype) -> None:
    x = torch.full((2, 32), 1e-39, dtype=dtype)
    assert not product(kernels, x, pack(kernels, torch.full((32, 32), 1e30, dtype=dtype))).any()
    x = torch.full((2, 32), 1e-20, dtype=dtype)
    assert not product(kernels, x, pack(kernels, torch.full((32, 32), 1e-20, dtype=dtype))).any()


def test_small_and_large_halves(kernels: NativeKernels) -> None:
    """Denormals of float16 are numbers like others in float32; what does not fit becomes Inf."""
    ones = pack(kernels, torch.ones(32, 32).half())
    least = torch.full((2, 32), 2.0**-24).half()
    for epilogue in (Epilogue.STORE, Epilogue.STORE_F32):
        assert (product(kernels, least, ones, epilogue) == 2.0**-19).all()
    for value, expected in ((65504.0, 65504.0), (65519.0, 65504.0), (65520.0, torch.inf)):
        x = torch.zeros(2, 32)
        x[:, 0], x[:, 1] = 65504.0, value - 65504.0
        assert (product(kernels, x.half(), ones, Epilogue.STORE) == expected).all()


EPILOGUE_TOLERANCES = {
    torch.bfloat16: {"rtol": 2**-7, "atol": 2e-3},
    torch.float16: {"rtol": 2**-10, "atol": 2e-4},
    torch.float32: {"rtol": 2e-6, "atol": 2e-5},
}


@pytest.mark.parametrize("has_bias", (False, True))
@pytest.mark.parametrize(("rows", "inner", "inputs"), ((1, 80, 64), (7, 37, 96), (70, 256, 130)))
def test_epilogues(
    kernels: NativeKernels, dtype: torch.dtype, has_bias: bool, rows: int, inner: int, inputs: int
) -> None:
    x = random(rows, inputs, dtype=dtype) / 8
    weight = random(2 * inner, inputs, dtype=dtype, seed=1)
    bias = random(2 * inner, dtype=dtype, seed=2) if has_bias else None
    exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    close = EPILOGUE_TOLERANCES[dtype]
    plain, gated = pack(kernels, weight), pack(kernels, weight, is_gated=True)
    stored = product(kernels, x, plain, Epilogue.STORE, bias)
    torch.testing.assert_close(stored.double(), exact, **close)
    residual = random(rows, 2 * inner, dtype=dtype, seed=3)
    added = product(kernels, x, plain, Epilogue.ADD, bias, residual)
    torch.testing.assert_close(added.double(), exact + residual.double(), **close)
    gate, up = exact[:, :inner], exact[:, inner:]
    silu = product(kernels, x, gated, Epilogue.SILU_MUL, bias)
    torch.testing.assert_close(silu.double(), functional.silu(gate) * up, **close)
    gelu = product(kernels, x, gated, Epilogue.GELU_MUL, bias)
    expected = functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(gelu.double(), expected, **close)


def test_output_column(kernels: NativeKernels, dtype: torch.dtype) -> None:
    """Nothing is written left of it either."""
    x, weight = random(9, 50, dtype=dtype), random(70, 50, dtype=dtype, seed=1)
    for epilogue in Epilogue:
        matrix = pack(kernels, weight, epilogue in GATED)
        residual = random(9, 70, dtype=dtype, seed=2) if epilogue is Epilogue.ADD else None
        want = bits(product(kernels, x, matrix, epilogue, None, residual))
        for column in (1, 37):
            result = product(kernels, x, matrix, epilogue, None, residual, column)
            np.testing.assert_array_equal(bits(result), want)


def test_mixed_formats_are_refused(kernels: NativeKernels) -> None:
    for dtype, format in FORMATS.items():
        matrix = pack(kernels, random(32, 32, dtype=dtype))
        for other in set(DTYPES) - {dtype}:
            with pytest.raises(ValueError, match=f"rows in .* with matrices in {format.name}"):
                product(kernels, random(2, 32, dtype=other), matrix)
        unknown = dataclasses.replace(matrix, format=99)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="matrices in format 99"):
            product(kernels, random(2, 32, dtype=dtype), unknown)


@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("is_gated", (False, True))
def test_packing(
    kernels: NativeKernels, dtype: torch.dtype, source: torch.dtype, is_gated: bool
) -> None:
    """Rounded once, from any dtype; NaN stays NaN, and what does not fit becomes Inf."""
    for outputs, inputs in ((96, 64), (70, 33), (34, 200), (2, 1)):
        weight = random(outputs, inputs, dtype=source) * 3
        weight[0, 0], weight[-1, -1], weight[1, 0] = torch.nan, -torch.inf, 1e-7
        if source is not torch.float16:
            weight[1, -1] = 65520.0
        packed = pack(kernels, weight.to(dtype), is_gated)
        packed.data.zero_()
        packed.fill(weight[: outputs // 2], 0)
        packed.fill(weight[outputs // 2 :], outputs // 2)
        want = weight.to(dtype)
        torch.testing.assert_close(packed.unpacked(), want, rtol=0, atol=0, equal_nan=True)
    weight = random(100, 65, dtype=source)
    matrix = pack(kernels, weight.to(dtype))
    part = random(30, 65, dtype=source, seed=1)
    matrix.fill(part, 41)
    want = weight.to(dtype)
    want[41:71] = part.to(dtype)
    assert torch.equal(matrix.unpacked(), want)


def test_padding_is_zero(kernels: NativeKernels) -> None:
    """Rows up to 32, and inputs of bf16 up to 32, which AMX reads."""
    weight = torch.ones(33, 33).bfloat16()
    elements = pack(kernels, weight).data.view(torch.bfloat16)
    assert len(elements) == 64 * 64 and elements.sum() == 33 * 33
    for dtype in (torch.float16, torch.float32):
        elements = pack(kernels, weight.to(dtype)).data.view(dtype)
        assert len(elements) == 64 * 33 and elements.sum() == 33 * 33


@pytest.mark.parametrize("out", DTYPES, ids=str)
def test_lookup(kernels: NativeKernels, dtype: torch.dtype, out: torch.dtype) -> None:
    for inputs in (1, 63, 130):
        weight = random(100, inputs, dtype=dtype)
        matrix = pack(kernels, weight)
        for ids in (torch.tensor([99]), torch.tensor([0, 99, 31, 32, 99] * 5)):
            assert torch.equal(matrix.lookup(ids, out), weight[ids].to(out))
            scaled = (weight[ids].float() * 25.25).to(out)
            assert torch.equal(matrix.lookup(ids, out, 25.25), scaled)


def test_formats_without_code(kernels: NativeKernels) -> None:
    with pytest.raises(ValueError, match="rows of 33 inputs cannot be packed as Q4_K"):
        kernels.packed_bytes(Format.Q4_K, 32, 33)


@pytest.mark.parametrize("count", (1, 40))  # the caller alone, and all threads
def test_looked_up_denormals_are_zero(
    kernels: NativeKernels, dtype: torch.dtype, count: int
) -> None:
    matrix = pack(kernels, torch.full((3, 5), 1e-39).to(dtype))
    assert not matrix.lookup(torch.zeros(count, dtype=torch.int64), dtype, 2.0).any()
    assert (torch.full((3,), 1e-39) * 2.0).all()  # the caller's own setting is as before
