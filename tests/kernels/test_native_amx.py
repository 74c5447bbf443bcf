"""Products by tiles, bit for bit those of plain AVX-512: emulated, and on AMX where it is there."""

import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.kernels.native import Epilogue, NativeKernels, load_kernels
from headrace.kernels.native.interface import open_library
from headrace.kernels.native.kernels import supported_isas
from tests.kernels.conftest import Amx, build_library
from tests.kernels.native_ops import assert_same, available_isas, bits, pack, product
from tests.kernels.test_native_products import ordered_product, random

pytestmark = pytest.mark.skipif(
    "avx512vnni" not in available_isas(), reason="no native kernels with AVX-512 VNNI"
)


def test_is_one_family(amx: Amx, plain: NativeKernels) -> None:
    kernels = amx.kernels()
    assert kernels.isa == "amx"
    assert kernels.contract == plain.contract


def test_emulation_is_chosen_where_it_is_built(emulated_amx: Path) -> None:
    library = open_library(emulated_amx)
    assert supported_isas(library)[-1] == "amx"
    assert library.hr_why_not(4) is None


@pytest.mark.parametrize(
    ("outputs", "inputs"),
    ((96, 64), (71, 101), (33, 31), (40, 640), (64, 1344), (1, 32)),
)
def test_every_number_of_rows(amx: Amx, plain: NativeKernels, outputs: int, inputs: int) -> None:
    """Around every boundary of tiles, pairs and passes; inputs in one panel and several."""
    kernels, x = amx.kernels(), random(600, inputs)
    matrix = pack(plain, random(outputs, inputs, seed=1))
    want = product(plain, x, matrix)
    few = (*range(1, 130), 255, 256, 257, 270, 272, 288, 512, 513, 600)
    for rows in few if outputs < 70 or inputs == 64 else (1, 5, 16, 31, 33, 257):
        assert_same(product(kernels, x[:rows], matrix), want[:rows])


@pytest.mark.parametrize(("rows", "outputs", "inputs"), ((5, 40, 32), (33, 35, 96), (18, 64, 1280)))
def test_order_of_the_sums(amx: Amx, rows: int, outputs: int, inputs: int) -> None:
    x, weight, kernels = random(rows, inputs), random(outputs, inputs, seed=1), amx.kernels()
    got = product(kernels, x, pack(kernels, weight)).numpy()
    np.testing.assert_array_equal(got, ordered_product("amx", x, weight))


def test_many_inputs_of_many_rows(amx: Amx, plain: NativeKernels) -> None:
    """x does not fit into the second-level cache: groups of blocks take turns at its columns."""
    rows, outputs, inputs = 129, 32 * 19, 4128
    assert rows * inputs * 2 > 1 << 20
    x, matrix = random(rows, inputs), pack(plain, random(outputs, inputs, seed=1))
    assert_same(product(amx.kernels(), x, matrix), product(plain, x, matrix))


@pytest.mark.parametrize("num_threads", (1, 3, 5))
def test_any_number_of_threads(amx: Amx, plain: NativeKernels, num_threads: int) -> None:
    """Also where rows are shared out, because blocks of outputs are too few."""
    kernels = amx.kernels(num_threads)
    for outputs in (32, 64, 300):
        x, matrix = random(300, 96), pack(plain, random(outputs, 96, seed=1))
        want = product(plain, x, matrix)
        for rows in (7, 16, 33, 97, 300):
            assert_same(product(kernels, x[:rows], matrix), want[:rows])


@pytest.mark.parametrize("rows", (5, 16, 19, 45))
def test_epilogues(amx: Amx, plain: NativeKernels, rows: int) -> None:
    """A row that two tiles compute is finished once: what is added is added once."""
    kernels, x, weight = amx.kernels(), random(rows, 96) / 8, random(140, 96, seed=1)
    bias, residual = random(140, seed=2), random(rows, 140, seed=3)
    matrix, gated = pack(plain, weight), pack(plain, weight, is_gated=True)
    for epilogue in (Epilogue.STORE, Epilogue.STORE_F32, Epilogue.ADD):
        added = residual if epilogue is Epilogue.ADD else None
        got = product(kernels, x, matrix, epilogue, bias, added)
        assert_same(got, product(plain, x, matrix, epilogue, bias, added))
    for epilogue in (Epilogue.SILU_MUL, Epilogue.GELU_MUL):
        got = product(kernels, x, gated, epilogue, bias)
        assert_same(got, product(plain, x, gated, epilogue, bias))


