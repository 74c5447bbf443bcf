"""From a body to `SamplingParams`: the request's values, then the model's, then built-in ones."""

import re

from headrace.configs.config import ModelConfig
from headrace.configs.errors import InvalidRequestError
from headrace.configs.sampling_params import RequestOutputKind, SamplingParams
from headrace.frontend.http.errors import show_value
from headrace.frontend.http.fields import check_token_list, invalid
from headrace.frontend.http.protocol import GenerationBody
from headrace.frontend.sampling_defaults import applied_defaults

MAX_NUM_CHOICES = 16384
MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 4096
# Fields that go to SamplingParams under their own name.
SAMPLING_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
    "min_tokens", "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip
_FIRST_WORD = re.compile(r"[a-z_]+")


def make_sampling_params(
    body: GenerationBody,
    config: ModelConfig,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    logprobs_field: str,
) -> SamplingParams:
    """Raises InvalidRequestError with the field, its value and its range.

    `max_tokens` None: the rest of the window. Values above what the model can use are clamped.
    """
    values = applied_defaults(config.default_sampling_params)
    for name in SAMPLING_FIELDS:
        value = getattr(body, name)
        if value is not None:
            values[name] = value
    _check_sizes(body, config)
    _check_logprobs(logprobs, logprobs_field, config)
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    try:
        params = SamplingParams(
            **values, max_tokens=max_tokens, logprobs=logprobs, output_kind=kind
        )
    except (ValueError, TypeError) as error:
        raise _with_parameter(error, body, max_tokens) from error
    params.top_k = min(params.top_k, config.vocab_size)
    params.min_tokens = min(params.min_tokens, config.max_model_len)
    if params.max_tokens is not None:
        params.max_tokens = min(params.max_tokens, config.max_model_len)
    return params


def _check_sizes(body: GenerationBody, config: ModelConfig) -> None:
    if body.n is not None and not 1 <= body.n <= MAX_NUM_CHOICES:
        raise invalid("n", f"must be in [1, {MAX_NUM_CHOICES}]", body.n)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOP_STRINGS:
        raise invalid("stop", f"must have at most {MAX_STOP_STRINGS} strings", len(stops))
    if any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise InvalidRequestError(
            f"stop strings must have at most {MAX_STOP_CHARS} characters", "stop"
        )
    if body.stop_token_ids is not None:
        check_token_list("stop_token_ids", body.stop_token_ids, config.vocab_size)
    if body.priority is not None and not -(2**63) <= body.priority < 2**63:
        raise invalid("priority", "must be an int of 64 bits", body.priority)
    salt = body.cache_salt
    if salt is not None and (not 1 <= len(salt) <= 128 or set(salt) & set("@/\\\0")):
        raise InvalidRequestError(
            "cache_salt must have 1 to 128 characters and none of @ / \\ NUL", "cache_salt"
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options needs stream: true", "stream_options")


def _check_logprobs(logprobs: int | None, field: str, config: ModelConfig) -> None:
    if logprobs is not None and not 0 <= logprobs <= config.max_logprobs:
        raise invalid(field, f"must be in [0, {config.max_logprobs}] (--max-logprobs)", logprobs)


def _with_parameter(
    error: ValueError | TypeError, body: GenerationBody, max_tokens: int | None
) -> InvalidRequestError:
    """The same message; it begins with the name of the field at fault."""
    word = _FIRST_WORD.match(str(error))
    name = word.group() if word else None
    if name == "max_tokens":
        return InvalidRequestError(f"{error} (parameter=max_tokens, value={max_tokens})", name)
    if name not in SAMPLING_FIELDS:
        return InvalidRequestError(str(error))
    value = show_value(getattr(body, name))
    return InvalidRequestError(f"{error} (parameter={name}, value={value})", name)
