"""The loops that measure what arithmetic a machine can do: they count what they do, and end."""

import pytest

from headrace.kernels.native import Format, load_kernels
from tests.kernels.native_ops import available_isas

pytestmark = pytest.mark.skipif(not available_isas(), reason="no native kernels on this machine")

# Multiply-adds of one instruction: lanes times the inputs that each takes.
FLOAT = {"avx2": 8, "avx512": 16, "avx512vnni": 16, "avx512bf16": 16, "amx": 16}
BF16 = FLOAT | {"avx512bf16": 32, "amx": 16 * 16 * 32}
INTEGER = {"avx2": 32, "avx512": 64, "avx512vnni": 64, "avx512bf16": 64, "amx": 16 * 16 * 64}


@pytest.mark.parametrize("isa", available_isas())
def test_operations_are_counted(isa: str) -> None:
    for num_threads in (1, 2):
        kernels = load_kernels(isa, num_threads)
        assert kernels is not None
        for format in Format:
            each = BF16 if format is Format.BF16 else INTEGER
            if format in (Format.F16, Format.F32):
                each = FLOAT
            num_chains = 4 if each[isa] >= 16 * 16 else 14
            per_round = 2 * num_chains * each[isa] * num_threads
            for rounds in (1, 3, 1000):
                assert kernels.peak(format, rounds) == rounds * per_round
            assert kernels.peak(format, 0) == 0
