"""Loading takes little more memory than the weights do: nothing is held twice."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "bench" / "load_memory.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells private memory apart"),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_peak_while_loading(dtype: str, smollm2_gguf: Path, smollm2_hf: Path) -> None:
    """From Q4_1 blocks, and from float32 in safetensors."""
    command = [sys.executable, "-P", str(SCRIPT), str(smollm2_gguf), str(smollm2_hf)]
    done = subprocess.run([*command, "--dtype", dtype], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("weights 2" if dtype == "bfloat16" else "weights 5") == 2


def test_the_script_sees_what_is_held() -> None:
    """In a process that has no free memory of before."""
    code = (
        f"private_bytes = __import__('runpy').run_path({str(SCRIPT)!r})['private_bytes']\n"
        "before = private_bytes()\n"
        "held = bytearray(b'x' * (64 << 20))\n"
        "assert private_bytes() - before > 0.9 * len(held)\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
