"""`headrace complete` and `chat` on an engine of their own."""

import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import LLM, RequestOutput, SamplingParams
from headrace.configs.options import flag_of
from headrace.frontend.cli.main import main
from headrace.frontend.llm_engine import LLMEngine
from tests.e2e.tiny_model import ENGINE_ARGUMENTS

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def process_settings() -> Iterator[None]:
    """The command line sets a signal handler for good."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def model(tiny_model: Path) -> list[str]:
    """MODEL and engine options of a command line."""
    flags = [f"{flag_of(name)}={value}" for name, value in ENGINE_ARGUMENTS.items()]
    return [str(tiny_model), *flags]


def test_a_chat_goes_on_after_a_refused_message(
    model: list[str], llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{'a' * 10_000}\nb\n"))
    assert main(["chat", *model, "--max-tokens", "8", "--temperature", "0", "--stats"]) == 0
    params = SamplingParams(temperature=0, max_tokens=8)
    (expected,) = llm.chat([{"role": "user", "content": "b"}], params, use_tqdm=False)
    printed = capsys.readouterr()
    assert printed.out == expected.outputs[0].text + "\n"
    assert "headrace: the prompt has" in printed.err and "pieces in" in printed.err


def test_sigterm_during_an_answer(
    model: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engines: list[LLMEngine] = []
    real_step = LLMEngine.step

    def step(engine: LLMEngine) -> list[RequestOutput]:
        engines.append(engine)
        os.kill(os.getpid(), signal.SIGTERM)
        return real_step(engine)

    monkeypatch.setattr(LLMEngine, "step", step)
    assert main(["complete", *model, "-q", "abc"]) == 0
    assert "Traceback" not in capsys.readouterr().err
    assert len(engines) == 1 and not engines[0].has_unfinished_requests()
    with pytest.raises(RuntimeError, match="closed"):
        engines[0].check_health()