def test_rows_apart(amx: Amx, plain: NativeKernels) -> None:
    """What lies between the rows of x and after them is not read."""
    wide = torch.full((20, 100), torch.nan, dtype=torch.bfloat16)
    wide[:, :96] = random(20, 96)
    matrix = pack(plain, random(50, 96, seed=1))
    for rows in (4, 15, 16, 20):
        got = product(amx.kernels(), wide[:rows, :96], matrix)
        assert_same(got, product(plain, wide[:rows, :96].contiguous(), matrix))


@pytest.mark.parametrize("inputs", (96, 100))
def test_what_is_not_finite_stays_in_its_row(amx: Amx, plain: NativeKernels, inputs: int) -> None:
    x, matrix = random(37, inputs), pack(plain, random(50, inputs, seed=1))
    x[3, 7], x[6, 8], x[20, inputs - 1], x[36, 0] = torch.nan, torch.inf, -torch.inf, torch.inf
    x[8, 5:7] = torch.tensor([torch.inf, -torch.inf])
    x[9] = 3e38  # sums overflow
    got = product(amx.kernels(), x, matrix)
    assert_same(got, product(plain, x, matrix))
    assert got[3].isnan().all() and not got[8].isfinite().any() and got[10:20].isfinite().all()


@pytest.mark.parametrize("inputs", (32, 64, 70, 94, 95))
def test_what_is_tiny(amx: Amx, plain: NativeKernels, inputs: int) -> None:
    """Products and sums around the smallest normal number: flushing leaves zeros with signs."""
    x, weight = random(24, inputs) * 2.0**-63, random(40, inputs, seed=1) * 2.0**-63
    x[:, ::3] *= 0.25
    x[4, :], x[5, :] = 1e-39, -0.0
    x[6, :], weight[3, :] = 2.0**-70, -(2.0**-70)
    got, want = product(amx.kernels(), x, pack(plain, weight)), ordered_product("amx", x, weight)
    assert_same(got, product(plain, x, pack(plain, weight)))
    assert (got == 0.0).any() and (got != 0.0).any()
    if torch.tensor(want).abs().min() >= 2.0**-126:
        np.testing.assert_array_equal(got.numpy(), want)


@pytest.mark.parametrize("isa", [isa for isa in available_isas() if isa != "avx512bf16"])
def test_the_padding_of_the_inputs_is_added(isa: str) -> None:
    """Sums that flushing left at -0, and then zeros: what the last of 32 inputs are filled with."""
    kernels = load_kernels(isa, 1)
    assert kernels is not None
    x, weight = torch.zeros(8, 66), torch.zeros(32, 66)
    x[:, 0], weight[:, 0] = 2.0**-63, 2.0**-63
    x[:, 32], weight[:, 32] = 2.0**-63, -1.5 * 2.0**-63
    x[:, 64:], weight[:, 64:] = 2.0**-64, -(2.0**-64)
    unpadded = product(kernels, x.bfloat16()[:, :64], pack(kernels, weight.bfloat16()[:, :64]))
    assert (bits(unpadded) == bits(torch.tensor(-0.0))).all()
    assert not bits(product(kernels, x.bfloat16(), pack(kernels, weight.bfloat16()))).any()


@pytest.mark.slow
def test_tiles_that_fault_are_not_used(tmp_path: Path) -> None:
    """On a machine without tiles, a library that tries them unasked says so and lives on."""
    if "amx" in available_isas():
        pytest.skip("tiles do not fault here")
    library = open_library(build_library(tmp_path, "HR_AMX_ASSUMED"))
    before = [signal.getsignal(number) for number in (signal.SIGILL, signal.SIGSEGV)]
    assert "amx" not in supported_isas(library)
    assert library.hr_why_not(4) == b"a product of tiles raised a fault"
    assert [signal.getsignal(number) for number in (signal.SIGILL, signal.SIGSEGV)] == before
