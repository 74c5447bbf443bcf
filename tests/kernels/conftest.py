"""Copies of the native library that are built for tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.kernels.native.interface import LIBRARY

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
