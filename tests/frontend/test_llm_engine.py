"""`LLMEngine` on a tiny model: requests, steps, aborts, failures, state, statistics."""

import os
import pickle
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, EngineArgs, LLMEngine, RequestOutput, SamplingParams
from headrace.configs.errors import (
    ConfigurationError,
    EngineDeadError,
    InvalidRequestError,
    ModelFileError,
    NonFiniteLogitsError,
    UnsupportedFeatureError,
)
from headrace.engine_core.messages import EngineCoreOutput, EngineCoreOutputs, EngineStats
from headrace.frontend.stats import StatLoggerBase, Stats
from headrace.sampling_params import RequestOutputKind
from headrace.workers.protocol import RequestFault
from tests.e2e.tiny_model import ENGINE_ARGUMENTS, MAX_MODEL_LEN

pytestmark = pytest.mark.slow

FOUR = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


class Recorder(StatLoggerBase):
    def __init__(self) -> None:
        self.records: list[Stats] = []

    def log(self, stats: Stats) -> None:
        self.records.append(stats)


@pytest.fixture
def engine(llm: LLM) -> Iterator[LLMEngine]:
    engine = llm.llm_engine
    assert not engine.has_unfinished_requests()
    yield engine
    engine.abort_request(list(engine.front_end._ids))


