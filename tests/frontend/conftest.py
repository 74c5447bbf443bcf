"""A tiny model, and an LLM in a process of its own, that the tests of the engines share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import LLM
from tests.e2e.tiny_model import ENGINE_ARGUMENTS, save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def llm(tiny_model: Path) -> Iterator[LLM]:
    llm = LLM(str(tiny_model), **ENGINE_ARGUMENTS)
    yield llm
    llm.close()
