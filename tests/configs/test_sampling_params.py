"""`SamplingParams`, row by row of the public contract."""

import inspect
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.configs.sampling_params import (
    BeamSearchParams,
    GuidedDecodingParams,
    RequestOutputKind,
    SamplingParams,
    SamplingType,
)

FIELDS = [  # (name, default), in positional order
    ("n", 1), ("best_of", None), ("_real_n", None), ("presence_penalty", 0.0),
    ("frequency_penalty", 0.0), ("repetition_penalty", 1.0), ("temperature", 1.0), ("top_p", 1.0),
    ("top_k", 0), ("min_p", 0.0), ("seed", None), ("stop", []), ("stop_token_ids", []),
    ("ignore_eos", False), ("max_tokens", 16), ("min_tokens", 0), ("logprobs", None),
    ("prompt_logprobs", None), ("detokenize", True), ("skip_special_tokens", True),
    ("spaces_between_special_tokens", True), ("logits_processors", None),
    ("include_stop_str_in_output", False), ("truncate_prompt_tokens", None),
    ("output_kind", RequestOutputKind.CUMULATIVE), ("output_text_buffer_length", 0),
    ("_all_stop_token_ids", set()), ("guided_decoding", None), ("logit_bias", None),
    ("allowed_token_ids", None), ("extra_args", None), ("bad_words", []),
    ("_bad_words_token_ids", None),
]  # fmt: skip
NAN, INF = math.nan, math.inf


def test_fields_and_defaults() -> None:
    params = SamplingParams()
    names = SamplingParams.__struct_fields__[: len(FIELDS)]
    assert names == tuple(name for name, _ in FIELDS)
    for name, default in FIELDS:
        assert getattr(params, name) == default, name
    assert SamplingParams()._all_stop_token_ids is not params._all_stop_token_ids


def test_omitted_defaults_are_not_serialised() -> None:
    assert set(msgspec.to_builtins(SamplingParams(top_k=3))) <= {
        "top_k", "stop", "stop_token_ids", "bad_words",
    }  # fmt: skip


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(2, 4, None, 0.5, temperature=0.7, stop=["a"], logit_bias={3: -500.0}),
        SamplingParams(temperature=0.0, bad_words=["x"], stop_token_ids=[4], logprobs=-1),
    ],
)
def test_survives_the_wire(params: SamplingParams) -> None:
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert decoded == params and decoded.num_returned == params.num_returned


# Normalisation


def test_best_of_becomes_n() -> None:
    params = SamplingParams(n=2, best_of=5)
    assert (params.n, params.best_of, params._real_n, params.num_returned) == (5, 5, 2, 2)
    again = params.clone()
    assert (again.n, again.best_of, again._real_n) == (5, 5, 2)
    same = SamplingParams(n=3, best_of=3)
    assert (same.n, same._real_n, same.num_returned) == (3, 3, 3)
    assert SamplingParams(n=3).num_returned == 3


def test_temperatures_are_used_as_given() -> None:
    assert SamplingParams(temperature=1e-3).temperature == 1e-3  # nothing is raised to 0.01
    assert SamplingParams(temperature=1e-3).sampling_type is SamplingType.RANDOM
    for temperature in (0, 0.0, 1e-12, 9.9e-6):
        assert SamplingParams(temperature=temperature).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy


def test_small_normalisations() -> None:
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(stop="x").stop == ["x"]
    assert SamplingParams(logprobs=True, prompt_logprobs=True).logprobs == 1
    assert SamplingParams(logprobs=True, prompt_logprobs=True).prompt_logprobs == 1
    assert SamplingParams(logprobs=False).logprobs == 0
    assert type(SamplingParams(logprobs=False).logprobs) is int
    assert type(SamplingParams(temperature=1).temperature) is float


def test_text_buffer_length() -> None:
    assert SamplingParams(stop=["ab", "abcd"]).output_text_buffer_length == 3
    assert (
        SamplingParams(stop="abcd", include_stop_str_in_output=True).output_text_buffer_length == 0
    )
    assert SamplingParams(output_text_buffer_length=7).output_text_buffer_length == 7


