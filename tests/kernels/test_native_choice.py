"""Which kernels are taken, and what is said when they cannot be."""

import os
from pathlib import Path

import pytest

from headrace.configs.errors import ConfigurationError
from headrace.kernels.native import kernels as kernels_module
from headrace.kernels.native import load_kernels
from headrace.kernels.native.interface import open_library
from tests.kernels.native_ops import available_isas

AVX2, AVX512, VNNI, BF16, AMX, NEON, DOTPROD = (1 << number for number in range(7))


class Machine:
    """A library on a processor with these bits of `hr_machine`, which starts no threads."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def hr_machine(self) -> int:
        return self.bits

    def hr_why_not(self, isa: int) -> bytes | None:
        return None if self.bits >> isa & 1 else b"the processor has no number %d" % isa

    def hr_pool_new(self, num_threads: int, cpus: object) -> int:
        return 1

    def hr_pool_free(self, pool: int) -> None:
        pass


@pytest.mark.parametrize(
    ("bits", "best", "contract"),
    (
        (AVX2, "avx2", "avx2"),
        (AVX2 | AVX512, "avx512", "avx512"),
        (AVX2 | AVX512 | VNNI, "avx512vnni", "avx512"),
        (AVX2 | AVX512 | VNNI | BF16, "avx512bf16", "avx512bf16"),
        (AVX2 | AVX512 | VNNI | BF16 | AMX, "amx", "avx512"),
        (AVX2 | AVX512 | VNNI | AMX, "amx", "avx512"),
        (NEON, "neon", "neon"),
        (NEON | DOTPROD, "neondotprod", "neon"),
    ),
)
def test_best_instruction_set(
    bits: int, best: str, contract: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels_module, "open_library", lambda: Machine(bits))
    kernels = load_kernels("auto", 2)
    assert kernels is not None and kernels.isa == best
    assert kernels.contract == f"native-4-{contract}"


def test_the_log_says_why_no_better_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "headrace")
    machine = Machine(AVX2 | AVX512 | VNNI | BF16)
    monkeypatch.setattr(kernels_module, "open_library", lambda: machine)
    load_kernels("avx512vnni", 3, [4, 6])
    assert caplog.messages == [
        "native CPU kernels: avx512vnni, 3 threads; all but the first pinned to CPUs 4, 6; "
        "avx512bf16: not chosen; amx: the processor has no number 4"
    ]
    caplog.clear()
    machine.bits = NEON
    load_kernels("auto", 1)
    assert caplog.messages == [
        "native CPU kernels: neon, 1 threads; neondotprod: the processor has no number 6"
    ]
    machine.bits = AVX2 | AVX512
    with pytest.raises(ValueError, match="2 threads cannot be pinned"):
        load_kernels("avx512", 3, [4])


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
    with pytest.raises(
        ConfigurationError, match=r"cannot run .*'avx512'.*number 1; it can run avx2"
    ):
        load_kernels("avx512", 1)
    monkeypatch.setattr(kernels_module, "open_library", lambda: Machine(0))
    assert load_kernels("auto", 1) is None


@pytest.mark.parametrize(("machine", "number"), (("x86_64", 0), ("aarch64", 5)))
def test_the_log_says_what_this_kind_of_processor_lacks(
    machine: str, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "headrace")
    monkeypatch.setattr(kernels_module, "open_library", lambda: Machine(0))
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert load_kernels("auto", 1) is None
    assert f"the processor has no number {number})" in caplog.text


def test_threads_stay_where_they_are_put() -> None:
    if "avx2" not in available_isas():
        pytest.skip("no native kernels on this machine")
    cpu = max(os.sched_getaffinity(0))
    before = set(os.listdir("/proc/self/task"))
    kernels = load_kernels("avx2", 3, [cpu, cpu])
    helpers = [int(task) for task in set(os.listdir("/proc/self/task")) - before]
    assert [os.sched_getaffinity(task) for task in helpers] == [{cpu}] * 2
    assert kernels is not None and kernels.helper_cpus == (cpu, cpu)
    with pytest.raises(ConfigurationError, match=r"pinned to CPUs \[100000\]"):
        load_kernels("avx2", 2, [100000])


def test_another_version_of_the_library(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(b"no library")
    with pytest.raises(OSError):
        open_library(path)


@pytest.mark.skipif(not available_isas(), reason="no native kernels on this machine")
def test_forced_one_by_one() -> None:
    for isa in available_isas():
        loaded = load_kernels(isa, 2)
        assert loaded is not None and loaded.isa == isa


@pytest.mark.skipif(not available_isas(), reason="no native kernels on this machine")
def test_what_is_missing_has_a_reason() -> None:
    library = open_library()
    for name, number in kernels_module._ISAS.items():
        assert (library.hr_why_not(number) is None) == (name in available_isas())
