"""`LLM` on a tiny model in a process of its own: argument rules, and what errors leave behind."""

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, RequestOutput, SamplingParams
from headrace.configs.errors import (
    ConfigurationError,
    InvalidRequestError,
    RequestFailedError,
    UnsupportedFeatureError,
)
from headrace.frontend.metrics_reader import Counter, Gauge, Histogram
from headrace.sampling_params import RequestOutputKind
from tests.e2e.tiny_model import BOS, ENGINE_ARGUMENTS, EOS, MAX_MODEL_LEN
from tests.kernels.native_ops import available_isas

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
Run = Callable[..., list[RequestOutput]]


@pytest.fixture
def generate(llm: LLM) -> Run:
    return lambda *args, **kwargs: llm.generate(*args, **{"use_tqdm": False, **kwargs})


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def assert_idle(llm: LLM) -> None:
    """Nothing runs, in the front end and in the engine core."""
    assert not llm.llm_engine.has_unfinished_requests()
    names = ["step", "running", "waiting", "free", "blocks", "requests"]
    values = dict(zip(names, llm.llm_engine._client.call("stats"), strict=False))
    assert values["requests"] == 0 and values["free"] == values["blocks"]


def test_forms_of_prompts(llm: LLM, generate: Run) -> None:
    ids = llm.get_tokenizer().encode("abc")
    assert ids[0] == BOS
    forms = ["abc", ids, tuple(ids), {"prompt": "abc"}, {"prompt_token_ids": ids}]
    outputs = generate(forms, GREEDY)
    assert ids_of(outputs) == ids_of(outputs)[:1] * 5
    assert [output.prompt_token_ids for output in outputs] == [ids] * 5
    assert [output.prompt for output in outputs] == ["abc", None, None, "abc", None]
    for one in ("abc", ids, {"prompt": "abc"}, ("abc",)):
        assert ids_of(generate(one, GREEDY)) == ids_of(outputs)[:1]
    assert generate([], GREEDY) == []
    assert all(isinstance(output, RequestOutput) and output.finished for output in outputs)


def test_order_and_ids(llm: LLM, generate: Run) -> None:
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (9, 1, 5)]
    first = generate(["a", "b", "c"], params)
    assert [len(ids) for ids in ids_of(first)] == [9, 1, 5]
    numbers = [int(output.request_id) for output in first]
    second = generate("d", GREEDY)
    assert [*numbers, int(second[0].request_id)] == list(range(numbers[0], numbers[0] + 4))


def test_legacy_form_for_ids(llm: LLM, generate: Run) -> None:
    ids = llm.get_tokenizer().encode("abc")
    expected = ids_of(generate("abc", GREEDY))
    for args in (
        {"prompt_token_ids": ids},
        {"prompt_token_ids": [ids]},
        {"prompts": "abc", "prompt_token_ids": [5]},  # the text wins
        {"prompts": ["abc"], "prompt_token_ids": [[5]]},
    ):
        with pytest.warns(DeprecationWarning, match="prompt_token_ids") as caught:
            assert ids_of(generate(sampling_params=GREEDY, **args)) == expected
        assert len(caught) == 1
    with pytest.warns(DeprecationWarning):
        assert ids_of(generate(None, GREEDY, [ids])) == expected
    with LLM.deprecate_legacy_api():
        assert LLM.DEPRECATE_LEGACY
    LLM.DEPRECATE_LEGACY = False
    try:
        assert ids_of(generate(prompt_token_ids=ids, sampling_params=GREEDY)) == expected
        with LLM.deprecate_legacy_api():
            assert LLM.DEPRECATE_LEGACY
        assert not LLM.DEPRECATE_LEGACY
    finally:
        LLM.DEPRECATE_LEGACY = True


