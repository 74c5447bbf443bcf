"""Fixtures of the fault tests."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory with a short path: the sockets below it have at most 107 bytes for theirs."""
    path = Path(tempfile.mkdtemp(prefix="faults-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
