"""Fixtures shared by all tests: the real models, fetched by alias; torch's settings."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.executors.child_process import OPENMP_SPIN

# Before any test imports torch: beside other processes, small models spend ten times as long in
# OpenMP's barriers as in computing.
os.environ.update({**OPENMP_SPIN, **os.environ})


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1."""
    from headrace.configs.model_files.resolve import resolve_model

    return resolve_model("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma 3 270M (base), Q4_K_M."""
    from headrace.configs.model_files.resolve import resolve_model

    return resolve_model("gemma3-270m")


def _hf_directory(gguf: Path) -> Path:
    """The transformers directory of a GGUF file, written once beside it by the converter."""
    import runpy

    script = Path(__file__).parent.parent / "scripts" / "gguf_to_hf.py"
    target = gguf.parent / f"{gguf.stem}-transformers"
    runpy.run_path(str(script))["convert"](gguf, target, "float32")
    return target


@pytest.fixture(scope="session")
def smollm2_hf(smollm2_gguf: Path) -> Path:
    return _hf_directory(smollm2_gguf)


@pytest.fixture(scope="session")
def gemma3_hf(gemma3_gguf: Path) -> Path:
    return _hf_directory(gemma3_gguf)


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """The command line sets the log's level for good: put it back."""
    log = logging.getLogger("headrace")
    level = log.level
    yield
    log.setLevel(level)


@pytest.fixture(scope="module", autouse=True)
def torch_settings() -> Iterator[None]:
    """A worker in this process changes torch's settings for good: put them back."""
    torch = sys.modules.get("torch")
    num_threads = None if torch is None else torch.get_num_threads()
    yield
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_flush_denormal(False)
        if num_threads is not None:
            torch.set_num_threads(num_threads)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What did not run without the native library is said, also where nobody reads the reasons."""
    if "torch" not in sys.modules:
        return
    from tests.kernels.native_ops import available_isas

    if not available_isas():
        terminalreporter.write_line(
            "The native kernels are not there: tests of bitwise equality were skipped, all others "
            "ran on the torch references"
        )
