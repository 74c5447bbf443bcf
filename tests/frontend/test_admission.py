"""Admission: what can never work is refused with numbers; the rest is resolved."""

from typing import Any

import msgspec
import pytest

from headrace.configs.config import ModelConfig, SchedulingPolicy
from headrace.configs.errors import InvalidRequestError, UnsupportedFeatureError
from headrace.configs.sampling_params import GuidedDecodingParams, SamplingParams
from headrace.engine_core.messages import EngineCoreRequest, Ready
from headrace.frontend.admission import Admission
from headrace.frontend.sampling_defaults import applied_defaults, sampling_facts

VOCAB = 100


class Words:
    """A tokenizer that knows one word."""

    max_token_id = VOCAB - 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [7, 8] if text == "word" else [9, 8]


def make_admission(
    *,
    window: int = 32,
    pool: int = 1000,
    seed: int | None = None,
    max_logprobs: int = 20,
    max_output_tokens: int | None = None,
    tokenizer: Words | None = None,
    policy: SchedulingPolicy = "fcfs",
) -> Admission:
    model = ModelConfig(
        "m", "m", "m", ("m",), "LlamaForCausalLM", {}, "float32", window, VOCAB, 2, (5, 6),
        seed=seed, max_logprobs=max_logprobs, max_output_tokens=max_output_tokens,
    )  # fmt: skip
    return Admission(model, Ready(10, 16, pool, "id", {}, {}, 1, 1), tokenizer, policy)


def admit(
    prompt: list[int], params: SamplingParams | None = None, **limits: Any
) -> EngineCoreRequest:
    return make_admission(**limits).admit(prompt, params or SamplingParams(), arrival_time=0.0)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [([], "empty"), ([-1], "-1"), ([0, VOCAB], "100"), ([True], "True"), ([1.5], "1.5"),
     ([2**63], str(2**63))],
)  # fmt: skip
def test_bad_prompt_ids(prompt: list[int], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        admit(prompt)


def test_last_id_is_fine() -> None:
    assert admit([VOCAB - 1]).prompt_token_ids == [VOCAB - 1]


@pytest.mark.parametrize("max_tokens", [None, 1, 2])
def test_window(max_tokens: int | None) -> None:
    params = SamplingParams(max_tokens=max_tokens)
    for length in (32, 33):
        with pytest.raises(InvalidRequestError, match=f"{length} tokens.*32"):
            admit([1] * length, params)
    assert admit([1] * 31, params).sampling_params.max_tokens == 1


def test_pool() -> None:
    with pytest.raises(InvalidRequestError, match=r"31 with one.*30.*32"):
        admit([1] * 30, pool=30)
    assert (
        admit([1] * 20, SamplingParams(max_tokens=None), pool=30).sampling_params.max_tokens == 10
    )


def test_max_tokens_is_clamped_and_min_tokens_with_it() -> None:
    params = SamplingParams(max_tokens=10**12, min_tokens=10**12)
    resolved = admit([1] * 10, params).sampling_params
    assert (resolved.max_tokens, resolved.min_tokens) == (22, 22)
    assert params.max_tokens == 10**12


def test_eos_set_is_a_union() -> None:
    params = SamplingParams(stop_token_ids=[9])
    resolved = admit([1], params).sampling_params
    assert resolved.all_stop_token_ids == {2, 5, 6, 9}
    assert resolved.stop_token_ids == [9, 5, 6]
    ignoring = admit([1], SamplingParams(stop_token_ids=[9], ignore_eos=True)).sampling_params
    assert ignoring.stop_token_ids == [9]


def test_seeds() -> None:
    assert admit([1], SamplingParams(seed=-2)).sampling_params.seed == 2**64 - 2
    fresh = {admit([1]).sampling_params.seed for _ in range(8)}
    assert len(fresh) == 8
    first, second = make_admission(seed=1), make_admission(seed=1)
    derived = [
        [a.admit([1], SamplingParams(), arrival_time=0).sampling_params.seed for _ in range(3)]
        for a in (first, second)
    ]
    assert derived[0] == derived[1]
    assert len(set(derived[0])) == 3


def test_max_output_tokens_caps_every_request() -> None:
    for max_tokens in (None, 10):
        params = SamplingParams(max_tokens=max_tokens, min_tokens=5)
        resolved = admit([1] * 4, params, max_output_tokens=3).sampling_params
        assert (resolved.max_tokens, resolved.min_tokens) == (3, 3)
    assert (
        admit([1], SamplingParams(max_tokens=2), max_output_tokens=3).sampling_params.max_tokens
        == 2
    )


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (SamplingParams(logits_processors=[]), "logits_processors"),
        (SamplingParams(guided_decoding=GuidedDecodingParams(regex="a")), "guided_decoding"),
    ],
)
def test_unsupported_parameters_are_refused_by_name(params: SamplingParams, name: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=name) as refused:
        admit([1], params)
    assert refused.value.parameter == name


def test_everything_that_is_implemented_passes() -> None:
    params = SamplingParams(
        n=2, best_of=3, presence_penalty=1.0, frequency_penalty=1.0, repetition_penalty=1.1,
        logit_bias={VOCAB - 1: 3.0}, allowed_token_ids=[1, VOCAB - 1], bad_words=["word"],
        prompt_logprobs=20, logprobs=20, spaces_between_special_tokens=False, stop=["x"],
        extra_args={"a": object()}, truncate_prompt_tokens=2, stop_token_ids=[VOCAB - 1],
    )  # fmt: skip
    request = admit([1, 2, 3], params, tokenizer=Words())
    resolved = request.sampling_params
    assert request.prompt_token_ids == [2, 3] and len(request.choices) == 3
    assert resolved.bad_words_token_ids == [[7, 8], [9, 8]] and resolved.extra_args is None
    assert params.bad_words_token_ids is None and params.extra_args is not None
    assert params.stop_token_ids == [VOCAB - 1] and params.seed is None
    msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineCoreRequest)


