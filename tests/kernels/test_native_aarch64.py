"""The native kernels of 64-bit Arm, in an emulator: `aarch64/check.cpp` judges them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kernels_in_an_emulator() -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "kernels_aarch64.sh")],
        env={**os.environ, "VENV": sys.prefix},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if done.stdout.startswith("skipped"):
        pytest.skip(done.stdout.strip())
    assert "neondotprod: the processor has no dot products of bytes" in done.stdout
    assert "neon: 0 failures" in done.stdout and "neondotprod: 0 failures" in done.stdout