def test_greedy_clears_what_only_sampling_uses() -> None:
    params = SamplingParams(
        temperature=0.0, top_p=0.5, top_k=5, min_p=0.5, presence_penalty=1.0, seed=3,
        logit_bias={1: 1.0}, repetition_penalty=1.5,
    )  # fmt: skip
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    assert (params.presence_penalty, params.repetition_penalty, params.seed) == (1.0, 1.5, 3)
    assert params.logit_bias == {1: 1.0}
    for more in ({"n": 2}, {"best_of": 2}):
        with pytest.raises(ValueError, match="greedy"):
            SamplingParams(temperature=0.0, **more)


def test_all_stop_token_ids() -> None:
    assert SamplingParams(stop_token_ids=[4, 4, 2]).all_stop_token_ids == {2, 4}


def test_logit_bias_is_clamped_and_the_callers_dict_left_alone() -> None:
    bias = {1: 1000.0, 2: -INF, 3: 5}
    assert SamplingParams(logit_bias=bias).logit_bias == {1: 100.0, 2: -100.0, 3: 5.0}  # type: ignore[arg-type]
    assert bias == {1: 1000.0, 2: -INF, 3: 5}


# Validation: (arguments, error), in the order of the checks

BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"n": 1.5}, ValueError, "n must be an int"),
    ({"n": True}, ValueError, "n must be an int"),
    ({"n": "2"}, ValueError, "n must be an int"),
    ({"n": 0}, ValueError, "n must be at least 1"),
    ({"best_of": 2.5}, ValueError, "best_of must be an int"),
    ({"best_of": 0}, ValueError, "best_of must be at least 1"),
    ({"best_of": -1}, ValueError, "best_of must be at least"),
    ({"n": 3, "best_of": 2}, ValueError, "at least n=3"),
    ({"presence_penalty": 2.1}, ValueError, r"presence_penalty must be in \[-2, 2\], got 2.1"),
    ({"presence_penalty": -2.1}, ValueError, "presence_penalty"),
    ({"presence_penalty": NAN}, ValueError, "presence_penalty"),
    ({"presence_penalty": "x"}, ValueError, "presence_penalty must be a number"),
    ({"frequency_penalty": 2.1}, ValueError, "frequency_penalty"),
    ({"frequency_penalty": -2.1}, ValueError, "frequency_penalty"),
    ({"frequency_penalty": NAN}, ValueError, "frequency_penalty"),
    ({"repetition_penalty": 0.0}, ValueError, "repetition_penalty"),
    ({"repetition_penalty": -1.0}, ValueError, "repetition_penalty"),
    ({"repetition_penalty": NAN}, ValueError, "repetition_penalty"),
    ({"repetition_penalty": INF}, ValueError, "repetition_penalty"),
    ({"temperature": -0.1}, ValueError, "temperature"),
    ({"temperature": NAN}, ValueError, "temperature"),
    ({"temperature": INF}, ValueError, "temperature"),
    ({"temperature": "hot"}, ValueError, "temperature must be a number, got 'hot'"),
    ({"temperature": None}, ValueError, "temperature"),
    ({"top_p": 0.0}, ValueError, "top_p"),
    ({"top_p": 1.01}, ValueError, "top_p"),
    ({"top_p": NAN}, ValueError, "top_p"),
    ({"top_k": -2}, ValueError, "top_k"),
    ({"top_k": -5.0}, ValueError, "top_k"),  # the range comes before the type
    ({"top_k": NAN}, ValueError, "top_k"),
    ({"top_k": 5.0}, TypeError, "top_k must be an int, got float"),
    ({"top_k": "5"}, TypeError, "top_k"),
    ({"top_k": None}, TypeError, "top_k"),
    ({"min_p": -0.1}, ValueError, "min_p"),
    ({"min_p": 1.1}, ValueError, "min_p"),
    ({"min_p": NAN}, ValueError, "min_p"),
    ({"max_tokens": 0}, ValueError, "max_tokens"),
    ({"max_tokens": -5}, ValueError, "max_tokens"),
    ({"max_tokens": 1.5}, ValueError, "max_tokens must be an int"),
    ({"min_tokens": -1}, ValueError, "min_tokens"),
    ({"min_tokens": None}, ValueError, "min_tokens"),
    ({"min_tokens": 17}, ValueError, "at most max_tokens=16, got 17"),
    ({"logprobs": -2}, ValueError, "logprobs"),
    ({"logprobs": 1.0}, ValueError, "logprobs must be an int"),
    ({"prompt_logprobs": -2}, ValueError, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, ValueError, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -1}, ValueError, "truncate_prompt_tokens"),
    ({"stop_token_ids": (1,)}, AssertionError, "stop_token_ids"),
    ({"stop_token_ids": [1, "2"]}, ValueError, "stop_token_ids"),
    ({"stop_token_ids": [True]}, ValueError, "stop_token_ids"),
    ({"stop": ("a",)}, AssertionError, "stop"),
    ({"stop": ["a", ""]}, ValueError, "stop"),
    ({"stop": ""}, ValueError, "stop"),
    ({"stop": [""]}, ValueError, "stop"),
    ({"stop": [3]}, ValueError, "stop"),
    ({"stop": ["a"], "detokenize": False}, ValueError, "detokenize"),
    ({"best_of": 2, "output_kind": RequestOutputKind.DELTA}, ValueError, "deltas"),
    ({"seed": 2**64}, ValueError, "seed"),
    ({"seed": "1"}, ValueError, "seed"),
    ({"logit_bias": {1: NAN}}, ValueError, "logit_bias of token 1"),
    ({"logit_bias": {1: "x"}}, ValueError, "logit_bias must be a number"),
    ({"bad_words": "word"}, ValueError, "bad_words"),
]


