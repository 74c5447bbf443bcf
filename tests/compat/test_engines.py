"""`LLM` and the engines: rules of the Python API that the tests of their own folders leave out."""

import dataclasses
import logging
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, AsyncLLMEngine, LLMEngine, RequestOutput, SamplingParams
from headrace.configs.engine_args import EngineArgs, UsageContext
from headrace.configs.errors import UnsupportedFeatureError
from headrace.configs.hardware import cpu_facts
from headrace.frontend.beam_search import BeamSearchOutput, BeamSearchSequence, beam_search
from headrace.frontend.outputs import Logprob
from headrace.sampling_params import BeamSearchParams
from tests.e2e.tiny_model import EOS

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPT = [(7 * i) % 250 for i in range(3 * 16 + 2)]  # three blocks and a bit


class Started:
    """An `LLM`, what its start logged, and its first output."""

    def __init__(self, model: Path, tokenizer: Path) -> None:
        self.lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.lines.append(record.getMessage())  # type: ignore[method-assign]
        root = logging.getLogger("headrace")
        level = root.level
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        try:
            self.llm = LLM(
                str(model), tokenizer=str(tokenizer), dtype="float32", seed=5, max_num_seqs=5,
                max_num_batched_tokens=5, num_gpu_blocks_override=32, enable_prefix_caching=False,
                disable_log_stats=False, override_generation_config={"top_k": 40},
            )  # fmt: skip
        finally:
            root.removeHandler(handler)
            root.setLevel(level)
        self.counter, self.defaults = self.llm.request_counter, self.llm.default_sampling_params
        (self.first,) = self.llm.generate("a", GREEDY, use_tqdm=False)


@pytest.fixture(scope="module")
def cold(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """No prefix cache, five tokens in a step, weights and tokenizer in two places."""
    bare = tmp_path_factory.mktemp("bare")
    for file in tiny_model.iterdir():
        if not file.name.startswith("tokenizer"):
            shutil.copy(file, bare)
    started = Started(bare, tiny_model)
    yield started
    started.llm.close()


# Construction


@pytest.mark.slow
def test_attributes_of_a_fresh_llm(cold: Started) -> None:
    assert cold.first.request_id == "0" and cold.defaults is None
    assert type(cold.llm.llm_engine) is LLMEngine is cold.llm.engine_class
    assert next(cold.llm.request_counter) == 1
    assert cold.llm.llm_engine.model_config.seed == 5
    assert cold.llm.get_tokenizer().encode("a")[0] == 256


@pytest.mark.slow
def test_statistics_are_kept_but_not_logged(llm: LLM, cold: Started) -> None:
    assert set(llm.llm_engine.stat_loggers) == {"prometheus"}
    assert set(cold.llm.llm_engine.stat_loggers) == {"prometheus", "logging"}


@pytest.mark.slow
def test_the_start_says_what_ends_a_text_and_where_defaults_come_from(cold: Started) -> None:
    """PP28, PP30."""
    assert f"end-of-text tokens: {EOS} '<eos>'" in cold.lines
    expected = (
        "sampling defaults: top_k=40 (--override-generation-config), everything else built-in"
    )
    assert expected in cold.lines
    assert cold.llm.get_default_sampling_params() == SamplingParams(top_k=40)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("float32", "float32"), ("float", "float32"), ("bfloat16", "bfloat16"),
        ("half", "float16"), ("float16", "float16"), ("auto", None),
    ],
)  # fmt: skip
def test_dtypes(tiny_model: Path, given: str, expected: str | None) -> None:
    """`auto` is what the CPU computes with; the checkpoint here is in float32."""
    config = EngineArgs(str(tiny_model), dtype=given).create_engine_config()
    assert config.model_config.dtype == (expected or cpu_facts().preferred_dtype)


def test_steps_of_an_llm_are_larger(tiny_model: Path) -> None:
    sizes = [
        EngineArgs(str(tiny_model)).create_engine_config(context).scheduler_config
        for context in (UsageContext.LLM_CLASS, UsageContext.ENGINE_CONTEXT)
    ]
    assert [size.max_num_batched_tokens for size in sizes] == [4096, 2048]


@pytest.mark.parametrize(
    ("name", "value"),
    [("worker_cls", int), ("kv_transfer_config", {"kv_role": "kv_both"}), ("kv_transfer_config", 3),
     ("compilation_config", 3), ("compilation_config", {"no_such_key": 1})],
)  # fmt: skip
def test_conversions_of_later_features_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        EngineArgs("no-such-model", **{name: value}).check()


