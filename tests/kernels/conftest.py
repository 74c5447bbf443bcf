"""Copies of the native library that are built for tests, and kernels with tiles."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.kernels.native import NativeKernels, load_kernels
from headrace.kernels.native.interface import LIBRARY, open_library
from tests.kernels.native_ops import available_isas

ROOT = Path(__file__).parents[2]


def build_library(folder: Path, define: str) -> Path:
    """Build the native library with one more preprocessor definition, as `setup.py` does else."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--force"]
    command += ["--build-lib", str(folder / "lib"), "--build-temp", str(folder / "temp")]
    flags = f"{os.environ.get('CXXFLAGS', '')} -D{define}"  # a sanitizer's come from outside
    environ = {**os.environ, "CFLAGS": flags, "CXXFLAGS": flags}
    environ.pop("LD_PRELOAD", None)  # which the compiler does not need
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    built = folder / "lib" / "headrace" / "kernels" / "native" / LIBRARY.name
    assert built.exists(), done.stdout + done.stderr
    return built


@pytest.fixture(scope="session")
def emulated_amx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library whose tiles are emulated in plain C++, for any machine with AVX-512 VNNI."""
    if not LIBRARY.exists():
        pytest.skip("the native library was not built")
    return build_library(tmp_path_factory.mktemp("amx"), "HR_AMX_EMULATED")


class Amx:
    """Makes kernels with tiles: emulated ones of a library, or the processor's."""

    def __init__(self, library: Path | None) -> None:
        self._library = library

    def kernels(self, num_threads: int = 2) -> NativeKernels:
        if self._library is not None:
            return NativeKernels(open_library(self._library), "amx", num_threads)
        loaded = load_kernels("amx", num_threads)
        assert loaded is not None
        return loaded


@pytest.fixture(scope="module", params=("emulated", "processor"))
def amx(request: pytest.FixtureRequest) -> Amx:
    if request.param == "emulated":
        return Amx(request.getfixturevalue("emulated_amx"))
    if "amx" not in available_isas():
        pytest.skip("this machine has no AMX")
    return Amx(None)


@pytest.fixture(scope="module")
def plain() -> NativeKernels:
    """What tiles must equal."""
    loaded = load_kernels("avx512", 2)
    assert loaded is not None
    return loaded
