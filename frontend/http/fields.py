"""Fields of the public API that this version knows but does not act on.

Each is accepted at its neutral value, so that clients which always send it work, and refused by
name otherwise: nothing that a client asks for vanishes. Values that would be wrong in any version
are refused first, with the range.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.configs.errors import InvalidRequestError, UnsupportedFeatureError
from headrace.frontend.http.errors import show_value
from headrace.frontend.http.protocol import decode_value

# Hints and labels that change nothing about the answer.
IGNORED_FIELDS = frozenset(
    {
        "user", "session_id", "metadata", "store", "service_tier", "prediction", "verbosity",
        "parallel_tool_calls", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What the checks need to know about the model and the request."""

    vocab_size: int
    n: int


Check = Callable[[str, Any, Limits], None]


@dataclass(frozen=True)
class Unsupported:
    """A known field: values that switch it off, a check of the others, and what to say then."""

    neutral: tuple[Any, ...] = (None,)
    check: Check | None = None
    advice: str = "leave it out"


def _number(low: float, high: float, *, above_low: bool = False) -> Check:
    def check(name: str, value: Any, limits: Limits) -> None:
        left = f"above {low:g}" if above_low else f"at least {low:g}"
        wanted = left if high == float("inf") else f"in [{low:g}, {high:g}]"
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (above_low and value == low):
            raise invalid(name, f"must be a number {wanted}", value)

    return check


def _check_int(low: int) -> Check:
    def check(name: str, value: Any, limits: Limits) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise invalid(name, f"must be an int of at least {low}", value)

    return check


def _check_logit_bias(name: str, value: Any, limits: Limits) -> None:
    if not isinstance(value, dict):
        raise invalid(name, "must be an object of token id to bias", value)
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and int(key[:20]) < limits.vocab_size):
            raise invalid(name, f"must have token ids in [0, {limits.vocab_size - 1}] as keys", key)
        if not isinstance(bias, int | float) or isinstance(bias, bool):
            raise invalid(name, "must have numbers as values", bias)


def _check_allowed(name: str, value: Any, limits: Limits) -> None:
    if check_token_list(name, value, limits.vocab_size) == []:
        raise invalid(name, "must allow at least one token id", value)


def _check_bad_words(name: str, value: Any, limits: Limits) -> None:
    if not isinstance(value, list) or not all(isinstance(word, str) and word for word in value):
        raise invalid(name, "must be a list of strings that are not empty", value)


def _check_best_of(name: str, value: Any, limits: Limits) -> None:
    _check_int(limits.n)(name, value, limits)


COMMON_FIELDS: Mapping[str, Unsupported] = {
    "presence_penalty": Unsupported((None, 0.0), _number(-2, 2)),
    "frequency_penalty": Unsupported((None, 0.0), _number(-2, 2)),
    "repetition_penalty": Unsupported((None, 1.0), _number(0, float("inf"), above_low=True)),
    "length_penalty": Unsupported((None, 1.0)),
    "use_beam_search": Unsupported((None, False)),
    "best_of": Unsupported((None,), _check_best_of, "sample n choices instead"),
    "logit_bias": Unsupported((None, {}), _check_logit_bias),
    "allowed_token_ids": Unsupported((None,), _check_allowed),
    "bad_words": Unsupported((None, []), _check_bad_words),
    "spaces_between_special_tokens": Unsupported((None, True)),
    "prompt_logprobs": Unsupported((None,), _check_int(-1)),
    "logprob_token_ids": Unsupported((None,)),
    "echo": Unsupported((None, False)),
    "truncate_prompt_tokens": Unsupported((None,), _check_int(-1)),
    "truncation_side": Unsupported(),
    "response_format": Unsupported((None, {"type": "text"})),
    "structured_outputs": Unsupported(),
    "guided_json": Unsupported(),
    "guided_regex": Unsupported(),
    "guided_choice": Unsupported(),
    "guided_grammar": Unsupported(),
    "guided_json_object": Unsupported((None, False)),
    "guided_decoding_backend": Unsupported(),
    "guided_whitespace_pattern": Unsupported(),
    "structural_tag": Unsupported(),
    "vllm_xargs": Unsupported((None, {})),
    "kv_transfer_params": Unsupported(),
    "ec_transfer_params": Unsupported(),
    "repetition_detection": Unsupported(),
    "thinking_token_budget": Unsupported((None, -1), _check_int(-1)),
    "stream_interval": Unsupported((None, 1), _check_int(1)),
    "watermarking": Unsupported((None, False)),
    "routed_experts_prompt_start": Unsupported((None, 0), _check_int(0)),
}
COMPLETION_FIELDS: Mapping[str, Unsupported] = {
    **COMMON_FIELDS,
    "suffix": Unsupported((None, "")),
    "prompt_embeds": Unsupported(),
}
CHAT_FIELDS: Mapping[str, Unsupported] = {
    **COMMON_FIELDS,
    "tools": Unsupported(),
    "tool_choice": Unsupported((None, "none")),
    "functions": Unsupported(),
    "function_call": Unsupported((None, "none")),
    "include_reasoning": Unsupported((None, True)),
    "documents": Unsupported((None, [])),
    "chat_template": Unsupported(advice="templates come from the operator, not from clients"),
    "mm_processor_kwargs": Unsupported((None, {})),
    "media_io_kwargs": Unsupported((None, {})),
    "modalities": Unsupported((None, ["text"])),
    "audio": Unsupported(),
    "web_search_options": Unsupported(),
    "add_special_tokens": Unsupported(
        (None, False), advice="the chat template writes its own start token"
    ),
}


def check_other_fields(
    raw: Mapping[str, msgspec.Raw],
    names: list[str],
    known: Mapping[str, Unsupported],
    limits: Limits,
) -> list[str]:
    """Check the fields `names` that are not acted on; returns those that nobody knows.

    Raises InvalidRequestError for a value out of range, UnsupportedFeatureError for one that asks
    for something.
    """
    unknown = []
    for name in names:
        field = known.get(name)
        if field is None:
            if name not in IGNORED_FIELDS:
                unknown.append(name)
            continue
        value = decode_value(raw[name], name)
        if any(_same(value, neutral) for neutral in field.neutral):
            continue
        if field.check is not None:
            field.check(name, value, limits)
        if name == "best_of" and value == limits.n:
            continue
        raise UnsupportedFeatureError(
            f"{name} is not supported yet; {field.advice} (parameter={name}, "
            f"value={show_value(value)})",
            name,
        )
    return unknown


def check_token_list(name: str, value: Any, vocab_size: int) -> list[int]:
    """`value` if it is a list of token ids. Raises InvalidRequestError with value and range.

    The range is that of the logits; the tokenizer may know fewer ids.
    """
    wanted = f"must be token ids: ints in [0, {vocab_size - 1}]"
    if not isinstance(value, list):
        raise invalid(name, wanted, value)
    for token in value:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise invalid(name, wanted, token)
    return value


def invalid(name: str, wanted: str, value: Any) -> InvalidRequestError:
    """A field that is out of range: what it must be, and what it was."""
    return InvalidRequestError(
        f"{name} {wanted} (parameter={name}, value={show_value(value)})", name
    )


def _same(value: Any, neutral: Any) -> bool:
    """Equal as JSON: 0 and 0.0 are the same number, but false is no number."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
