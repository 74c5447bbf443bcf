"""The wheel and the sdist, installed and run in empty environments without a compiler."""

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e.tiny_model import save_tiny_model
from tests.kernels.native_ops import available_isas

ROOT = Path(__file__).parent.parent.parent
LIBRARY = "headrace/kernels/native/libheadrace_kernels.so"
ANSWER = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s")
import headrace
from headrace import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="bfloat16", num_gpu_blocks_override=64, max_num_seqs=8)
answer = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
print(headrace.__file__, len(answer[0].outputs[0].token_ids))
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not available_isas(), reason="no native kernels can be built or run here"),
]


def run(command: list[str], environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """stdout and stderr of a command that must succeed."""
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def without_compiler(bin_folder: Path) -> dict[str, str]:
    return {"PATH": str(bin_folder), "CC": "false", "CXX": "false", "HOME": str(bin_folder)}


class EmptyEnvironment:
    """Python, one wheel of headrace, and what is installed here beside headrace."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self._bin = folder / "bin"
        run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
        run(
            [sys.executable, "-m", "pip", "--python", str(self._bin / "python"), "install", "-q",
             "--disable-pip-version-check", "--no-deps", "--no-index", str(wheel)]
        )  # fmt: skip
        (self._site,) = folder.glob("lib/python*/site-packages")
        # Python follows no .pth files in these, so the headrace that is tested here stays out.
        installed = [path for path in sys.path if path.endswith("site-packages")]
        (self._site / "installed.pth").write_text("\n".join(installed) + "\n")

    def run(self, command: str, *arguments: str) -> tuple[str, str]:
        return run([str(self._bin / command), *arguments], without_compiler(self._bin))

    def answer(self, model: Path) -> str:
        """Generate a few tokens in a process of its own; what it logged."""
        printed, logged = self.run("python", "-P", "-c", ANSWER, str(model))
        assert printed.split() == [str(self._site / "headrace" / "__init__.py"), "8"]
        return logged


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    run(
        ["bash", str(ROOT / "scripts" / "build_wheel.sh"), str(folder)],
        {**os.environ, "VENV": sys.prefix},
    )
    return folder


def test_what_is_inside(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    assert wheel.name.startswith("headrace-") and "-py3-none-manylinux_2_28_" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert LIBRARY in names and "headrace/py.typed" in names
    others = {name for name in names if not name.endswith(".py") and "dist-info/" not in name}
    assert others == {LIBRARY, "headrace/py.typed"}
    assert {name.split("/")[0].split("-")[0] for name in names} == {"headrace"}
    assert not [name for name in names if "test" in name]

    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    sources = {f"kernels/native/{path.name}" for path in (ROOT / "kernels/native").glob("*.[ch]*")}
    assert sources | {"setup.py", "pyproject.toml", "LICENSE", "README.md"} <= inside
    assert not [name for name in inside if name.endswith(".so")]


def test_wheel_runs_without_a_compiler(dist: Path, model: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    environment = EmptyEnvironment(tmp_path, wheel)
    logged = environment.answer(model)
    assert "CPU kernels: native-" in logged and "CPU kernels: torch" not in logged
    assert environment.run("headrace", "--version")[0].startswith("headrace ")
    report, _ = environment.run("headrace", "collect-env")
    chosen = next(line for line in report.splitlines() if "chosen by default:" in line)
    assert chosen.split()[-1] in logged


def test_source_installs_without_a_compiler(dist: Path, model: Path, tmp_path: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps",
         "--no-build-isolation", "--no-cache-dir", "-w", str(tmp_path), str(sdist)],
        without_compiler(Path(sys.executable).parent),
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    environment = EmptyEnvironment(tmp_path / "environment", wheel)
    logged = environment.answer(model)
    assert "CPU kernels: torch" in logged and "from source with a C++ compiler" in logged
    report, _ = environment.run("headrace", "collect-env")
    reason = next(line for line in report.splitlines() if "reason:" in line)
    assert "libheadrace_kernels.so" in reason