@pytest.mark.filterwarnings("ignore:prompt_token_ids")
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, ValueError),
        ({"prompts": 5}, TypeError),
        ({"prompts": b"bytes"}, TypeError),
        ({"prompts": ["a", "b"], "sampling_params": [GREEDY]}, ValueError),
        ({"prompts": ["a"], "sampling_params": [GREEDY, GREEDY]}, ValueError),
        ({"prompts": ["a"], "sampling_params": {"n": 1}}, ValueError),
        ({"prompts": ["a", "b"], "priority": [0]}, ValueError),
        ({"prompts": ["a"], "priority": [0, 0]}, ValueError),
        ({"prompts": ["a", "b"], "priority": [0, 1]}, ValueError),  # the policy is fcfs
        ({"prompts": ["a", [272]]}, InvalidRequestError),
        ({"prompts": ["a", [-1]]}, InvalidRequestError),
        ({"prompts": ["a", {"prompt_token_ids": []}]}, InvalidRequestError),
        ({"prompts": ["a", [1] * MAX_MODEL_LEN]}, InvalidRequestError),
        ({"prompts": ["a", 3]}, TypeError),
        ({"prompts": ["a", {"prompt_embeds": 1}]}, UnsupportedFeatureError),
        ({"prompts": ["a", {"prompt": "b", "multi_modal_data": {"image": 1}}]}, ValueError),
        ({"prompts": "a", "lora_request": 1}, UnsupportedFeatureError),
        ({"prompts": "a", "prompt_adapter_request": 1}, UnsupportedFeatureError),
        ({"prompts": "a", "guided_options_request": {}}, UnsupportedFeatureError),
        ({"prompts": ["a", "b"], "prompt_token_ids": [[1]]}, ValueError),
        ({"prompt_token_ids": []}, ValueError),
        ({"prompt_token_ids": [[]]}, ValueError),
        ({"prompt_token_ids": [[1], 2]}, ValueError),
        ({"prompts": [], "prompt_token_ids": []}, ValueError),
    ],
)
def test_wrong_arguments_leave_nothing_behind(
    llm: LLM, generate: Run, arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        generate(**{"sampling_params": GREEDY, **arguments})
    assert_idle(llm)


def test_the_callers_parameters_stay_as_they_are(generate: Run) -> None:
    params = SamplingParams(
        n=2, seed=5, max_tokens=3, output_kind=RequestOutputKind.DELTA, stop=["x"]
    )
    before = params.clone()
    first, second = generate("a", params), generate(["a"], [params])
    assert params == before
    assert [c.token_ids for c in first[0].outputs] == [c.token_ids for c in second[0].outputs]
    assert len(first[0].outputs) == 2 and len(first[0].outputs[0].token_ids) == 3


def test_default_parameters(llm: LLM, generate: Run) -> None:
    assert llm.get_default_sampling_params() == SamplingParams()
    assert llm.get_default_sampling_params() is not llm.get_default_sampling_params()
    assert llm.default_sampling_params == {}
    assert len(generate("a")[0].outputs[0].token_ids) <= 16
    llm.default_sampling_params = {"temperature": 0.0, "max_tokens": 2}
    try:
        assert llm.get_default_sampling_params().max_tokens == 2
        assert len(generate("a")[0].outputs[0].token_ids) <= 2
    finally:
        llm.default_sampling_params = None


def test_truncation_for_all_and_for_each(generate: Run) -> None:
    text = "x" * 20

    def cut(size: int | None) -> SamplingParams:
        return SamplingParams(
            temperature=0.0, max_tokens=1, ignore_eos=True, truncate_prompt_tokens=size
        )

    def lengths(*args: Any) -> list[int]:
        return [len(output.prompt_token_ids or []) for output in generate(*args)]

    assert lengths([text, "y"], cut(5)) == [5, 2]
    assert lengths([text] * 3, [cut(None), cut(7), cut(MAX_MODEL_LEN)]) == [21, 7, 21]
    assert lengths([[3] * 300], cut(9)) == [9]
    with pytest.raises(ValueError, match=r"129.*128"):
        generate(text, cut(129))


def test_a_failure_while_queueing_aborts_the_call(
    llm: LLM, generate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = llm.llm_engine.add_rendered
    num_added = 0

    def fail_at_the_third(*args: Any) -> None:
        nonlocal num_added
        num_added += 1
        if num_added == 3:
            raise RuntimeError("no more")
        add(*args)

    with monkeypatch.context() as patch:
        patch.setattr(llm.llm_engine, "add_rendered", fail_at_the_third)
        with pytest.raises(RuntimeError, match="no more"):
            generate(["a", "b", "c"], GREEDY)
    assert_idle(llm)
    assert len(generate(["a"], GREEDY)) == 1


def test_a_failed_request_ends_the_call_and_nothing_else(llm: LLM, generate: Run) -> None:
    def poison(model: Any) -> None:
        model.embedding.weight_before = model.embedding.weight.clone()
        model.embedding.weight[7] = float("nan")

    def heal(model: Any) -> None:
        model.embedding.weight.copy_(model.embedding.weight_before)

    if not llm.apply_model(lambda model: hasattr(getattr(model, "embedding", None), "weight"))[0]:
        pytest.fail("the model keeps its embedding elsewhere")
    llm.apply_model(poison)
    try:
        with pytest.raises(RequestFailedError):
            generate([[3, 4], [7, 7], [5, 6]], GREEDY)
    finally:
        llm.apply_model(heal)
    assert_idle(llm)
    assert len(generate([[3, 4]], GREEDY)) == 1


def test_progress_bars(llm: LLM) -> None:
    made: list[Any] = []

    class Bar:
        def __init__(self, iterable: Any = None, **options: Any) -> None:
            made.append(self)
            self.iterable, self.options = iterable, options
            self.format_dict = {"elapsed": 2.0}
            self.postfix = options.get("postfix")
            self.n = self.num_refreshed = self.num_closed = 0

        def __iter__(self) -> Any:
            return iter(self.iterable)

        def update(self, count: int) -> None:
            self.n += count

        def refresh(self) -> None:
            self.num_refreshed += 1

        def close(self) -> None:
            self.num_closed += 1

    params = SamplingParams(n=2, max_tokens=4, ignore_eos=True)
    llm.generate([[1, 2, 3], [4, 5]], params, use_tqdm=Bar)
    adding, processed = made
    assert adding.options == {"desc": "Adding requests"}
    start = "est. speed input: 0.00 toks/s, output: 0.00 toks/s"
    assert processed.options == {
        "total": 4, "desc": "Processed prompts", "dynamic_ncols": True, "postfix": start,
    }  # fmt: skip
    assert (processed.n, processed.num_refreshed, processed.num_closed) == (4, 1, 1)
    assert processed.postfix == "est. speed input: 5.00 toks/s, output: 8.00 toks/s"
    made.clear()
    llm.generate("a", GREEDY, use_tqdm=False)
    assert made == []


def test_chat(llm: LLM) -> None:
    one = [{"role": "user", "content": "hi"}]
    single = llm.chat(one, GREEDY, use_tqdm=False)
    assert single[0].prompt == "<|user|>hi<eos><|assistant|>"
    assert single[0].prompt_token_ids[0] != BOS  # a template writes its own special tokens
    assert EOS in single[0].prompt_token_ids
    many = llm.chat([one, one], [GREEDY, GREEDY], use_tqdm=False)
    assert ids_of(many) == ids_of(single) * 2
    assert llm.chat([], GREEDY, use_tqdm=False) == []


def test_chat_templates(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]

    def prompt(**options: Any) -> str | None:
        params = SamplingParams(max_tokens=1)
        return llm.chat(messages, params, use_tqdm=False, **options)[0].prompt

    assert prompt(add_generation_prompt=False) == "<|user|>hi<eos><|assistant|>so<eos>"
    going_on = {"add_generation_prompt": False, "continue_final_message": True}
    assert prompt(**going_on) == "<|user|>hi<eos><|assistant|>so"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert "<tools 1>" in (prompt(tools=tools) or "")
    assert "<style old>" in (prompt(chat_template_kwargs={"style": "old"}) or "")
    own = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    assert prompt(chat_template=own) == "[hi][so]"
    assert prompt(chat_template_kwargs={"chat_template": own}) == "[hi][so]"
    overridden = prompt(chat_template_kwargs={"add_generation_prompt": False})
    assert overridden == "<|user|>hi<eos><|assistant|>so<eos>"
    parts = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    for content_format in ("auto", "string", "openai"):
        output = llm.chat(
            parts, SamplingParams(max_tokens=1), False, chat_template_content_format=content_format
        )
        assert "x" in (output[0].prompt or "")


@pytest.mark.parametrize(
    ("messages", "options", "error"),
    [
        ("hi", {}, TypeError),
        ([{"content": "no role"}], {}, ValueError),
        ([{"role": "user", "content": "a"}], {"continue_final_message": True}, ValueError),
        (
            [{"role": "user", "content": "a"}],
            {"chat_template_kwargs": {"continue_final_message": True}},
            ValueError,
        ),
        ([{"role": "user", "content": "a"}], {"mm_processor_kwargs": {}}, UnsupportedFeatureError),
        ([{"role": "user", "content": "a"}], {"lora_request": 1}, UnsupportedFeatureError),
        (
            [{"role": "user", "content": "a"}],
            {"chat_template_content_format": "other"},
            ValueError,
        ),
        ([{"role": "user", "content": "a"}], {"sampling_params": [GREEDY] * 2}, ValueError),
        ([{"role": "user", "content": "a" * 500}], {}, InvalidRequestError),
    ],
)
def test_wrong_chats(llm: LLM, messages: Any, options: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        llm.chat(messages, use_tqdm=False, **options)
    assert_idle(llm)


def test_prefix_cache_reset_and_salt(llm: LLM, generate: Run) -> None:
    prompt = [(7 * i) % 256 for i in range(48)]
    generate([prompt], GREEDY)
    assert generate([prompt], GREEDY)[0].num_cached_tokens == 32
    assert llm.reset_prefix_cache() is True
    assert generate([prompt], GREEDY)[0].num_cached_tokens == 0
    salted = {"prompt_token_ids": prompt, "cache_salt": "s"}
    assert generate([salted], GREEDY)[0].num_cached_tokens == 0
    assert generate([salted], GREEDY)[0].num_cached_tokens == 32


def test_metrics(llm: LLM, generate: Run) -> None:
    def read() -> dict[tuple[str, str], Any]:
        return {(m.name, m.labels.get("finished_reason", "")): m for m in llm.get_metrics()}

    before = read()
    generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=4, ignore_eos=True))
    after = read()

    def grown(name: str, reason: str = "") -> float:
        new, old = after["headrace:" + name, reason], before["headrace:" + name, reason]
        assert isinstance(new, Counter) and new.labels["engine"] == "0"
        return new.value - old.value

    assert grown("prompt_tokens") == 5 and grown("generation_tokens") == 8
    assert grown("request_success", "length") == 2 and grown("request_success", "abort") == 0
    running = after["headrace:num_requests_running", ""]
    assert isinstance(running, Gauge) and running.value == 0
    lengths = after["headrace:request_prompt_tokens", ""]
    assert isinstance(lengths, Histogram)
    assert lengths.count - before["headrace:request_prompt_tokens", ""].count == 2
    assert lengths.buckets["+Inf"] == lengths.count and lengths.sum >= 5


def test_collective_rpc_and_apply_model(llm: LLM) -> None:
    def parameters(worker: Any, name: str, factor: int = 1) -> tuple[str, int]:
        return name, factor * worker.config.model_config.vocab_size

    assert llm.collective_rpc(parameters, args=("v",), kwargs={"factor": 2}) == [("v", 2 * 272)]
    (name,) = llm.apply_model(lambda model: type(model).__name__)
    assert name == ("NativeDecoder" if available_isas() else "Decoder")
    (tensor,) = llm.apply_model(lambda model: next(iter(model.parameters())).detach()[:1].clone())
    assert type(tensor).__name__ in ("Tensor", "Parameter") and tensor.shape[0] == 1
    with pytest.raises(InvalidRequestError, match="no method 'nothing'"):
        llm.collective_rpc("nothing")

    def fails(worker: Any) -> None:
        raise ZeroDivisionError("in the worker")

    with pytest.raises(ZeroDivisionError, match="in the worker") as raised:
        llm.collective_rpc(fails)
    assert "worker 0" in raised.value.__notes__[0]


def test_a_call_that_takes_too_long(llm: LLM, generate: Run) -> None:
    def slow(worker: Any) -> str:
        import time

        time.sleep(0.5)
        return "late"

    with pytest.raises(TimeoutError, match="slow"):
        llm.collective_rpc(slow, timeout=0.05)
    assert len(generate("a", GREEDY)) == 1
    assert llm.collective_rpc(lambda worker: "next", timeout=10) == ["next"]


def test_features_of_later_versions(llm: LLM) -> None:
    for method in (llm.encode, llm.embed, llm.classify):
        with pytest.raises(UnsupportedFeatureError, match="pooling"):
            method("a")
    with pytest.raises(UnsupportedFeatureError, match="score"):
        llm.score("a", "b")
    for use in (llm.sleep, llm.wake_up):
        with pytest.raises(AssertionError, match="enable_sleep_mode"):
            use()
    with pytest.raises(ConfigurationError, match="profiler-config"):
        llm.start_profile()


def test_another_tokenizer(llm: LLM, generate: Run, tiny_model: Path) -> None:
    import transformers

    before = llm.get_tokenizer()
    other = transformers.AutoTokenizer.from_pretrained(tiny_model)
    other.backend_tokenizer.post_processor = None
    try:
        llm.set_tokenizer(other)
        assert llm.get_tokenizer() is not before
        assert generate("ab", GREEDY)[0].prompt_token_ids == before.encode("ab")[1:]
    finally:
        llm.set_tokenizer(before)
    assert llm.get_tokenizer() is before
    with pytest.raises(TypeError, match="int"):
        llm.set_tokenizer(3)
    llm.llm_engine.add_request("x", "a", GREEDY)
    with pytest.raises(RuntimeError, match="1 requests in flight"):
        llm.set_tokenizer(before)
    llm.llm_engine.abort_request("x")


def test_arguments_of_the_constructor(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="no_such_argument"):
        LLM(str(tiny_model), no_such_argument=1)
    with pytest.raises(UnsupportedFeatureError, match="enable_lora"):
        LLM(str(tiny_model), enable_lora=True)
    with pytest.raises(ConfigurationError, match="tensor_parallel_size 3 does not divide"):
        LLM(str(tiny_model), tensor_parallel_size=3)
    monkeypatch.setenv("HEADRACE_MULTIPROCESING", "0")
    with pytest.raises(ConfigurationError, match="HEADRACE_MULTIPROCESSING"):
        LLM(str(tiny_model))


EXTENSION = """
class Extension:
    def vocabulary_plus(self, number):
        return self.config.model_config.vocab_size + number
"""


def assert_needs_ids(llm: LLM) -> None:
    for use in (llm.get_tokenizer, lambda: llm.set_tokenizer(3), lambda: llm.generate("text")):
        with pytest.raises(ValueError, match="tokenizer"):
            use()


def test_special_starts(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine for what is rare: no tokenizer, no statistics, profiler, extension, its end."""
    (tmp_path / "my_extension.py").write_text(EXTENSION)
    monkeypatch.syspath_prepend(str(tmp_path))
    llm = LLM(
        str(tiny_model),
        skip_tokenizer_init=True,
        disable_log_stats=True,
        hf_overrides=None,
        worker_extension_cls="my_extension.Extension",
        profiler_config={"profiler": "torch", "torch_profiler_dir": str(tmp_path / "traces")},
        scheduling_policy="priority",
        **ENGINE_ARGUMENTS,
    )
    output = llm.generate([[1, 2]], GREEDY, use_tqdm=False, priority=[3])[0]
    assert len(output.outputs[0].token_ids) == 6 and output.outputs[0].text == ""
    assert_needs_ids(llm)
    with pytest.raises(RuntimeError, match="disable_log_stats"):
        llm.get_metrics()
    assert llm.collective_rpc("vocabulary_plus", args=(1,)) == [273]
    llm.start_profile()
    llm.generate([[1, 2]], GREEDY, use_tqdm=False)
    llm.stop_profile()
    (trace,) = (tmp_path / "traces").iterdir()
    assert "traceEvents" in trace.read_text()
    with pytest.raises(InvalidRequestError, match="start_profile first"):
        llm.stop_profile()
    pid = llm.collective_rpc(lambda worker: __import__("os").getpid())[0]
    del llm
    gc.collect()
    assert not os.path.exists(f"/proc/{pid}")  # the engine core went with the object
