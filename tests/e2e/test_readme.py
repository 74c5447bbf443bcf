"""What the README shows runs as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent.parent / "README.md"


@pytest.mark.slow
def test_python_examples_run(smollm2_gguf: Path) -> None:
    """All Python blocks, as one script; the fixture has fetched the model that they name."""
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    done = subprocess.run(
        [sys.executable, "-c", "".join(blocks)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 3  # a line for each answer
