"""Products with quantized weights: truth, the rule bit for bit, independence of other rows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from headrace.configs.model_files.gguf import BLOCK_SIZES
from headrace.kernels.native import Epilogue
from headrace.kernels.native.interface import Format, open_library
from tests.kernels.native_ops import available_isas, bits
from tests.kernels.quantized_ops import (
    FILE_FORMATS,
    QUANTIZED,
    Machine,
    Quantized,
    block_inputs,
    dequantized,
    int8_rows,
    modelled_product,
    packed,
    quantized_rows,
    random_blocks,
    random_matrix,
)

pytestmark = pytest.mark.skipif(not available_isas(), reason="no native kernels on this machine")

ISAS = [isa for isa in range(6) if available_isas() and open_library().hr_machine() >> isa & 1]
VNNI, AMX, EMULATED_AMX = 2, 4, "emulated amx"


@pytest.fixture(scope="module", params=(*ISAS, EMULATED_AMX))
def machine(request: pytest.FixtureRequest) -> Machine:
    if request.param != EMULATED_AMX:
        return Machine(request.param)
    if VNNI not in ISAS:
        pytest.skip("this machine has no AVX-512 VNNI")
    return Machine(AMX, library=open_library(request.getfixturevalue("emulated_amx")))


@pytest.fixture(params=QUANTIZED, ids=lambda format: format.name)
def format(request: pytest.FixtureRequest) -> Format:
    return Format(request.param)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_same(result: torch.Tensor | np.ndarray, expected: np.ndarray) -> None:
    """Bitwise equal, where not-a-number equals any other."""
    left = result.numpy() if isinstance(result, torch.Tensor) else result
    is_nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(left), is_nan)
    np.testing.assert_array_equal(
        np.where(is_nan, 0, left).view(np.int32), np.where(is_nan, 0, expected).view(np.int32)
    )


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), ((1, 96, 256), (7, 100, 512), (16, 70, 1536), (129, 33, 256))
)
def test_near_the_truth(
    machine: Machine, format: Format, rows: int, outputs: int, inputs: int
) -> None:
    matrix, weight = random_matrix(machine, format, outputs, inputs)
    x = random(rows, inputs)
    codes, scales = quantized_rows(x)
    quantized = (codes.astype(np.float64) * scales[:, :, None]).reshape(rows, -1)
    result = matrix.product(x).double()
    sizes = np.abs(quantized) @ np.abs(weight.astype(np.float64)).T
    error = np.abs(result.numpy() - quantized @ weight.astype(np.float64).T)
    assert (error <= 1e-6 * sizes).all()
    exact = x.double() @ torch.from_numpy(weight).double().T
    assert ((result - exact).norm() / exact.norm()).item() < 0.01  # what 8 bits of x cost


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    ((1, 40, 256), (5, 35, 512), (9, 64, 768), (16, 33, 256), (21, 40, 2304)),
)
def test_the_rule_bit_for_bit(
    machine: Machine, format: Format, rows: int, outputs: int, inputs: int
) -> None:
    x = random(rows, inputs)
    x[0, 32:64] = 0
    x[-1, :40] *= 1e-20
    weight = (
        random(outputs, inputs, seed=1).float()
        if format is Format.INT8
        else random_blocks(format, outputs, inputs)
    )
    result = packed(machine, format, weight, inputs).product(x)
    assert_same(result, modelled_product(x, format, np.asarray(weight)))


@settings(max_examples=15, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("kind", FILE_FORMATS, ids=lambda format: format.name)
def test_any_bytes(machine: Machine, kind: Format, data: st.DataObject) -> None:
    size, num_bytes = BLOCK_SIZES[kind.name]
    outputs, blocks = 3, data.draw(st.integers(1, 3))
    raw = np.frombuffer(
        data.draw(
            st.binary(min_size=outputs * blocks * num_bytes, max_size=outputs * blocks * num_bytes)
        ),
        np.uint8,
    ).reshape(outputs, -1)
    x = random(2, blocks * size)
    matrix = packed(machine, kind, raw, blocks * size)
    assert_same(matrix.product(x), modelled_product(x, kind, raw))
    assert_same(matrix.lookup(range(outputs), 1.0, torch.float32), dequantized(kind, raw))


@pytest.mark.parametrize("rows", (5, 18))
@pytest.mark.parametrize("inputs", (1, 31, 33, 100, 577))
def test_int8_of_any_width(machine: Machine, rows: int, inputs: int) -> None:
    x, weight = random(rows, inputs), random(35, inputs, seed=1).float()
    result = packed(machine, Format.INT8, weight, inputs).product(x)
    assert_same(result, modelled_product(x, Format.INT8, weight.numpy()))


def test_a_row_is_the_same_alone(machine: Machine, format: Format) -> None:
    inputs = 512
    matrix, _ = random_matrix(machine, format, 71, inputs)
    x = random(512, inputs)
    whole = bits(matrix.product(x))
    for rows in range(1, 130):
        np.testing.assert_array_equal(bits(matrix.product(x[:rows])), whole[:rows])
    alone = [bits(matrix.product(x[i : i + 1]))[0] for i in range(64)]
    np.testing.assert_array_equal(np.stack(alone), whole[:64])


def test_all_instruction_sets_agree(format: Format) -> None:
    results = []
    for isa in ISAS:
        matrix, _ = random_matrix(Machine(isa), format, 100, 512)
        results.append(bits(matrix.product(random(70, 512))))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_any_number_of_threads(machine: Machine, format: Format) -> None:
    x = random(70, 256)
    want = bits(random_matrix(machine, format, 200, 256)[0].product(x))
    for num_threads in (1, 3, 5):
        same = Machine(machine.isa, num_threads, machine.library)
        matrix, _ = random_matrix(same, format, 200, 256)
        np.testing.assert_array_equal(bits(matrix.product(x)), want)
        np.testing.assert_array_equal(bits(matrix.product(x[:2])), want[:2])


@pytest.mark.parametrize("rows", (3, 18, 70))
def test_what_is_not_finite_stays_in_its_row(machine: Machine, format: Format, rows: int) -> None:
    x = random(rows, 512)
    matrix, _ = random_matrix(machine, format, 50, 512)
    want = bits(matrix.product(x))
    for value in (torch.nan, torch.inf, -torch.inf):
        spoiled = x.clone()
        spoiled[1, 300] = value
        result = matrix.product(spoiled)
        others = [i for i in range(rows) if i != 1]
        np.testing.assert_array_equal(bits(result)[others], want[others])
        assert result[1].isnan().all()


def test_extremes(machine: Machine, format: Format) -> None:
    """The largest codes do not saturate, of either sign; the smallest scales count."""
    inputs = 256
    x = torch.full((16, inputs), 1.0).bfloat16()
    x[1] = -1
    x[2, ::2] = -1
    x[3] = 3e38
    if format is Format.INT8:
        weight = torch.full((33, inputs), -3.0)
        result = packed(machine, format, weight, inputs).product(x)
        assert_same(result, modelled_product(x, format, weight.numpy()))
        return
    size, num_bytes = BLOCK_SIZES[format.name]
    for byte in (0x00, 0x80, 0x7F, 0xFF):
        for scale in (1.0, 6e-8, 0.0, -2.0):
            raw = np.full((33, inputs // size, num_bytes), byte, np.uint8)
            offsets = (208,) if format is Format.Q6_K else (0, 2)
            has_minimum = format in (Format.Q4_1, Format.Q5_1, Format.Q4_K, Format.Q5_K)
            for offset in offsets if has_minimum else offsets[:1]:
                half = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
                raw[:, :, offset : offset + 2] = half
            raw = raw.reshape(33, -1)
            result = packed(machine, format, raw, inputs).product(x)
            assert_same(result, modelled_product(x, format, raw))


@pytest.mark.parametrize("has_bias", (False, True))
@pytest.mark.parametrize(("rows", "inner"), ((1, 80), (7, 37), (70, 150)))
def test_epilogues(machine: Machine, format: Format, has_bias: bool, rows: int, inner: int) -> None:
    inputs = 256
    plain, weight = random_matrix(machine, format, 2 * inner, inputs)
    gated, _ = random_matrix(machine, format, 2 * inner, inputs, gated=True)
    x = random(rows, inputs) / np.abs(weight).max() / 16
    bias = random(2 * inner, seed=2) if has_bias else None
    product = plain.product(x)
    exact = product.double() + (0.0 if bias is None else bias.double())
    close = {"rtol": 2**-7, "atol": 2e-3}
    stored = plain.product(x, Epilogue.STORE, bias)
    torch.testing.assert_close(stored.double(), exact, **close)
    residual = random(rows, 2 * inner, seed=3)
    added = plain.product(x, Epilogue.ADD, bias, residual)
    torch.testing.assert_close(added.double(), exact + residual.double(), **close)
    gate, up = exact[:, :inner], exact[:, inner:]
    silu = gated.product(x, Epilogue.SILU_MUL, bias)
    torch.testing.assert_close(silu.double(), functional.silu(gate) * up, **close)
    gelu = gated.product(x, Epilogue.GELU_MUL, bias)
    expected = functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(gelu.double(), expected, **close)


@pytest.mark.parametrize("rows", (1, 40, 70))
def test_kept_and_normalized_inputs(machine: Machine, rows: int) -> None:
    """Three products of one normalized input: two in different formats keep what the first made."""
    inputs = 512
    matrices = [
        random_matrix(machine, format, 70, inputs)[0]
        for format in (Format.Q4_K, Format.Q6_K, Format.INT8)
    ]
    x, weight = random(rows, inputs) * 3, torch.rand(inputs) + 0.5
    eps = 1e-5
    normed = x.float() / (x.float().square().mean(1, keepdim=True) + eps).sqrt() * weight
    outs = [torch.full((rows, 70), torch.nan) for _ in matrices]
    ops = []
    for number, matrix in enumerate(matrices):
        op = matrix.op()
        op.output, op.norm, op.eps = number + 1, weight.data_ptr(), eps
        op.is_input_kept = int(number > 0)
        ops.append(op)
    machine.run(ops, (x, *outs), rows)
    for matrix, out, op in zip(matrices, outs, ops, strict=True):
        alone = torch.full((rows, 70), torch.nan)
        op.output, op.is_input_kept = 1, 0
        machine.run((op,), (x, alone), rows)
        np.testing.assert_array_equal(bits(out), bits(alone))
        expected = matrix.product(normed.bfloat16())
        assert ((out - expected).norm() / expected.norm()).item() < 0.01


def test_lookup_is_dequantization(machine: Machine, format: Format) -> None:
    inputs = 768
    matrix, weight = random_matrix(machine, format, 70, inputs)
    for ids in ([0, 69, 31, 32, 69], [5, 68] * 20):
        expected = torch.from_numpy(weight)[ids]
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            found = matrix.lookup(ids, 1.0, dtype)
            np.testing.assert_array_equal(bits(found), bits(expected.to(dtype)))
            scaled = matrix.lookup(ids, 25.3, dtype)
            np.testing.assert_array_equal(bits(scaled), bits((expected * 25.3).to(dtype)))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_int8_from_floats(machine: Machine, dtype: torch.dtype) -> None:
    weight = torch.randn((40, 77), generator=torch.Generator().manual_seed(0)) / 50
    weight[3], weight[4] = 0, 6e-8
    weight[5, 6] = 1e-7  # a denormal of float16
    weight = weight.to(dtype)
    codes, scales = int8_rows(weight.float().numpy())
    matrix = packed(machine, Format.INT8, weight, 77)
    found = matrix.lookup(range(40), 1.0, torch.float32)
    np.testing.assert_array_equal(bits(found), (codes * scales[:, None]).view(np.int32))
    weight[7, 5] = torch.inf
    found = packed(machine, Format.INT8, weight, 77).lookup(range(40), 1.0, torch.float32)
    assert found[7].isnan().all()
    assert found[8].isfinite().all()


def test_sizes(machine: Machine, format: Format) -> None:
    """Not more than 3 % above those in files; 1 byte per weight of INT8, and a scale per row."""
    size = machine.library.hr_packed_bytes(format, 64, 2048)
    if format is Format.INT8:
        assert size == 64 * (2048 + 4)
        return
    inputs, num_bytes = BLOCK_SIZES[format.name]
    assert 1 <= size / (64 * 2048 // inputs * num_bytes) < 1.03
    assert machine.library.hr_packed_bytes(format, 64, inputs + 1) == -1
    assert machine.library.hr_packed_bytes(format, 64, inputs // 2) == -1


def test_what_cannot_be_packed(machine: Machine) -> None:
    floats = torch.ones(32, 256)
    for format in FILE_FORMATS:
        assert Quantized(machine, format, 32, 256).fill(floats, 0) == -1
    matrix = Quantized(machine, Format.INT8, 32, 256)
    assert matrix.fill(np.zeros((32, 256), np.uint8), 0) == -1
    assert block_inputs(Format.INT8) == 1