@pytest.mark.parametrize(("arguments", "error", "said"), BAD)
def test_validation(arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said) as raised:
        SamplingParams(**arguments)
    assert type(raised.value) is error


@pytest.mark.parametrize(
    "arguments",
    [
        {"presence_penalty": 2}, {"frequency_penalty": -2}, {"repetition_penalty": 1e9},
        {"temperature": 2}, {"temperature": 1e-12}, {"top_p": 1e-9}, {"top_k": -1},
        {"top_k": 10**9}, {"min_p": 1}, {"min_p": 0}, {"max_tokens": None, "min_tokens": 10**9},
        {"max_tokens": 10**12}, {"min_tokens": 16}, {"logprobs": 0}, {"logprobs": -1},
        {"prompt_logprobs": -1}, {"truncate_prompt_tokens": 1}, {"stop": []}, {"seed": 0},
        {"seed": -(2**63)}, {"seed": 2**64 - 1}, {"n": 1000}, {"extra_args": {"a": object()}},
        {"best_of": 2, "n": 2, "output_kind": RequestOutputKind.DELTA}, {"allowed_token_ids": []},
        {"logits_processors": [max]}, {"guided_decoding": GuidedDecodingParams(regex="a")},
    ],
)  # fmt: skip
def test_what_is_accepted(arguments: dict[str, Any]) -> None:
    SamplingParams(**arguments)


def test_the_first_failing_check_wins() -> None:
    """Every pair of bad arguments gives the error of the earlier row."""
    rows = [row for row in BAD if len(row[0]) == 1 and "seed" not in row[0]]
    rows = [row for row in rows if not {"best_of", "logit_bias", "bad_words"} & set(row[0])]
    for i, (first, error, said) in enumerate(rows):
        for second, _, _ in rows[i + 1 :]:
            if first.keys() & second.keys():
                continue
            with pytest.raises(error, match=said):
                SamplingParams(**first, **second)


# from_optional


def test_from_optional_has_the_public_parameters() -> None:
    parameters = inspect.signature(SamplingParams.from_optional).parameters
    public = [n for n, _ in FIELDS if not n.startswith("_") and n != "output_text_buffer_length"]
    assert len(parameters) == 29 and set(parameters) == set(public)
    plain = SamplingParams()
    for name, parameter in parameters.items():
        assert (parameter.default or []) == (getattr(plain, name) or []), name
    assert SamplingParams.from_optional() == plain