# Scores and the prefix cache (PP24, A14)


@pytest.mark.slow
def test_a14_scores_do_not_depend_on_cache_and_chunks(llm: LLM, cold: Started) -> None:
    def ask(engine: LLM, scored: bool) -> RequestOutput:
        params = GREEDY.clone()
        params.prompt_logprobs = 1 if scored else None
        return engine.generate([PROMPT], params, use_tqdm=False)[0]

    llm.reset_prefix_cache()
    outputs = [ask(llm, False), ask(llm, False), ask(llm, True), ask(cold.llm, True)]
    assert [output.num_cached_tokens for output in outputs] == [0, 48, 0, 0]
    assert all(o.outputs[0].token_ids == outputs[0].outputs[0].token_ids for o in outputs)
    warm, chunked = outputs[2].prompt_logprobs, outputs[3].prompt_logprobs
    assert warm is not None and chunked is not None
    assert len(warm) == len(PROMPT) and warm[0] is None is chunked[0]
    for token, one, other in zip(PROMPT[1:], warm[1:], chunked[1:], strict=True):
        assert one is not None and other is not None
        assert list(one) == list(other) and next(iter(one)) == token
        assert [item.rank for item in one.values()] == [item.rank for item in other.values()]
        for entry, twin in zip(one.values(), other.values(), strict=True):
            assert entry.logprob == pytest.approx(twin.logprob, abs=1e-4)


# generate


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:prompt_token_ids")
def test_which_error_wins(llm: LLM) -> None:
    """Legacy forms, guided options, number of parameters, the prompts themselves: in this order."""
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"prompt_token_ids": [[1], [2], [3]]}, ValueError, "2 prompts and 3"),
        ({"guided_options_request": {"guided_regex": "a", "guided_json": "b"}},
         UnsupportedFeatureError, "structured output"),
        ({"sampling_params": (GREEDY,)}, ValueError, "1 sampling parameters for 2"),
        ({"priority": [1]}, ValueError, "priority has 1 entries for 2"),
        ({"prompts": ["a", 3]}, TypeError, "int"),
    ]  # fmt: skip
    for i, (_, error, said) in enumerate(wrong):
        arguments: dict[str, Any] = {"prompts": ["a", "b"]}
        for more, _, _ in wrong[i:]:
            arguments |= more
        with pytest.raises(error, match=said):
            llm.generate(**arguments, use_tqdm=False)
    assert llm.llm_engine.get_num_unfinished_requests() == 0


