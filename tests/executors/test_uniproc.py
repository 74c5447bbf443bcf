"""The one-process executor over a worker that only records."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.configs.config import EngineConfig, ModelConfig, ParallelConfig
from headrace.configs.errors import ConfigurationError, InvalidRequestError
from headrace.executors.uniproc import UniprocExecutor
from headrace.executors.worker_calls import decode_results, encode_call

WORKER = """
class Worker:
    def __init__(self, config, setup):
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


def make_executor(extension: str = "") -> UniprocExecutor:
    parallel = replace(
        ParallelConfig(), worker_cls="recording_worker.Worker", worker_extension_cls=extension
    )
    return UniprocExecutor(replace(CONFIG, parallel_config=parallel), True, lambda: None)


def call(executor: UniprocExecutor, method: Any, *args: Any, **kwargs: Any) -> Any:
    (value,) = decode_results(executor.call_workers(encode_call(1, method, args, kwargs)))
    return value


def test_methods_and_callables() -> None:
    executor = make_executor()
    assert call(executor, "add", 1, b=2) == 3
    assert call(executor, lambda worker, x: (worker.calls, x), 7) == ([(1, 2)], 7)


@pytest.mark.parametrize("method", ["nothing", "_private", "__init__", "number", ""])
def test_what_is_no_public_method(method: str) -> None:
    with pytest.raises(InvalidRequestError, match="no method"):
        call(make_executor(), method)


def test_exceptions_are_raised_at_the_caller() -> None:
    def leave(worker: Any) -> None:
        sys.exit(3)

    executor = make_executor()
    with pytest.raises(TypeError) as wrong:
        call(executor, "add", 1, 2, 3)
    assert "raised by worker 0" in wrong.value.__notes__[0]
    with pytest.raises(RuntimeError, match=r"SystemExit\(3\)"):
        call(executor, leave)


def test_worker_extension() -> None:
    executor = make_executor("recording_worker.Extension")
    assert call(executor, "twice", 4) == 8
    with pytest.raises(ConfigurationError, match=r"Clash.*add.*rename"):
        make_executor("recording_worker.Clash")
    for wrong in ("recording_worker.Nothing", "nowhere.Extension", "Extension"):
        with pytest.raises(ConfigurationError, match="cannot be imported"):
            make_executor(wrong)