def test_from_optional_replaces_none() -> None:
    params = SamplingParams.from_optional(
        n=None, presence_penalty=None, frequency_penalty=None, repetition_penalty=None,
        temperature=None, top_p=None, max_tokens=None,
    )  # fmt: skip
    assert params == SamplingParams(max_tokens=None)
    for name, error in (("top_k", TypeError), ("min_p", ValueError)):
        with pytest.raises(error):
            SamplingParams.from_optional(**{name: None})


def test_from_optional_reads_bias_keys() -> None:
    params = SamplingParams.from_optional(logit_bias={"3": 1000, "-1": -1000})
    assert params.logit_bias == {3: 100.0, -1: -100.0}
    with pytest.raises(ValueError):
        SamplingParams.from_optional(logit_bias={"x": 1.0})


# What the engine does with its copy


@pytest.mark.parametrize(
    ("eos", "primary", "ignore", "stops", "all_stops"),
    [
        (None, None, False, [9], {9}),
        (None, 2, False, [9], {2, 9}),
        (2, 2, False, [9], {2, 9}),
        ([2, 5, 6, 5], 2, False, [9, 5, 6], {2, 5, 6, 9}),
        ([2, 9], 2, False, [9], {2, 9}),
        (5, None, False, [9, 5], {5, 9}),
        ([2, 5], 2, True, [9], {2, 5, 9}),
    ],
)
def test_update_from_generation_config(
    eos: Any, primary: int | None, ignore: bool, stops: list[int], all_stops: set[int]
) -> None:
    given_ids = [9]
    params = SamplingParams(stop_token_ids=given_ids, ignore_eos=ignore)
    params.update_from_generation_config({"eos_token_id": eos} if eos is not None else {}, primary)
    assert params.stop_token_ids == stops and params.all_stop_token_ids == all_stops
    assert given_ids == [9]


class WordTable:
    """A tokenizer of whole texts."""

    def __init__(self, table: dict[str, list[int]], max_token_id: int = 99) -> None:
        self.table = table
        self.max_token_id = max_token_id

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return self.table[text]


@pytest.mark.parametrize(
    ("bare", "spaced", "expected"),
    [
        ([1], [2], [[1], [2]]),  # same length, other first token
        ([1, 3], [2, 3], [[1, 3], [2, 3]]),
        ([1, 3], [1, 4], [[1, 3]]),  # same first token
        ([1, 3], [2], [[1, 3]]),  # other length
        ([1], [5, 1], [[1]]),
    ],
)
def test_bad_words(bare: list[int], spaced: list[int], expected: list[list[int]]) -> None:
    params = SamplingParams(bad_words=["  word"])
    assert params.bad_words_token_ids is None
    params.update_from_tokenizer(WordTable({"word": bare, " word": spaced}))
    assert params.bad_words_token_ids == expected and params.bad_words == ["  word"]
    params.update_from_tokenizer(WordTable({"word": [7], " word": [8, 9]}))
    assert params.bad_words_token_ids == [[7]]  # rebuilt


def test_bad_words_that_cannot_be() -> None:
    table = WordTable({"word": [3, 100], " word": [101], "none": [], " none": [1]})
    with pytest.raises(ValueError, match=r"100 ids.*\[100\].*\[0, 99\]"):
        SamplingParams(bad_words=["word"]).update_from_tokenizer(table)
    for word in ("", "   ", "none", 3):
        with pytest.raises(ValueError, match="bad_words"):
            SamplingParams(bad_words=[word]).update_from_tokenizer(table)  # type: ignore[list-item]
    params = SamplingParams()
    params.update_from_tokenizer(table)
    assert params.bad_words_token_ids is None


# Members


def test_sampling_type_is_remembered() -> None:
    params = SamplingParams(seed=3)
    assert params.sampling_type is SamplingType.RANDOM_SEED
    params.seed, params.temperature = None, 0.0
    assert params.sampling_type is SamplingType.RANDOM_SEED
    assert [t.value for t in (SamplingType.GREEDY, SamplingType.RANDOM)] == [0, 1]
    assert [kind.name for kind in RequestOutputKind] == ["CUMULATIVE", "DELTA", "FINAL_ONLY"]


class Cloneable:
    def clone(self) -> "Cloneable":
        return Cloneable()


