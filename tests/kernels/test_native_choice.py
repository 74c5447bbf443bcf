"""Which kernels are taken, and what is said when they cannot be."""

from pathlib import Path

import pytest

from headrace.configs.errors import ConfigurationError
from headrace.kernels.native import kernels as kernels_module
from headrace.kernels.native import load_kernels
from headrace.kernels.native.interface import open_library
from tests.kernels.native_ops import available_isas


class Machine:
    """A library on a processor with these bits of `hr_machine`."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def hr_machine(self) -> int:
        return self.bits


@pytest.mark.parametrize(
    ("bits", "best"),
    ((0, "reference"), (1, "avx2"), (3, "avx512"), (7, "avx512bf16"), (7 | 1 << 8, "avx512")),
)
def test_best_instruction_set(bits: int, best: str) -> None:
    machine = Machine(bits)
    supported = kernels_module.supported_isas(machine)  # type: ignore[arg-type]
    assert kernels_module._best(machine, supported) == best  # type: ignore[arg-type]


def test_reference_and_unknown_choices() -> None:
    assert load_kernels("reference", 1) is None
    with pytest.raises(ConfigurationError, match="'sse' do not exist; choose one of auto, ref"):
        load_kernels("sse", 1)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise OSError("no such file")

    monkeypatch.setattr(kernels_module, "open_library", missing)
    assert load_kernels("auto", 1) is None
    with pytest.raises(ConfigurationError, match=r"'avx2' need the native library.*compiler"):
        load_kernels("avx2", 1)


def test_on_an_older_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_module, "open_library", lambda: Machine(1))
    with pytest.raises(ConfigurationError, match=r"cannot run .*'avx512'; it can run avx2"):
        load_kernels("avx512", 1)
    monkeypatch.setattr(kernels_module, "open_library", lambda: Machine(0))
    assert load_kernels("auto", 1) is None


def test_another_version_of_the_library(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(b"no library")
    with pytest.raises(OSError):
        open_library(path)


@pytest.mark.skipif(not available_isas(), reason="no native kernels on this machine")
def test_forced_one_by_one() -> None:
    contracts = set()
    for isa in available_isas():
        loaded = load_kernels(isa, 2)
        assert loaded is not None and loaded.isa == isa
        contracts.add(loaded.contract)
    assert len(contracts) == len(available_isas())
