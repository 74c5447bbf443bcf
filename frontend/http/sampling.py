"""From a body to `SamplingParams`: the request's values, then the operator's and the model's (which
arrive merged, as the model's defaults), then the built-in ones.

Every field is a row of a table, with the function that checks its value and turns it into what
`SamplingParams` takes. Values above what the model can use are clamped; all others that are out of
range are refused with the range.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.configs.config import ModelConfig
from headrace.configs.errors import InvalidRequestError
from headrace.configs.sampling_params import MAX_LOGIT_BIAS, RequestOutputKind, SamplingParams
from headrace.frontend.http.errors import show_value
from headrace.frontend.http.fields import check_token_list, invalid
from headrace.frontend.http.limits import RequestLimits
from headrace.frontend.http.protocol import GenerationBody
from headrace.frontend.sampling_defaults import applied_defaults

ORDINARY_NUM_LOGPROBS = 20  # one choice with so many is always within the limits
_FIRST_WORD = re.compile(r"[a-z_]+")
_MODE_NAMES = {"raw": "raw_logprobs", "processed": "processed_logprobs"}


@dataclass(frozen=True)
class SamplingRules:
    """What the checks need to know: the model and the limits of a request."""

    config: ModelConfig
    limits: RequestLimits


@dataclass(frozen=True)
class ScoreRequest:
    """How many log-probabilities a token has in the answer: None for none, -1 for all.

    `field` is the one that the client set for the output tokens.
    """

    field: str
    output: int | None
    prompt: int | None  # of the prompt's tokens, as an answer to `prompt_logprobs`
    echo: int | None = None  # of the prompt's tokens, as part of an echo


@dataclass(frozen=True)
class SamplingPlan:
    """`params` for the engine, and what of its output the answer has.

    `n`: choices per prompt in the answer, the likeliest of the `params.n` sampled ones. The numbers
    of scores are those asked for, with -1 resolved. `keeps_output` False: one token is sampled,
    because the engine needs a reason to run, and dropped.
    """

    params: SamplingParams
    n: int
    num_logprobs: int | None
    num_prompt_logprobs: int | None
    num_echo_logprobs: int | None
    keeps_output: bool = True


def make_sampling_plan(
    body: GenerationBody,
    rules: SamplingRules,
    scores: ScoreRequest,
    *,
    max_tokens: int | None,
    keeps_output: bool = True,
) -> SamplingPlan:
    """Raises InvalidRequestError with the field, its value and its range.

    `max_tokens` None: the rest of the window.
    """
    config = rules.config
    values = applied_defaults(config.default_sampling_params)
    for name, read in SAMPLING_FIELDS.items():
        value = getattr(body, name)
        if value is not None:
            values[name] = value if read is None else read(name, value, rules)
    _check_body(body, rules)
    num_logprobs = _num_scores(scores.field, scores.output, config)
    num_prompt_logprobs = _num_scores("prompt_logprobs", scores.prompt, config)
    num_echo_logprobs = _num_scores(scores.field, scores.echo, config)
    values["logprobs"] = num_logprobs
    prompt_counts = [k for k in (num_prompt_logprobs, num_echo_logprobs) if k is not None]
    values["prompt_logprobs"] = max(prompt_counts, default=None)
    values["max_tokens"] = max_tokens
    values["output_kind"] = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    try:
        params = SamplingParams(**values)
    except (ValueError, TypeError) as error:
        raise _with_parameter(error, body, values) from error
    params.top_k = min(params.top_k, config.vocab_size)
    params.min_tokens = min(params.min_tokens, config.max_model_len)
    if params.max_tokens is not None:
        params.max_tokens = min(params.max_tokens, config.max_model_len)
    return SamplingPlan(
        params,
        body.n or 1,
        num_logprobs,
        num_prompt_logprobs,
        num_echo_logprobs,
        keeps_output,
    )


def check_cost(plan: SamplingPlan, prompt_lengths: list[int], rules: SamplingRules) -> None:
    """Refuse a request whose answer would be out of all proportion to it.

    Raises InvalidRequestError with the numbers and the limit.
    """
    limits, config, params = rules.limits, rules.config, plan.params
    num_choices = len(prompt_lengths) * params.n
    if num_choices > limits.max_total_choices:
        raise InvalidRequestError(
            f"{len(prompt_lengths)} prompts x {params.n} choices are {num_choices}; at most "
            f"{limits.max_total_choices} choices are accepted in one request",
            "n",
        )
    num_scores = 0
    if params.prompt_logprobs is not None:
        num_scores += sum(prompt_lengths) * (params.prompt_logprobs + 1)
    if params.logprobs is not None:
        for length in prompt_lengths:
            room = max(config.max_model_len - length, 0)
            longest = room if params.max_tokens is None else min(params.max_tokens, room)
            num_scores += params.n * longest * (params.logprobs + 1)
    ordinary = config.max_model_len * (ORDINARY_NUM_LOGPROBS + 1)
    if num_scores > max(limits.max_scores, ordinary):
        raise InvalidRequestError(
            f"the answer could have {num_scores} log-probabilities; at most "
            f"{max(limits.max_scores, ordinary)} are accepted: ask for fewer per token, fewer "
            "choices, or set max_tokens",
            "logprobs" if params.logprobs is not None else "prompt_logprobs",
        )


def effective_params(plan: SamplingPlan, config: ModelConfig, room: int) -> dict[str, Any]:
    """What `return_effective_params` reports: values after defaults and clamping.

    `room`: tokens that the window leaves after the prompt. A seed that was left unset is None.
    """
    params = plan.params
    longest = [room, *(k for k in (params.max_tokens, config.max_output_tokens) if k is not None)]
    values = {name: getattr(params, name) for name in REPORTED_FIELDS}
    values["n"] = plan.n
    values["max_tokens"] = min(longest) if plan.keeps_output else 0
    values["min_tokens"] = min(params.min_tokens, values["max_tokens"])
    values["logprobs"] = plan.num_logprobs
    values["prompt_logprobs"] = plan.num_prompt_logprobs
    values["logprobs_mode"] = config.logprobs_mode
    ends = {*config.extra_eos_token_ids}
    if config.eos_token_id is not None:
        ends.add(config.eos_token_id)
    values["eos_token_ids"] = [] if params.ignore_eos else sorted(ends)
    return values


def _choices(name: str, value: int, rules: SamplingRules) -> int:
    if not 1 <= value <= rules.limits.max_num_choices:
        raise invalid(name, f"must be in [1, {rules.limits.max_num_choices}]", value)
    return value


def _int64(name: str, value: int, rules: SamplingRules) -> int:
    if not -(2**63) <= value < 2**63:
        raise invalid(name, "must be an int of 64 bits", value)
    return value


def _stop(name: str, value: str | list[str], rules: SamplingRules) -> list[str]:
    stops, limits = [value] if isinstance(value, str) else value, rules.limits
    if len(stops) > limits.max_stop_strings:
        raise invalid(name, f"must have at most {limits.max_stop_strings} strings", len(stops))
    if any(len(stop) > limits.max_stop_chars for stop in stops):
        raise InvalidRequestError(
            f"{name} strings must have at most {limits.max_stop_chars} characters", name
        )
    return stops


def _token_list(name: str, value: Any, rules: SamplingRules) -> list[int]:
    return list(dict.fromkeys(check_token_list(name, value, rules.config.vocab_size)))


def _allowed(name: str, value: Any, rules: SamplingRules) -> list[int]:
    token_ids = _token_list(name, value, rules)
    if not token_ids:
        raise invalid(name, "must allow at least one token id", value)
    return token_ids


def _logit_bias(name: str, value: Any, rules: SamplingRules) -> dict[int, float]:
    if not isinstance(value, dict):
        raise invalid(name, "must be an object of token id to bias", value)
    if len(value) > rules.limits.max_logit_bias:
        raise invalid(name, f"must have at most {rules.limits.max_logit_bias} ids", len(value))
    vocab_size = rules.config.vocab_size
    biases = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and int(key[:20]) < vocab_size):
            raise invalid(name, f"must have token ids in [0, {vocab_size - 1}] as keys", key)
        if isinstance(bias, bool) or not isinstance(bias, int | float) or math.isnan(bias):
            raise invalid(name, "must have numbers as values", bias)
        biases[int(key)] = float(max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, bias)))
    return biases


def _bad_words(name: str, value: Any, rules: SamplingRules) -> list[str]:
    limits = rules.limits
    if not isinstance(value, list) or not all(type(w) is str and w.strip() for w in value):
        raise invalid(name, "must be a list of strings that are not empty or blank", value)
    if len(value) > limits.max_bad_words:
        raise invalid(name, f"must have at most {limits.max_bad_words} words", len(value))
    if any(len(word) > limits.max_bad_word_chars for word in value):
        raise InvalidRequestError(
            f"{name} must have at most {limits.max_bad_word_chars} characters each", name
        )
    return value


Reader = Callable[[str, Any, SamplingRules], Any]
# Fields that go to SamplingParams under their own name, and how their values are read; None: as
# they are, because SamplingParams checks them.
SAMPLING_FIELDS: Mapping[str, Reader | None] = {
    "n": _choices,
    "best_of": _choices,
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "min_p": None,
    "seed": _int64,
    "presence_penalty": None,
    "frequency_penalty": None,
    "repetition_penalty": None,
    "logit_bias": _logit_bias,
    "allowed_token_ids": _allowed,
    "bad_words": _bad_words,
    "stop": _stop,
    "stop_token_ids": _token_list,
    "ignore_eos": None,
    "min_tokens": None,
    "include_stop_str_in_output": None,
    "skip_special_tokens": None,
    "spaces_between_special_tokens": None,
}
REPORTED_FIELDS = tuple(SAMPLING_FIELDS)


def _check_body(body: GenerationBody, rules: SamplingRules) -> None:
    """Fields that no SamplingParams has, and combinations."""
    if body.best_of is not None:
        if body.best_of < (body.n or 1):
            raise invalid("best_of", f"must be at least n={body.n or 1}", body.best_of)
        if body.stream and body.best_of > (body.n or 1):
            raise invalid("best_of", "above n cannot be streamed", body.best_of)
    if body.priority is not None:
        _int64("priority", body.priority, rules)
    longest = rules.limits.max_cache_salt_chars
    salt = body.cache_salt
    if salt is not None and (not 1 <= len(salt) <= longest or set(salt) & set("@/\\\0")):
        raise InvalidRequestError(
            f"cache_salt must have 1 to {longest} characters and none of @ / \\ NUL", "cache_salt"
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options needs stream: true", "stream_options")
    if body.stream and body.prompt_logprobs:
        raise invalid("prompt_logprobs", "cannot be streamed", body.prompt_logprobs)
    mode, ours = body.logprobs_mode, rules.config.logprobs_mode
    if mode is not None and _MODE_NAMES.get(mode, mode) != ours:
        raise invalid("logprobs_mode", f"must be {ours}, as the server runs", mode)


def _num_scores(name: str, count: int | None, config: ModelConfig) -> int | None:
    """How many scores a token gets; -1 is the whole vocabulary, where the operator allows it."""
    cap = config.max_logprobs
    if count is None:
        return None
    if cap == -1:
        if count < -1:
            raise invalid(name, "must be at least 0, or -1 for all", count)
        return config.vocab_size if count == -1 else min(count, config.vocab_size)
    if not 0 <= count <= cap:
        raise invalid(name, f"must be in [0, {cap}] (--max-logprobs)", count)
    return count


def _with_parameter(
    error: ValueError | TypeError, body: GenerationBody, values: Mapping[str, Any]
) -> InvalidRequestError:
    """The same message; it begins with the name of the field at fault."""
    if isinstance(error, InvalidRequestError) and error.parameter is not None:
        return error
    word = _FIRST_WORD.match(str(error))
    name = word.group() if word else None
    if name is None or name not in values:
        return InvalidRequestError(str(error))
    value = show_value(getattr(body, name, None) if name != "max_tokens" else values[name])
    return InvalidRequestError(f"{error} (parameter={name}, value={value})", name)
