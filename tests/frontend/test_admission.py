"""Admission: what can never work is refused with numbers; the rest is resolved."""

import pytest

from headrace.configs.config import ModelConfig
from headrace.configs.errors import InvalidRequestError, UnsupportedFeatureError
from headrace.configs.sampling_params import SamplingParams
from headrace.engine_core.messages import EngineCoreRequest, Ready
from headrace.frontend.admission import Admission

VOCAB = 100


def make_admission(*, window: int = 32, pool: int = 1000, seed: int | None = None) -> Admission:
    model = ModelConfig(
        "m", "m", "m", ("m",), "LlamaForCausalLM", {}, "float32", window, VOCAB, 2, (5, 6),
        seed=seed,
    )  # fmt: skip
    return Admission(model, Ready(10, 16, pool, "id", {}, {}, 1, 1))


def admit(
    prompt: list[int], params: SamplingParams | None = None, **limits: int
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


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (SamplingParams(presence_penalty=1.0), "presence_penalty"),
        (SamplingParams(repetition_penalty=1.1), "repetition_penalty"),
        (SamplingParams(logit_bias={3: 1.0}), "logit_bias"),
        (SamplingParams(allowed_token_ids=[]), "allowed_token_ids"),
        (SamplingParams(bad_words=["x"]), "bad_words"),
        (SamplingParams(prompt_logprobs=1), "prompt_logprobs"),
        (SamplingParams(spaces_between_special_tokens=False), "spaces_between_special_tokens"),
    ],
)
def test_unsupported_parameters_are_refused_by_name(params: SamplingParams, name: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=name):
        admit([1], params)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (SamplingParams(stop_token_ids=[VOCAB]), r"stop_token_ids.*100.*\[0, 100\)"),
        (SamplingParams(logit_bias={-1: 1.0}), "logit_bias.*-1"),
        (SamplingParams(logprobs=21), "20.*21"),
    ],
)
def test_ranges(params: SamplingParams, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        admit([1], params)


def test_ids_are_unique() -> None:
    admission = make_admission()
    ids = {admission.admit([1], SamplingParams(), arrival_time=0).request_id for _ in range(50)}
    assert len(ids) == 50
