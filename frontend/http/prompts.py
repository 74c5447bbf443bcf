"""The `prompt` field of completions: one prompt or a list of them, as text or token ids."""

from typing import Any

from headrace.configs.errors import InvalidRequestError
from headrace.frontend.http.fields import check_token_list, invalid


def parse_prompts(value: Any, vocab_size: int, max_prompts: int) -> list[str | list[int]]:
    """All prompts of a request. Raises InvalidRequestError with the value and what it must be."""
    if isinstance(value, str):
        return [_text(value)]
    if not isinstance(value, list):
        raise invalid("prompt", "must be a string, token ids, or a list of either", value)
    if not value:
        raise InvalidRequestError("prompt is empty; it needs at least one token", "prompt")
    if not isinstance(value[0], str | list):
        return [check_token_list("prompt", value, vocab_size)]
    if len(value) > max_prompts:
        raise InvalidRequestError(
            f"prompt has {len(value)} prompts; at most {max_prompts} are accepted", "prompt"
        )
    return [_item(item, vocab_size) for item in value]


def _item(item: Any, vocab_size: int) -> str | list[int]:
    if isinstance(item, str):
        return _text(item)
    if item == []:
        raise InvalidRequestError("prompt has an empty list; it needs one token", "prompt")
    return check_token_list("prompt", item, vocab_size)


def _text(text: str) -> str:
    if not text:
        raise InvalidRequestError("prompt is empty; it needs at least one character", "prompt")
    return text
