"""Cases of the robustness rules that no other test shows whole."""

import asyncio
import logging
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.configs.sampling_params import SamplingParams
from headrace.frontend import renderer as renderer_module
from headrace.frontend.admission import RenderedPrompt
from headrace.frontend.render_params import ChatParams
from headrace.frontend.tokenizers import Tokenizer
from headrace.workers.logprobs import SCORE_COPIES, SCORE_ROWS
from headrace.workers.memory_budget import plan_memory
from headrace.workers.worker import Worker
from tests.frontend.test_front_end import make_front_end, message
from tests.frontend.test_renderer import MESSAGES, make_renderer, make_tokenizer
from tests.workers.test_worker import save


def test_a12_every_line_has_an_id_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """Fifty requests that the caller calls the same: each line names the one it is about."""
    front_end = make_front_end(log_requests=True)
    with caplog.at_level(logging.INFO, logger="headrace"):
        requests = [
            front_end.admit(RenderedPrompt(f"secret {i}", [i + 1]), SamplingParams(), "job-7")
            for i in range(50)
        ]
        for request in reversed(requests):
            front_end.process(message(request.request_id, 9, finish="stop"))
    found = [re.match(r"(\w+) request (\S+) \(job-7\)", r.getMessage()) for r in caplog.records]
    lines = [(match.group(1), match.group(2)) for match in found if match]
    ids = [request.request_id for request in requests]
    assert lines == [("added", i) for i in ids] + [("finished", i) for i in reversed(ids)]
    assert len(set(ids)) == 50 and len(front_end) == 0
    assert not any("job-7" in i for i in ids) and "secret" not in caplog.text


def test_pp15_the_budget_has_room_for_scores(tmp_path: Path) -> None:
    """Each word of the vocabulary costs what the bounded scoring of a prompt takes for it."""
    config = save("llama", tmp_path)
    worker = Worker(config)
    worker.init_device()
    worker.load_model(lambda phase: None)
    model, spec = worker._model, worker.init_kv_cache().kv_cache_spec
    assert model is not None

    def activations(vocab_size: int) -> int:
        decoder = replace(model.config, vocab_size=vocab_size)
        return plan_memory(config, decoder, spec, 0, 1 << 60).activations

    per_word = (activations(3_000_000) - activations(1_000_000)) // 2_000_000
    logits = config.scheduler_config.max_num_seqs * 4
    assert per_word >= SCORE_ROWS * SCORE_COPIES * 4 + logits
    assert per_word < 2 * (SCORE_ROWS * SCORE_COPIES * 4 + 4 * logits)  # and no more than that


def test_s11_templates_and_tokenizing_run_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[str] = []

    def watched(work: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            threads.append(threading.current_thread().name)
            return work(*arguments, **options)

        return run

    monkeypatch.setattr(renderer_module, "render_chat", watched(renderer_module.render_chat))
    for name in ("encode", "encode_batch"):
        if hasattr(Tokenizer, name):
            monkeypatch.setattr(Tokenizer, name, watched(getattr(Tokenizer, name)))
    renderer = make_renderer(make_tokenizer())

    async def use() -> None:
        await renderer.render_cmpl_async(["abc"])
        await renderer.render_chat_async([MESSAGES], ChatParams())

    asyncio.run(use())
    assert len(threads) >= 3  # a prompt is encoded; messages are rendered, and then encoded
    assert threading.current_thread().name not in threads
    assert len(set(threads)) == 1  # of a pool of one