def test_best_of_is_ranked_by_logprobs_that_nobody_asked_for() -> None:
    resolved = admit([1], SamplingParams(best_of=2)).sampling_params
    assert resolved.logprobs == 0 and not resolved.returns_logprobs
    resolved = admit([1], SamplingParams(best_of=2, logprobs=0)).sampling_params
    assert resolved.logprobs == 0 and resolved.returns_logprobs
    for params in (SamplingParams(n=2, best_of=2), SamplingParams(n=2)):
        assert admit([1], params).sampling_params.logprobs is None


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_number_of_logprobs(name: str) -> None:
    for number in (-1, 21):
        with pytest.raises(
            InvalidRequestError, match=rf"{name}.*\[0, 20\].*got {number}"
        ) as refused:
            admit([1], SamplingParams(**{name: number}))
        assert refused.value.parameter == name
    assert getattr(admit([1], SamplingParams(**{name: 20})).sampling_params, name) == 20
    for number in (-1, VOCAB, 10**9):
        params = admit([1], SamplingParams(**{name: number}), max_logprobs=-1).sampling_params
        assert getattr(params, name) == VOCAB


def test_priority_needs_its_policy() -> None:
    with pytest.raises(ValueError, match=r"priority 3.*'fcfs'"):
        make_admission().admit([1], SamplingParams(), arrival_time=0, priority=3)
    request = make_admission().admit(
        [1], SamplingParams(), arrival_time=0, priority=3, ignores_unused_priority=True
    )
    assert request.priority == 0
    by_priority = make_admission(policy="priority")
    assert by_priority.admit([1], SamplingParams(), arrival_time=0, priority=-3).priority == -3


def test_without_a_tokenizer_text_is_refused() -> None:
    for params, name in (
        (SamplingParams(stop="x"), "stop"),
        (SamplingParams(bad_words=["x"]), "bad_words"),
    ):
        with pytest.raises(InvalidRequestError, match="skip_tokenizer_init") as refused:
            admit([1], params)
        assert refused.value.parameter == name


def test_blank_bad_words() -> None:
    with pytest.raises(InvalidRequestError, match="blank") as refused:
        admit([1], SamplingParams(bad_words=[" "]), tokenizer=Words())
    assert refused.value.parameter == "bad_words"


def test_an_empty_salt_is_none() -> None:
    for salt, expected in (("", None), ("a", "a"), (None, None)):
        request = make_admission().admit([1], SamplingParams(), arrival_time=0, cache_salt=salt)
        assert request.cache_salt == expected


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (SamplingParams(stop_token_ids=[VOCAB]), r"stop_token_ids.*100.*\[0, 100\)"),
        (SamplingParams(logit_bias={-1: 1.0}), "logit_bias.*-1"),
        (
            SamplingParams(logit_bias={"3": 1.0}),
            "logit_bias must hold ints, got '3'",
        ),  # type: ignore[dict-item]
        (SamplingParams(allowed_token_ids=[1, VOCAB]), r"allowed_token_ids.*100.*\[0, 100\)"),
        (
            SamplingParams(allowed_token_ids=[True]),
            "allowed_token_ids must hold ints, got True",
        ),
        (SamplingParams(allowed_token_ids=[]), r"allowed_token_ids is empty.*\[0, 100\)"),
    ],
)
def test_ranges(params: SamplingParams, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        admit([1], params)


def test_facts_for_the_log() -> None:
    """PP28, PP30."""
    model = ModelConfig(
        "m", "m", "m", ("m",), "LlamaForCausalLM", {}, "float32", 32, VOCAB, 2, (5,),
        default_sampling_params={"temperature": 0.6, "top_k": 40, "max_tokens": 9, "top_p": None},
        sampling_param_sources={"temperature": "--override-generation-config", "top_k": "GGUF"},
        max_output_tokens=100,
    )  # fmt: skip
    lines = sampling_facts(model, Names())
    assert lines == [
        "end-of-text tokens: 2 '<2>', 5 '<5>'",
        "sampling defaults: temperature=0.6 (--override-generation-config), top_k=40 (GGUF), "
        "max_tokens=9 (model files), everything else built-in",
        "at most 100 output tokens for every request",
    ]
    assert sampling_facts(model, None)[0] == "end-of-text tokens: 2, 5"
    plain = ModelConfig("m", "m", "m", ("m",), "LlamaForCausalLM", {}, "float32", 32, VOCAB, 2)
    assert sampling_facts(plain, None)[1] == "sampling defaults: all built-in"
    assert applied_defaults(model.default_sampling_params) == {"temperature": 0.6, "top_k": 40}
    assert applied_defaults({"repetition_penalty": 1.2}) == {"repetition_penalty": 1.2}


class Names:
    def id_to_token(self, token_id: int) -> str | None:
        return f"<{token_id}>"


def test_ids_are_unique() -> None:
    admission = make_admission()
    ids = {admission.admit([1], SamplingParams(), arrival_time=0).request_id for _ in range(50)}
    assert len(ids) == 50