def test_clone() -> None:
    shared, cloned = object(), Cloneable()
    params = SamplingParams(
        logits_processors=[shared, cloned], stop=["a"], extra_args={"a": [1]}, bad_words=["b"]
    )
    copy = params.clone()
    assert copy.logits_processors is not None and copy.extra_args == {"a": [1]}
    assert copy.logits_processors[0] is shared and copy.logits_processors[1] is not cloned
    assert copy.stop == ["a"] and copy.stop is not params.stop
    copy.extra_args["a"].append(2)
    assert params.extra_args == {"a": [1]}


def test_clone_checks_again() -> None:
    params = SamplingParams()
    params.temperature = -1.0
    with pytest.raises(ValueError, match="temperature"):
        params.clone()


def test_repr() -> None:
    text = repr(SamplingParams(best_of=2, logit_bias={1: 1.0}, allowed_token_ids=[1]))
    listed = [
        "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p",
        "top_k", "min_p", "seed", "stop", "stop_token_ids", "bad_words",
        "include_stop_str_in_output", "ignore_eos", "max_tokens", "min_tokens", "logprobs",
        "prompt_logprobs", "skip_special_tokens", "spaces_between_special_tokens",
        "truncate_prompt_tokens", "guided_decoding", "extra_args",
    ]  # fmt: skip
    positions = [text.index(f"{name}=") for name in listed]
    assert positions == sorted(positions)
    for name in ("best_of", "detokenize", "output_kind", "logit_bias", "allowed_token_ids"):
        assert name not in text


finite = st.floats(allow_nan=True, allow_infinity=True)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": finite, "top_p": finite, "min_p": finite, "presence_penalty": finite,
            "frequency_penalty": finite, "repetition_penalty": finite, "n": st.integers(-2, 4),
            "best_of": st.none() | st.integers(-2, 4), "top_k": st.integers() | finite,
            "max_tokens": st.none() | st.integers(-3, 50), "min_tokens": st.integers(-3, 50),
        },
    )
)  # fmt: skip
def test_what_is_constructed_is_sane(arguments: dict[str, Any]) -> None:
    try:
        params = SamplingParams(**arguments)
    except (ValueError, TypeError):
        return
    assert 0.0 <= params.temperature < INF and 0.0 < params.top_p <= 1.0
    assert 0.0 <= params.min_p <= 1.0 and params.top_k >= -1
    assert -2 <= params.presence_penalty <= 2 and 0 < params.repetition_penalty < INF
    assert 1 <= params.num_returned <= params.n
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert decoded == params


# The other classes of the module


def test_guided_decoding_params() -> None:
    params = GuidedDecodingParams(regex="a+")
    assert (params.regex, params.backend, params.disable_fallback) == ("a+", None, False)
    GuidedDecodingParams(json="{}", structural_tag="x", whitespace_pattern="y", backend="z")
    for second in ({"regex": "a"}, {"choice": ["a"]}, {"grammar": "g"}, {"json_object": True}):
        with pytest.raises(ValueError, match="one constraint"):
            GuidedDecodingParams(json="{}", **second)
    assert GuidedDecodingParams.from_optional() is None
    assert GuidedDecodingParams.from_optional(backend="x", whitespace_pattern="y") is None
    made = GuidedDecodingParams.from_optional(choice=["a"], backend="x")
    assert made == GuidedDecodingParams(choice=["a"], backend="x")


def test_guided_decoding_takes_pydantic_models() -> None:
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Person", age=(int, ...))
    for given_json in (model, model(age=3)):
        made = GuidedDecodingParams.from_optional(json=given_json)
        assert made is not None and made.json == model.model_json_schema()


def test_beam_search_params() -> None:
    params = BeamSearchParams(4, 0)
    assert (params.beam_width, params.max_tokens, params.ignore_eos) == (4, 0, False)
    assert (params.temperature, params.length_penalty) == (0.0, 1.0)
    bad: list[dict[str, Any]] = [
        {"beam_width": 0}, {"beam_width": 1.5}, {"beam_width": True}, {"max_tokens": -1},
        {"temperature": -1.0}, {"temperature": NAN}, {"length_penalty": NAN},
    ]  # fmt: skip
    for arguments in bad:
        with pytest.raises(ValueError, match=next(iter(arguments))):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **arguments})
