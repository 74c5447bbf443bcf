"""What all engines share: labels, aborts, statistics and the log's lines about requests."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import tokenizers

from headrace.configs.config import EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from headrace.configs.errors import InvalidRequestError
from headrace.configs.sampling_params import SamplingParams
from headrace.engine_core.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineStats,
    Ready,
)
from headrace.frontend.admission import RenderedPrompt
from headrace.frontend.front_end import FrontEnd, describe
from headrace.frontend.renderer import Renderer
from headrace.frontend.stat_loggers import StatLoggers
from headrace.frontend.stats import StatLoggerBase, Stats
from headrace.frontend.stats_line import LoggingStatLogger
from headrace.frontend.tokenizers.tokenizer import Tokenizer, TokenizerFacts
from headrace.workers.protocol import RequestFault

MODEL = ModelConfig(
    "m", "p", "p", ("m",), "LlamaForCausalLM", {}, "float32", 64, 300, 1, skip_tokenizer_init=True
)
CONFIG = EngineConfig(MODEL)
READY = Ready(8, 16, 48, "contract", {}, {}, 1, 1)
PROMPT = RenderedPrompt("secret words", [5, 6, 7])


class Recorder(StatLoggerBase):
    def __init__(self, fails: bool = False) -> None:
        self.records: list[Stats] = []
        self.fails = fails

    def log(self, stats: Stats) -> None:
        self.records.append(stats)
        if self.fails:
            raise RuntimeError("a broken logger")


def make_front_end(
    loggers: dict[str, StatLoggerBase] | None = None,
    log_requests: bool = False,
    config: EngineConfig = CONFIG,
) -> FrontEnd:
    renderer = Renderer(MODEL, None)
    return FrontEnd(config, READY, renderer, StatLoggers(loggers), log_requests)


def message(request_id: str, *tokens: int, finish: str | None = None, **fields: Any) -> Any:
    output = EngineCoreOutput(
        request_id, 0, 0, list(tokens), finish_reason=finish, first_scheduled_time=1.0, **fields
    )
    return EngineCoreOutputs([output], EngineStats(step=1, num_preemptions=3, num_blocks=8), 2.0)


def test_labels_of_requests_in_flight() -> None:
    front_end = make_front_end()
    first = front_end.admit(PROMPT, SamplingParams(), "same")
    second = front_end.admit(PROMPT, SamplingParams(), "same")
    assert front_end.ids_of("same") == sorted([first.request_id, second.request_id])
    with pytest.raises(ValueError, match="'same' is in use"):
        front_end.check_unused("same")
    results = front_end.process(message(first.request_id, 1, finish="stop"))
    assert results[first.request_id].output.request_id == "same"
    assert front_end.ids_of("same") == [second.request_id] and len(front_end) == 1
    assert front_end.drop(second.request_id) and not front_end.drop(second.request_id)
    assert front_end.ids_of("same") == []
    front_end.check_unused("same")


def test_a_failed_request_is_over() -> None:
    front_end = make_front_end()
    request = front_end.admit(PROMPT, SamplingParams(), "a")
    fault = RequestFault("non_finite_logits", "NaN")
    results = front_end.process(message(request.request_id, finish="error", fault=fault))
    assert results[request.request_id].failure is not None
    assert len(front_end) == 0 and front_end.ids_of("a") == []


def test_request_numbers_go_on_with_another_tokenizer() -> None:
    """Seeds derive from them: no two requests of an engine may share one."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = Tokenizer(backend, TokenizerFacts("test"))
    model = replace(MODEL, seed=7)
    front_end = FrontEnd(
        EngineConfig(model), READY, Renderer(model, tokenizer), StatLoggers({"r": Recorder()})
    )
    seeds = []
    for _ in range(3):
        request = front_end.admit(PROMPT, SamplingParams(), "r")
        seeds.append(request.sampling_params.seed)
        front_end.drop(request.request_id)
        front_end.set_tokenizer(tokenizer)
    assert len(set(seeds)) == 3
    front_end.log_stats()
    (record,) = front_end.stat_loggers.by_name["r"].records  # type: ignore[attr-defined]
    assert len(record.iteration.finished) == 3


