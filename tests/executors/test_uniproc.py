"""The one-process executor over a worker that only records."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.configs.config import EngineConfig, ModelConfig, ParallelConfig
from headrace.configs.errors import ConfigurationError, InvalidRequestError
from headrace.executors.uniproc import RaisedByWorker, UniprocExecutor

WORKER = """
class Worker:
    def __init__(self, config):
        self.config, self.calls = config, []
    def add(self, a, b=0):
        self.calls.append((a, b))
        return a + b
    def _private(self):
        return 1
    number = 3
class Extension:
    def twice(self, x):
        return self.add(x, b=x)
class Clash:
    def add(self, a):
        return 0
"""
CONFIG = EngineConfig(
    ModelConfig("m", "p", "p", ("m",), "LlamaForCausalLM", {}, "float32", 64, 32, 1)
)


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recording_worker.py").write_text(WORKER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "recording_worker", raising=False)


def make_executor(extension: str = "") -> Any:
    parallel = replace(ParallelConfig(), worker_extension_cls=extension)
    return UniprocExecutor(replace(CONFIG, parallel_config=parallel), "recording_worker:Worker")


def test_methods_and_callables() -> None:
    executor = make_executor()
    assert executor.collective_rpc("add", [1], {"b": 2}) == [3]
    assert executor.collective_rpc(lambda worker, x: (worker.calls, x), [7], {}) == [([(1, 2)], 7)]


@pytest.mark.parametrize("method", ["nothing", "_private", "__init__", "number", ""])
def test_what_is_no_public_method(method: str) -> None:
    with pytest.raises(InvalidRequestError, match="no method"):
        make_executor().collective_rpc(method, [], {})


def test_exceptions_take_the_place_of_the_result() -> None:
    def leave(worker: Any) -> None:
        sys.exit(3)

    executor = make_executor()
    (wrong,) = executor.collective_rpc("add", [1, 2, 3], {})
    assert isinstance(wrong, RaisedByWorker) and isinstance(wrong.error, TypeError)
    (exited,) = executor.collective_rpc(leave, [], {})
    assert isinstance(exited.error, RuntimeError) and "SystemExit(3)" in str(exited.error)


def test_worker_extension() -> None:
    executor = make_executor("recording_worker.Extension")
    assert executor.collective_rpc("twice", [4], {}) == [8]
    with pytest.raises(ConfigurationError, match=r"Clash.*add.*rename"):
        make_executor("recording_worker.Clash")
    for wrong in ("recording_worker.Nothing", "nowhere.Extension", "Extension"):
        with pytest.raises(ConfigurationError, match="cannot be imported"):
            make_executor(wrong)
