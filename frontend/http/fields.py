"""Fields of the public API that this version knows but does not act on, and checks of values.

Each such field is accepted at its neutral value, so that clients which always send it work, and
refused by name otherwise: nothing that a client asks for vanishes. Values that would be wrong in
any version are refused first, with the range.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
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

Check = Callable[[str, Any], None]


@dataclass(frozen=True)
class Unsupported:
    """A known field: values that switch it off, a check of the others, and what to say then."""

    neutral: tuple[Any, ...] = (None,)
    check: Check | None = None
    advice: str = "leave it out"


def _at_least(low: int) -> Check:
    def check(name: str, value: Any) -> None:
        if type(value) is not int or value < low:
            raise invalid(name, f"must be an int of at least {low}", value)

    return check


_BEAM_SEARCH = "LLM.beam_search has it"
GENERATION_FIELDS: Mapping[str, Unsupported] = {
    "use_beam_search": Unsupported((None, False), advice=_BEAM_SEARCH),
    "length_penalty": Unsupported((None, 1.0), advice=_BEAM_SEARCH),
    "logprob_token_ids": Unsupported(),
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
    "thinking_token_budget": Unsupported((None, -1), _at_least(-1)),
    "stream_interval": Unsupported((None, 1), _at_least(1)),
    "watermarking": Unsupported((None, False)),
    "routed_experts_prompt_start": Unsupported((None, 0), _at_least(0)),
}
COMPLETION_FIELDS: Mapping[str, Unsupported] = {
    **GENERATION_FIELDS,
    "suffix": Unsupported((None, "")),
    "prompt_embeds": Unsupported(),
}
CHAT_FIELDS: Mapping[str, Unsupported] = {
    **GENERATION_FIELDS,
    "tools": Unsupported(),
    "tool_choice": Unsupported((None, "none")),
    "functions": Unsupported((None, [])),
    "function_call": Unsupported((None, "none")),
    "include_reasoning": Unsupported((None, True)),
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
    raw: Mapping[str, msgspec.Raw], names: list[str], known: Mapping[str, Unsupported]
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
            field.check(name, value)
        raise UnsupportedFeatureError(
            f"{name} is not supported yet; {field.advice} (parameter={name}, "
            f"value={show_value(value)})",
            name,
        )
    return unknown


def refuse_unknown(name: str, known: Iterable[str]) -> InvalidRequestError:
    """What `--strict` answers to a field that nobody knows: with the likeliest known name."""
    shown = show_value(name)
    match = difflib.get_close_matches(name[:80], sorted({*known, *IGNORED_FIELDS}), 1)
    hint = f"; did you mean {match[0]}?" if match else ""
    return InvalidRequestError(f"{shown} is not a field of this request{hint} (--strict)", name)


def check_token_list(name: str, value: Any, vocab_size: int) -> list[int]:
    """`value` if it is a list of token ids. Raises InvalidRequestError with value and range.

    The range is that of the logits; the tokenizer may know fewer ids.
    """
    wanted = f"must be token ids: ints in [0, {vocab_size - 1}]"
    if not isinstance(value, list):
        raise invalid(name, wanted, value)
    if value and set(map(type, value)) == {int} and min(value) >= 0 and max(value) < vocab_size:
        return value  # long lists are checked at the speed of C
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