def test_limits_and_refusals() -> None:
    front_end = make_front_end()
    assert front_end.max_prompt_tokens == 47  # the KV cache is smaller than the window
    with pytest.raises(ValueError, match=r"scheduling_policy='priority'.*'fcfs'"):
        front_end.check_priority(2)
    priority = replace(CONFIG, scheduler_config=SchedulerConfig(policy="priority"))
    make_front_end(config=priority).check_priority(2)
    with pytest.raises(InvalidRequestError, match="got dict"):
        front_end.admit(PROMPT, {}, "a")  # type: ignore[arg-type]
    assert len(front_end) == 0


def test_every_logger_gets_every_record_and_cannot_fail_a_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken, good = Recorder(fails=True), Recorder()
    front_end = make_front_end({"broken": broken, "good": good})
    request = front_end.admit(PROMPT, SamplingParams(), "a")
    with caplog.at_level(logging.ERROR):
        assert front_end.process(message(request.request_id, 9))[request.request_id].output
        front_end.process(message("unknown", 1))
        front_end.log_stats()
    assert len(broken.records) == len(good.records) == 3
    assert [r.message for r in caplog.records] == [
        "stat logger 'broken' failed; it is not reported again"
    ]
    first = good.records[0]
    assert first.now == 2.0 and first.iteration.num_generation_tokens == 1
    assert [record.num_preemption_iter for record in good.records] == [3, 0, 0]


def test_aborted_requests_are_in_the_statistics_once() -> None:
    recorder = Recorder()
    front_end = make_front_end({"r": recorder})
    front_end.drop(front_end.admit(PROMPT, SamplingParams(n=2), "a").request_id)
    front_end.log_stats()
    front_end.log_stats()
    finished = [request for record in recorder.records for request in record.iteration.finished]
    assert [request.finish_reasons for request in finished] == [["abort", "abort"]]


def test_adding_and_removing_loggers() -> None:
    loggers = StatLoggers({"a": Recorder()})
    with pytest.raises(KeyError, match="'a'"):
        loggers.add("a", Recorder())
    loggers.add("b", Recorder())
    loggers.remove("a")
    with pytest.raises(KeyError, match="'a', only b"):
        loggers.remove("a")
    disabled = StatLoggers(None)
    for use in (lambda: disabled.add("a", Recorder()), lambda: disabled.remove("a")):
        with pytest.raises(RuntimeError, match="disabled"):
            use()
    disabled.record(EngineStats(), make_front_end()._processor.process(message("x")).iteration)
    assert disabled.by_name == {}


def test_log_lines_name_requests_and_never_their_text(caplog: pytest.LogCaptureFixture) -> None:
    front_end = make_front_end(log_requests=True)
    params = SamplingParams(temperature=0.5, max_tokens=9, logit_bias={1: 2.0}, seed=3)
    with caplog.at_level(logging.INFO):
        request = front_end.admit(PROMPT, params, "mine")
        front_end.process(message(request.request_id, 1, finish="stop"))
        aborted = front_end.admit(PROMPT, params, "other")
        front_end.drop(aborted.request_id)
        front_end.admit(PROMPT, params, "third")
        front_end.drop_all()
    lines = [record.message for record in caplog.records]
    assert lines[0].startswith(f"added request {request.request_id} (mine): 3 prompt tokens, ")
    assert "temperature=0.5" in lines[0] and "logit_bias: 1" in lines[0]
    assert lines[1] == f"finished request {request.request_id} (mine)"
    assert lines[3] == f"aborted request {aborted.request_id} (other)"
    assert lines[5].startswith("lost request ")
    assert "secret" not in caplog.text