def run(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def test_steps_until_everything_is_finished(engine: LLMEngine) -> None:
    assert engine.step() == [] and not engine.has_unfinished_requests()
    kinds = {
        "cumulative": RequestOutputKind.CUMULATIVE,
        "delta": RequestOutputKind.DELTA,
        "final": RequestOutputKind.FINAL_ONLY,
    }
    for name, kind in kinds.items():
        params = FOUR.clone()
        params.output_kind = kind
        engine.add_request(name, "prompt", params)
    assert engine.get_num_unfinished_requests() == 3
    outputs = run(engine)
    assert engine.get_num_unfinished_requests() == 0 and engine.step() == []
    (final,) = outputs["final"]
    whole = list(final.outputs[0].token_ids)
    assert len(whole) == 4
    cumulative = [list(output.outputs[0].token_ids) for output in outputs["cumulative"]]
    assert cumulative[-1] == whole
    assert all(whole[: len(ids)] == ids for ids in cumulative)
    joined = [token for output in outputs["delta"] for token in output.outputs[0].token_ids]
    assert joined == whole
    assert outputs["delta"][0].prompt == "prompt"
    assert [output.prompt for output in outputs["delta"][1:]] == [None] * (
        len(outputs["delta"]) - 1
    )
    assert [output.finished for output in outputs["cumulative"]][-2:] == [False, True]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"request_id": 3}, TypeError),
        ({"lora_request": 1}, UnsupportedFeatureError),
        ({"trace_headers": {}}, UnsupportedFeatureError),
        ({"prompt_adapter_request": 1}, UnsupportedFeatureError),
        ({"priority": 1}, ValueError),
        ({"prompt": 3}, TypeError),
        ({"prompt": {"prompt_embeds": 1}}, UnsupportedFeatureError),
        ({"prompt": [300]}, InvalidRequestError),
        ({"prompt": {"prompt_token_ids": []}}, InvalidRequestError),
        ({"prompt": [1] * (MAX_MODEL_LEN + 1)}, InvalidRequestError),
        ({"prompt": [1] * MAX_MODEL_LEN}, InvalidRequestError),
        ({"params": object()}, ValueError),
        ({"params": SamplingParams(logprobs=21)}, InvalidRequestError),
        ({"params": SamplingParams(prompt_logprobs=21)}, InvalidRequestError),
        ({"params": SamplingParams(stop_token_ids=[272])}, InvalidRequestError),
        # the first of several errors, in the documented order
        ({"request_id": 3, "lora_request": 1}, TypeError),
        ({"lora_request": 1, "priority": 1, "prompt": 3}, UnsupportedFeatureError),
        ({"priority": 1, "prompt": 3}, ValueError),
        ({"prompt": 3, "params": object()}, TypeError),
    ],
)
def test_refused_requests(
    engine: LLMEngine, arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        engine.add_request(**{"request_id": "r", "prompt": "a", "params": FOUR, **arguments})
    assert not engine.has_unfinished_requests()
    engine.add_request("r", "a", FOUR)  # the id is free
    assert len(run(engine)) == 1


def test_an_id_in_use(engine: LLMEngine) -> None:
    engine.add_request("same", "a", FOUR)
    with pytest.raises(ValueError, match="'same' is in use"):
        engine.add_request("same", "b", FOUR)
    assert run(engine)["same"][0].prompt == "a"
    engine.add_request("same", "c", FOUR)
    assert run(engine)["same"][0].prompt == "c"


def test_later_changes_of_parameters_have_no_effect(engine: LLMEngine) -> None:
    params = FOUR.clone()
    engine.add_request("r", "a", params, arrival_time=12.5)
    params.max_tokens, params.output_kind = 1, RequestOutputKind.FINAL_ONLY
    last = run(engine)["r"][-1]
    assert len(last.outputs[0].token_ids) == 4
    assert last.metrics is not None and last.metrics.arrival_time == 12.5


def test_options_of_tokenization(engine: LLMEngine) -> None:
    options = {"truncation": True, "max_length": 5, "add_special_tokens": False}
    engine.add_request("r", "abcdefgh", FOUR, tokenization_kwargs=options)
    assert run(engine)["r"][0].prompt_token_ids == engine.get_tokenizer().encode("defgh", False)


def test_aborted_requests_give_nothing_more(engine: LLMEngine) -> None:
    long = SamplingParams(max_tokens=100, ignore_eos=True, n=2)
    for name in ("a", "b", "c", "d"):
        engine.add_request(name, name, long if name != "d" else FOUR)
    engine.step()
    engine.abort_request("a")
    engine.abort_request(name for name in ("b", "unknown"))
    engine.abort_request({"c"})
    engine.abort_request("a")
    assert set(run(engine)) == {"d"}
    names = ["step", "running", "waiting", "free", "blocks", "requests"]
    stats = dict(zip(names, engine._client.call("stats"), strict=False))
    assert stats["requests"] == 0 and stats["free"] == stats["blocks"]


def test_a_failed_request_is_raised_by_step_and_others_are_kept(engine: LLMEngine) -> None:
    def poison(model: Any) -> None:
        model.embedding.weight[7] = float("nan")

    def heal(model: Any) -> None:
        model.embedding.weight[7] = model.embedding.weight[6]

    engine.collective_rpc("apply_model", args=(poison,))
    try:
        engine.add_request("good", [3, 4], FOUR)
        engine.add_request("bad", [7, 7], FOUR)
        engine.add_request("fine", [5, 6], FOUR)
        outputs: dict[str, RequestOutput] = {}
        failures = []
        while engine.has_unfinished_requests():
            try:
                outputs |= {output.request_id: output for output in engine.step()}
            except NonFiniteLogitsError as error:
                failures.append(error)
    finally:
        engine.collective_rpc("apply_model", args=(heal,))
    assert len(failures) == 1
    assert {name: output.finished for name, output in outputs.items()} == {
        "good": True, "fine": True
    }  # fmt: skip


def test_an_abort_takes_pending_failures_along(
    llm: LLM, engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call whose requests fail in one step leaves nothing for the next call to raise."""
    fault = RequestFault("non_finite_logits", "NaN")

    def all_fail() -> EngineCoreOutputs:
        outputs = [
            EngineCoreOutput(
                engine.front_end.ids_of(label)[0], 0, 0, [], finish_reason="error", fault=fault
            )
            for label in engine.front_end._ids
        ]
        return EngineCoreOutputs(outputs, EngineStats())

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_next_message", all_fail)
        with pytest.raises(NonFiniteLogitsError):
            llm.generate([[3, 4], [5, 6], [7, 8]], FOUR, use_tqdm=False)
    assert not engine.has_unfinished_requests()
    (output,) = llm.generate([[3, 4]], FOUR, use_tqdm=False)
    assert output.finished


def test_loggers(engine: LLMEngine) -> None:
    recorder = Recorder()
    engine.add_logger("mine", recorder)
    with pytest.raises(KeyError, match="'mine'"):
        engine.add_logger("mine", recorder)
    try:
        engine.add_request("r", [1, 2, 3], FOUR)
        run(engine)
        finished = [request for record in recorder.records for request in record.iteration.finished]
        assert [(r.num_prompt_tokens, r.num_generation_tokens) for r in finished] == [(3, [4])]
        assert sum(r.iteration.num_generation_tokens for r in recorder.records) == 4
        last = next(record for record in recorder.records if record.time_e2e_requests)
        assert last.max_tokens_requests == [4] and last.finished_reason_requests == ["length"]
        count = len(recorder.records)
        engine.do_log_stats()
        assert len(recorder.records) == count + 1
        assert recorder.records[-1].num_running_sys == 0
    finally:
        engine.remove_logger("mine")
    with pytest.raises(KeyError, match="'mine'"):
        engine.remove_logger("mine")


def test_configuration_and_state(engine: LLMEngine) -> None:
    assert engine.vllm_config is engine.config is engine.get_vllm_config()
    assert engine.get_config() is engine.config
    for name in ("model", "parallel", "scheduler", "decoding"):
        config = getattr(engine, f"get_{name}_config")()
        assert (
            config is getattr(engine, f"{name}_config") is getattr(engine.config, f"{name}_config")
        )
    for name in ("cache", "device", "load", "observability"):
        assert getattr(engine, f"{name}_config") is getattr(engine.config, f"{name}_config")
    assert engine.get_lora_config() is None and engine.lora_config is None
    assert engine.speculative_config is None and engine.prompt_adapter_config is None
    assert engine.get_tokenizer() is engine.tokenizer is engine.get_tokenizer_group()
    assert engine.log_stats and "prometheus" in engine.stat_loggers
    assert not engine.is_tracing_enabled() and not engine.is_sleeping()
    assert engine.reset_mm_cache() and engine.reset_prefix_cache()
    engine.check_health()


def test_features_of_later_versions(engine: LLMEngine) -> None:
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("add_lora", (1,)), ("remove_lora", (1,)), ("pin_lora", (1,)), ("list_loras", ()),
        ("add_prompt_adapter", (1,)), ("remove_prompt_adapter", (1,)),
        ("list_prompt_adapters", ()), ("do_tracing", ()), ("create_trace_span", (1,)),
        ("get_tokenizer", (1,)), ("reset_prefix_cache", ("cpu",)),
    ]  # fmt: skip
    for name, arguments in calls:
        with pytest.raises(UnsupportedFeatureError, match="this version has no"):
            getattr(engine, name)(*arguments)
    for name in ("sleep", "wake_up"):
        with pytest.raises(AssertionError, match="enable_sleep_mode"):
            getattr(engine, name)()
    for name in ("start_profile", "stop_profile"):
        with pytest.raises(ConfigurationError, match="torch_profiler_dir"):
            getattr(engine, name)()
    with pytest.raises(UnsupportedFeatureError, match="executor"):
        LLMEngine(engine.config, executor_class=object)  # type: ignore[arg-type]


def test_an_engine_cannot_be_pickled(engine: LLMEngine) -> None:
    with pytest.raises(RuntimeError, match="cannot be pickled"):
        pickle.dumps(engine)
    with pytest.raises(InvalidRequestError, match="cannot be pickled"):
        engine.collective_rpc(lambda worker: engine)


def test_validation_of_outputs() -> None:
    outputs = [1, "two"]
    assert LLMEngine.validate_outputs(outputs, int) is outputs  # type: ignore[comparison-overlap]
    assert LLMEngine.validate_output("two", int) == "two"  # type: ignore[comparison-overlap]
    with LLMEngine.enable_output_validation():
        assert LLMEngine.validate_output(1, int) == 1
        checked = LLMEngine.validate_outputs([1, 2], int)
        assert checked == [1, 2]
        with pytest.raises(TypeError, match=r"expected int, found str"):
            LLMEngine.validate_outputs(outputs, int)
    assert not LLMEngine.DO_VALIDATE_OUTPUT


def test_in_this_process(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HEADRACE_MULTIPROCESSING=0: the same outputs, the same calls, no child process."""
    monkeypatch.setenv("HEADRACE_MULTIPROCESSING", "0")
    args = EngineArgs(str(tiny_model), disable_log_stats=True, **ENGINE_ARGUMENTS)
    engine = LLMEngine.from_engine_args(args)
    engine.add_request("r", [1, 2, 3], FOUR)
    (output,) = run(engine)["r"][-1:]
    assert engine.collective_rpc(lambda worker: os.getpid()) == [os.getpid()]
    with pytest.raises(ZeroDivisionError):
        engine.collective_rpc(lambda worker: 1 / 0)
    for use in (lambda: engine.add_logger("x", Recorder()), lambda: engine.remove_logger("x")):
        with pytest.raises(RuntimeError, match="disabled"):
            use()
    engine.do_log_stats()
    engine.check_health()
    engine.close()
    monkeypatch.delenv("HEADRACE_MULTIPROCESSING")
    recorder = Recorder()
    config = replace(args, max_restarts=0).create_engine_config()
    child = LLMEngine.from_vllm_config(config, stat_loggers={"only": recorder})
    assert child.stat_loggers == {"only": recorder}
    assert child.log_stats and child.config == replace(config, log_stats=True)
    child.add_request("r", [1, 2, 3], FOUR)
    assert run(child)["r"][-1].outputs[0].token_ids == output.outputs[0].token_ids
    assert recorder.records
    child.add_request("r", [1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True))
    os.kill(child._client.ready.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        run(child)
    assert not child.has_unfinished_requests()
    for use in (child.check_health, lambda: child.add_request("s", "a", FOUR)):
        with pytest.raises(EngineDeadError):
            use()
    assert not child.has_unfinished_requests()
    child.close()


def test_a_start_that_fails_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError):
        LLMEngine.from_engine_args(EngineArgs(str(tmp_path)))
    args = EngineArgs(str(tiny_model), **{**ENGINE_ARGUMENTS, "worker_extension_cls": "no.Such"})
    with pytest.raises(ConfigurationError, match=r"no\.Such"):
        LLMEngine.from_engine_args(args)
