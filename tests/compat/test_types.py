"""Enums, fields and objects of the public Python API that no other test looks at whole."""

import dataclasses
import inspect
import time
from typing import Any

import pytest

import headrace
from headrace import CompletionOutput, RequestOutput, SamplingParams
from headrace.configs.engine_args import EngineArgs
from headrace.configs.errors import InvalidRequestError, UnsupportedFeatureError
from headrace.outputs import Logprob, RequestMetrics
from headrace.sampling_params import (
    BeamSearchParams,
    GuidedDecodingParams,
    RequestOutputKind,
    SamplingType,
)
from tests.frontend.test_admission import Words, admit
from tests.frontend.test_outputs import completion, request_output

REQUIRED = object()


def defaults_of(kind: Any) -> list[tuple[str, Any]]:
    """Parameters of a constructor in order, with their defaults; keyword-only ones have a `*`."""
    found = []
    for name, parameter in inspect.signature(kind).parameters.items():
        star = "*" if parameter.kind is parameter.KEYWORD_ONLY else ""
        kwargs = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        has_none = parameter.default is parameter.empty
        found.append((kwargs + star + name, REQUIRED if has_none else parameter.default))
    return found


# Sampling parameters


def test_values_of_enums() -> None:
    kinds = {kind.name: kind.value for kind in RequestOutputKind}
    assert kinds == {"CUMULATIVE": 0, "DELTA": 1, "FINAL_ONLY": 2}
    types = {kind.name: kind.value for kind in SamplingType}
    assert types == {"GREEDY": 0, "RANDOM": 1, "RANDOM_SEED": 2}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 9e-6}, SamplingType.GREEDY),
        ({"temperature": 0.0, "seed": 3}, SamplingType.GREEDY),
        ({"temperature": 1e-5}, SamplingType.RANDOM),
        ({"temperature": 0.5, "seed": 0}, SamplingType.RANDOM_SEED),
    ],
)
def test_sampling_type(fields: dict[str, Any], expected: SamplingType) -> None:
    assert SamplingParams(**fields).sampling_type is expected


def test_construction_by_keyword_and_by_place() -> None:
    """The parameters of `SamplingParams`, by place, are the fields in their order."""
    by_place = SamplingParams(2, 3, None, 0.1, 0.2, 1.3, 0.4, 0.5, 6, 0.7, 8, ["s"], [9], True, 10)
    by_name = SamplingParams(
        n=2, best_of=3, presence_penalty=0.1, frequency_penalty=0.2, repetition_penalty=1.3,
        temperature=0.4, top_p=0.5, top_k=6, min_p=0.7, seed=8, stop=["s"], stop_token_ids=[9],
        ignore_eos=True, max_tokens=10,
    )  # fmt: skip
    assert by_place == by_name
    by_place.note = "a struct with a dict"  # type: ignore[attr-defined]
    assert by_place.note == "a struct with a dict"  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_fields_of_guided_decoding() -> None:
    names = ("json", "regex", "choice", "grammar", "json_object", "backend")
    flags = (
        "backend_was_auto", "disable_fallback", "disable_any_whitespace",
        "disable_additional_properties",
    )  # fmt: skip
    assert defaults_of(GuidedDecodingParams) == [
        *((name, None) for name in names),
        *((name, False) for name in flags),
        ("whitespace_pattern", None),
        ("structural_tag", None),
    ]


def test_guided_decoding_is_refused_and_stays_as_it_was() -> None:
    guided = GuidedDecodingParams(choice=["yes", "no"])
    params = SamplingParams(guided_decoding=guided)
    with pytest.raises(UnsupportedFeatureError, match="guided_decoding"):
        admit([1], params)
    assert params.guided_decoding is guided and guided.backend is None


def test_logits_processors_are_refused_by_name() -> None:
    processors = [lambda token_ids, logits: logits]
    params = SamplingParams(logits_processors=processors, bad_words=["word"])
    with pytest.raises(UnsupportedFeatureError, match="logits_processors"):
        admit([1], params, tokenizer=Words())
    assert params.logits_processors is processors and params.bad_words == ["word"]


def test_fields_of_beam_search() -> None:
    assert defaults_of(BeamSearchParams) == [
        ("beam_width", REQUIRED), ("max_tokens", REQUIRED), ("ignore_eos", False),
        ("temperature", 0.0), ("length_penalty", 1.0),
    ]  # fmt: skip


# Features of later versions


@pytest.mark.parametrize(
    "name",
    [
        "ModelRegistry", "PoolingParams", "PoolingOutput", "PoolingRequestOutput",
        "EmbeddingOutput", "EmbeddingRequestOutput", "ClassificationOutput",
        "ClassificationRequestOutput", "ScoringOutput", "ScoringRequestOutput",
    ],
)  # fmt: skip
def test_names_of_later_versions(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"'headrace'.*'{name}'.*not in this version yet"):
        getattr(headrace, name)
    assert name not in headrace.__all__