def test_parameters_in_the_log_are_numbers() -> None:
    stop = SamplingParams(stop=["my secret"], n=2, ignore_eos=True, bad_words=["private"])
    assert describe(stop) == "n=2, stop: 1, ignore_eos=True, bad_words: 1"
    assert describe(SamplingParams()) == "default parameters"


def test_progress_is_idle_without_requests() -> None:
    front_end = make_front_end()
    assert front_end.progress() == {"step": 0, "age_s": 0.0, "running": 0, "waiting": 0}
    front_end.admit(PROMPT, SamplingParams(), "a")
    assert front_end.progress()["age_s"] >= 0.0


def test_statistics_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("headrace.frontend.stats_line.time.monotonic", lambda: now[0])
    line = LoggingStatLogger(interval_s=5.0)
    stats = Stats(now=0.0, num_running_sys=2, num_waiting_sys=1, gpu_cache_usage_sys=0.25)
    stats.iteration.num_prompt_tokens, stats.iteration.num_generation_tokens = 3, 10
    with caplog.at_level(logging.INFO):
        for now[0] in (100.0, 101.0, 105.0, 106.0, 200.0, 201.0):  # a pause before 200
            line.log(stats)
    assert [record.message for record in caplog.records] == [
        "1.8 prompt tokens/s, 6.0 output tokens/s, 2 running, 1 waiting, KV cache 25.0 %, "
        "prefix hits 0.0 %"
    ]


def test_statistics_line_of_replicas(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("headrace.frontend.stats_line.time.monotonic", lambda: now[0])
    line = LoggingStatLogger(interval_s=5.0)
    with caplog.at_level(logging.INFO):
        for now[0], rank, running in ((100.0, 0, 2), (101.0, 1, 3), (105.0, 0, 4)):
            stats = Stats(0.0, num_running_sys=running, num_waiting_sys=rank, engine_rank=rank)
            stats.gpu_cache_usage_sys = running / 10
            stats.engine.num_outstanding_tokens = 10 * running
            line.log(stats)
    (record,) = caplog.records
    assert "7 running, 1 waiting, KV cache 35.0 %" in record.message
    assert record.message.endswith("by replica 0: 4+0 (40 tokens), 1: 3+1 (30 tokens)")


def test_statistics_of_replicas_add_up() -> None:
    recorder = Recorder()
    parallel = ParallelConfig(data_parallel_size=2, data_parallel_size_local=2)
    config = replace(CONFIG, parallel_config=parallel)
    loggers = StatLoggers({"a": recorder})
    front_end = FrontEnd(config, READY, Renderer(MODEL, None), loggers, num_blocks={0: 8, 1: 6})
    assert front_end.stats.num_free_blocks == 14
    for rank, running in ((0, 2), (1, 3), (0, 1)):
        stats = EngineStats(step=rank + 5, num_running=running, num_preemptions=rank, num_blocks=7)
        front_end.process(EngineCoreOutputs([], stats, rank=rank))
        assert front_end.stats is front_end.stats  # the queue's gate tells news by identity
    assert front_end.progress()["running"] == 4 and front_end.progress()["step"] == 11
    assert [record.engine_rank for record in recorder.records] == [0, 1, 0]
    assert [record.num_preemption_iter for record in recorder.records] == [0, 1, 0]
    front_end.log_stats()
    assert [record.engine_rank for record in recorder.records[3:]] == [0, 1]


def test_ranks_that_are_here() -> None:
    parallel = ParallelConfig(data_parallel_size=4, data_parallel_start_rank=2)
    front_end = make_front_end(config=replace(CONFIG, parallel_config=parallel))
    front_end.check_rank(None)
    front_end.check_rank(2)
    for rank in (-1, 0, 3):
        with pytest.raises(InvalidRequestError, match=r"out of range \[2, 3\)"):
            front_end.check_rank(rank)