@pytest.mark.slow
def test_any_sequence_is_a_list(llm: LLM) -> None:
    params = (GREEDY, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    outputs = llm.generate(("a", "b"), params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4, 2]
    assert llm.generate((), GREEDY, use_tqdm=False) == []


@pytest.mark.slow
def test_bars(llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """tqdm by default; with use_tqdm=False no bar is made at all."""
    llm.generate(["a", "b"], GREEDY)
    shown = capsys.readouterr().err
    assert "Adding requests: 100%" in shown and "Processed prompts: 100%" in shown
    assert re.search(r"2/2 .*est\. speed input: \d+\.\d\d toks/s, output: \d+\.\d\d toks/s", shown)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a bar was made")

    monkeypatch.setattr("tqdm.auto.tqdm", refuse)
    with pytest.raises(AssertionError, match="a bar was made"):
        llm.generate("a", GREEDY)
    assert len(llm.generate("a", GREEDY, use_tqdm=False)) == 1
    assert len(llm.chat([{"role": "user", "content": "a"}], GREEDY, use_tqdm=False)) == 1
    assert len(llm.beam_search(["a"], BeamSearchParams(2, 2))) == 1


@pytest.mark.slow
def test_outputs_are_validated_where_that_is_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLMEngine.enable_output_validation():
        assert len(llm.generate(["a"], GREEDY, use_tqdm=False)) == 1
        monkeypatch.setattr("headrace.frontend.llm.RequestOutput", int)
        with pytest.raises(TypeError, match="expected int, found RequestOutput"):
            llm.generate(["a"], GREEDY, use_tqdm=False)
    assert len(llm.generate(["a"], GREEDY, use_tqdm=False)) == 1


@pytest.mark.slow
def test_requests_arrive_now(llm: LLM) -> None:
    before = time.time()
    engine = llm.llm_engine
    engine.add_request("r", "a", GREEDY)
    assert engine.has_unfinished_requests()  # queued only; its outputs come from step()
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    metrics = outputs[-1].metrics
    assert metrics is not None and metrics.first_scheduled_time is not None
    assert metrics.finished_time is not None and metrics.first_token_time is not None
    times = [
        before, metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time,
        metrics.last_token_time, metrics.finished_time, time.time(),
    ]  # fmt: skip
    assert times == sorted(times)
    assert metrics.time_in_queue == pytest.approx(times[2] - times[1], abs=1e-6)


@pytest.mark.slow
def test_there_is_one_scheduler(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("r", "a", GREEDY)
    assert engine.has_unfinished_requests_for_virtual_engine(0)
    engine.stop_remote_worker_execution_loop()
    engine.abort_request("r")
    assert not engine.has_unfinished_requests_for_virtual_engine(0)
    with pytest.raises(ValueError, match="no scheduler 1"):
        engine.has_unfinished_requests_for_virtual_engine(1)


@pytest.mark.slow
def test_attributes_beside_the_configuration(llm: LLM) -> None:
    engine = llm.llm_engine
    assert engine.input_preprocessor is engine.renderer and engine.log_stats is True
    assert engine.use_cached_outputs is False
    for name, value in (("mm_registry", object()), ("use_cached_outputs", True)):
        with pytest.raises(UnsupportedFeatureError, match=name):
            LLMEngine(engine.config, **{name: value})  # type: ignore[arg-type]


# Beam search


@pytest.mark.slow
def test_steps_of_a_beam_search(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many scores as beams, of one token, at the temperature of the search."""
    seen: list[SamplingParams] = []
    run = llm._run

    def watch(prompts: Any, params: list[SamplingParams], *rest: Any) -> list[RequestOutput]:
        seen.extend(params)
        return run(prompts, params, *rest)

    monkeypatch.setattr(llm, "_run", watch)
    llm.beam_search(["a"], BeamSearchParams(3, 2, temperature=0.7))
    step = SamplingParams(logprobs=6, max_tokens=1, temperature=0.7)
    assert len(seen) == 1 + 3 and all(params == step for params in seen)


def test_equal_beams_keep_their_order() -> None:
    scores = {token: Logprob(-1.0) for token in (9, 3, 7, 5)}
    (found,) = beam_search(
        [[1]], BeamSearchParams(2, 2), score=lambda beams: [scores] * len(beams),
        eos_token_ids=frozenset(), max_prompt_tokens=9, steps=range(2),
    )  # fmt: skip
    assert [beam.tokens for beam in found.sequences] == [[1, 9, 9], [1, 9, 3]]


def test_fields_of_beams() -> None:
    fields = [field.name for field in dataclasses.fields(BeamSearchSequence)]
    assert fields == [
        "tokens", "logprobs", "lora_request", "cum_logprob", "text", "finish_reason",
        "stop_reason", "multi_modal_data", "mm_processor_kwargs",
    ]  # fmt: skip
    beam = BeamSearchSequence([1], [])
    assert (beam.cum_logprob, beam.finish_reason, beam.stop_reason) == (0.0, None, None)
    assert BeamSearchOutput([beam]).sequences == [beam]


@pytest.mark.slow
def test_prompts_of_a_beam_search_have_no_media(llm: LLM) -> None:
    params = BeamSearchParams(2, 2)
    with pytest.raises(UnsupportedFeatureError, match="text only"):
        llm.beam_search([{"prompt": "a", "multi_modal_data": {"image": 1}}], params)
    with pytest.raises(UnsupportedFeatureError, match="LoRA"):
        llm.beam_search(["a", "b"], params, lora_request=[object()] * 2)


# What belongs to machinery that this engine does not have: its scheduler is in another process

NOT_ATTRIBUTES = (
    "seq_counter", "model_executor", "scheduler", "scheduler_contexts",
    "cached_scheduler_outputs", "async_callbacks", "process_request_outputs_callback",
    "seq_id_to_seq_group", "tracer", "detokenizer", "generation_config_fields",
    "output_processor",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_ATTRIBUTES)
def test_inner_parts_are_not_offered(llm: LLM, name: str) -> None:
    with pytest.raises(AttributeError, match=name):
        getattr(llm.llm_engine, name)


@pytest.mark.parametrize(
    "name", ["engine_step", "run_engine_loop", "process_request_outputs", "_get_executor_cls",
             "use_process_request_outputs_callback"],
)  # fmt: skip
def test_inner_steps_of_the_loop_are_not_offered(name: str) -> None:
    """The step loop is in the engine core's process."""
    assert not hasattr(AsyncLLMEngine, name)