@pytest.mark.parametrize("mode", ["slow", "mistral", "custom"])
def test_other_tokenizers_are_refused(mode: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match="tokenizer_mode"):
        EngineArgs(model="no-such-model", tokenizer_mode=mode).check()


# Outputs


def test_fields_of_outputs() -> None:
    assert defaults_of(CompletionOutput) == [
        *((name, REQUIRED) for name in ("index", "text", "token_ids")),
        *((name, REQUIRED) for name in ("cumulative_logprob", "logprobs")),
        *((name, None) for name in ("finish_reason", "stop_reason", "lora_request")),
    ]
    assert defaults_of(RequestOutput) == [
        *((name, REQUIRED) for name in ("request_id", "prompt", "prompt_token_ids")),
        *((name, REQUIRED) for name in ("prompt_logprobs", "outputs", "finished")),
        *((name, None) for name in ("metrics", "lora_request", "encoder_prompt")),
        *((name, None) for name in ("encoder_prompt_token_ids", "num_cached_tokens")),
        ("*multi_modal_placeholders", None), ("*kv_transfer_params", None),
        ("*weight_version", None), ("**kwargs", REQUIRED),
    ]  # fmt: skip
    assert defaults_of(Logprob) == [("logprob", REQUIRED), ("rank", None), ("decoded_token", None)]
    assert defaults_of(RequestMetrics) == [
        ("arrival_time", REQUIRED), ("last_token_time", REQUIRED), ("first_scheduled_time", None),
        ("first_token_time", None), ("time_in_queue", None), ("finished_time", None),
        ("scheduler_time", None), ("model_forward_time", None), ("model_execute_time", None),
    ]  # fmt: skip


def test_every_parameter_is_an_attribute_and_shown() -> None:
    """All but the parameters of KV transfer, which may be large, are in the text of an output."""
    values: dict[str, Any] = {
        name: f"<{name}>" for name, _ in defaults_of(RequestOutput) if "*" not in name
    }
    output = RequestOutput(
        **values, multi_modal_placeholders={"image": []}, kv_transfer_params={"kv": 1}
    )
    for name, value in values.items():
        assert getattr(output, name) == value and f"{name}={value!r}" in repr(output)
    assert "multi_modal_placeholders={'image': []}" in repr(output)
    assert output.kv_transfer_params == {"kv": 1} and "kv" not in repr(output)
    shown = repr(CompletionOutput(1, "t", [5], -1.0, None, "stop", 7, "an adapter"))
    hidden = {"lora_request"}
    for field in dataclasses.fields(CompletionOutput):
        assert (f"{field.name}=" in shown) == (field.name not in hidden)


def test_adding_changes_nothing_else() -> None:
    metrics = RequestMetrics(1.0, 2.0)
    first = RequestOutput(
        "r", "prompt", [1], [None], [completion("a", [1])], False, metrics, "adapter", "e", [2], 3
    )
    later = RequestOutput(
        "other", None, None, None, [completion("b", [2])], False, RequestMetrics(9.0, 9.0), None,
        None, None, 8,
    )  # fmt: skip
    for aggregate in (True, False):
        first.add(later, aggregate=aggregate)
        assert (first.request_id, first.prompt, first.prompt_token_ids) == ("r", "prompt", [1])
        assert (first.prompt_logprobs, first.metrics, first.lora_request) == (
            [None], metrics, "adapter",
        )  # fmt: skip
        assert (first.encoder_prompt, first.encoder_prompt_token_ids) == ("e", [2])
        assert first.num_cached_tokens == 3 and not first.finished


@pytest.mark.parametrize("aggregate", [True, False])
def test_adding_a_choice_that_is_not_there(aggregate: bool) -> None:
    first = request_output(completion("a", [1]), finished=True)
    second = completion("z", [9], index=1)
    first.add(request_output(second), aggregate)
    assert [c.index for c in first.outputs] == [0, 1] and first.outputs[1] is second
    assert first.finished  # one of the two was


@pytest.mark.parametrize("newer", [None, []])
def test_adding_no_scores_to_no_scores(newer: Any) -> None:
    first = request_output(completion("a", [1]))
    first.add(request_output(completion("b", [2], logprobs=newer)), aggregate=True)
    assert (first.outputs[0].text, first.outputs[0].logprobs) == ("ab", None)


# Admission of what comes from the Python API


def test_params_of_another_type_are_refused() -> None:
    from tests.frontend.test_front_end import PROMPT, make_front_end

    front_end = make_front_end()
    for params in (None, {}, BeamSearchParams(2, 2)):
        with pytest.raises(InvalidRequestError, match="must be SamplingParams"):
            front_end.admit(PROMPT, params, "r")  # type: ignore[arg-type]
    request = front_end.admit(PROMPT, SamplingParams(), "r")
    assert abs(request.arrival_time - time.time()) < 60  # wall clock
