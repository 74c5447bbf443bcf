"""`LLM` on a real model: both clients, argument rules, and what is left after an error."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, RequestOutput, SamplingParams
from headrace.configs.errors import EngineDeadError, InvalidRequestError

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
PROMPTS = ["The capital of France is", "Rivers run"]


def make_llm(path: Path, **arguments: Any) -> LLM:
    defaults = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 128 << 20}
    return LLM(str(path), **{**defaults, **arguments})


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> Iterator[LLM]:
    llm = make_llm(smollm2_gguf)
    yield llm
    llm.close()


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def num_requests_when_settled(llm: LLM) -> tuple[int, int]:
    """Requests in the core's table, and blocks that are not free."""
    names = ["step", "running", "waiting", "free", "blocks", "requests"]
    for _ in range(100):
        stats = dict(zip(names, llm.llm_engine._client.call("stats"), strict=False))
        if stats["requests"] == 0:
            break
        time.sleep(0.05)
    return stats["requests"], stats["blocks"] - stats["free"]


def test_in_process_and_child_process_agree(llm: LLM, smollm2_gguf: Path) -> None:
    code = (
        "import sys\nfrom headrace import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], dtype='float32', max_model_len=512,\n"
        "          kv_cache_memory_bytes=128 << 20)\n"
        "assert 'torch' in sys.modules\n"
        "params = SamplingParams(temperature=0.0, max_tokens=8)\n"
        "for output in llm.generate(sys.argv[2:], params, use_tqdm=False):\n"
        "    print(repr(output.outputs[0].text))\n"
        "llm.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(smollm2_gguf), *PROMPTS],
        env={**os.environ, "HEADRACE_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    expected = texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    assert done.stdout.split("\n")[:-1] == [repr(text) for text in expected]
    assert "Paris" in expected[0]


def test_prompt_forms_and_order(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    forms = [PROMPTS[0], ids, {"prompt": PROMPTS[0]}, {"prompt_token_ids": ids}]
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    assert len(set(texts(outputs))) == 1
    assert [output.prompt_token_ids for output in outputs] == [ids] * 4
    assert texts(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)) == texts(outputs)[:1]
    assert [int(output.request_id) for output in outputs] == sorted(
        int(output.request_id) for output in outputs
    )


def test_chat_one_and_many(llm: LLM) -> None:
    question = [{"role": "user", "content": "Name the capital city of France."}]
    params = SamplingParams(temperature=0.0, max_tokens=16)
    one = llm.chat(question, params, use_tqdm=False)
    many = llm.chat([question, question], params, use_tqdm=False)
    assert texts(many) == texts(one) * 2
    assert "Paris" in texts(one)[0]
    assert llm.chat([], params, use_tqdm=False) == []


def test_choices_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=12)
    first, second = (llm.generate(PROMPTS[0], params, use_tqdm=False)[0] for _ in range(2))
    assert [c.index for c in first.outputs] == [0, 1, 2]
    assert len({c.text for c in first.outputs}) == 3
    assert [c.text for c in first.outputs] == [c.text for c in second.outputs]
    assert params.output_kind == SamplingParams().output_kind  # the caller's object is untouched


def test_progress_bars_are_called_as_documented(llm: LLM) -> None:
    calls: list[dict[str, Any]] = []

    class Bar:
        def __init__(self, iterable: Any = None, **options: Any) -> None:
            calls.append(options)
            self._iterable = iterable
            self.format_dict = {"elapsed": 1.0}
            self.postfix = ""
            self.n = 0

        def __iter__(self) -> Any:
            return iter(self._iterable)

        def update(self, count: int) -> None:
            self.n += count

        def refresh(self) -> None: ...
        def close(self) -> None: ...

    llm.generate(PROMPTS, GREEDY, use_tqdm=Bar)
    assert [call["desc"] for call in calls] == ["Adding requests", "Processed prompts"]
    assert calls[1]["total"] == 2


@pytest.mark.parametrize(
    ("prompts", "params", "priority", "error"),
    [
        (PROMPTS, [GREEDY], None, ValueError),
        (PROMPTS, GREEDY, [0], ValueError),
        (PROMPTS, GREEDY, [0, 1], ValueError),  # the policy is fcfs
        ([PROMPTS[0], [10**9]], GREEDY, None, InvalidRequestError),
        ([PROMPTS[0], ""], GREEDY, None, InvalidRequestError),
        ([PROMPTS[0], 3], GREEDY, None, TypeError),
        ([PROMPTS[0], {"prompt_embeds": 1}], GREEDY, None, InvalidRequestError),
    ],
)
def test_errors_leave_nothing_behind(
    llm: LLM, prompts: Any, params: Any, priority: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        llm.generate(prompts, params, use_tqdm=False, priority=priority)
    assert num_requests_when_settled(llm) == (0, 0)
    assert "Paris" in texts(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False))[0]


def test_engine_death_for_good_is_a_typed_error(smollm2_gguf: Path) -> None:
    llm = make_llm(smollm2_gguf, max_restarts=0)
    os.kill(llm.llm_engine._client.ready.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    llm.close()
    with pytest.raises(EngineDeadError):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
