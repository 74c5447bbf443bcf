"""Forms in which `LLM.generate` takes its prompts, brought to one: a list."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn


def prompt_list(prompts: Any) -> list[Any]:
    """One prompt (a str, a dict, a list of ids) as a list of one; a sequence of prompts as a list.

    TypeError for anything else.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        raise TypeError(
            f"prompts must be a prompt or a sequence of prompts, got {type(prompts).__name__}"
        )
    items = list(prompts)
    return [items] if items and all(_is_int(item) for item in items) else items


def legacy_prompts(prompts: Any, prompt_token_ids: Any, *, warns: bool) -> list[Any]:
    """The older call form, with token ids beside the text or in its place; the text wins.

    ValueError if both are missing, if one is empty, or if their numbers differ.
    """
    if warns:
        warnings.warn(
            "prompt_token_ids is deprecated: give the ids as prompts",
            DeprecationWarning,
            stacklevel=3,
        )
    texts = None if prompts is None else _texts(prompts)
    ids = None if prompt_token_ids is None else _id_lists(prompt_token_ids)
    if texts is not None and ids is not None and len(texts) != len(ids):
        raise ValueError(f"{len(texts)} prompts and {len(ids)} lists of prompt_token_ids")
    if texts is not None:
        return texts
    if ids is None:
        raise ValueError("give prompts or prompt_token_ids")
    return [{"prompt_token_ids": item} for item in ids]


def conversation_list(messages: Any) -> list[Any]:
    """One conversation as a list of one; a list of conversations as it is."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(
            "messages must be a list of messages or a list of such lists, got "
            f"{type(messages).__name__}"
        )
    many = bool(messages) and not isinstance(messages[0], Mapping)
    return list(messages) if many or not messages else [list(messages)]


def _texts(prompts: Any) -> list[Any]:
    items = prompt_list(prompts)
    if not items:
        _empty("prompts")
    return items


def _id_lists(prompt_token_ids: Any) -> list[list[int]]:
    if not isinstance(prompt_token_ids, Sequence) or isinstance(prompt_token_ids, str | bytes):
        raise ValueError(f"prompt_token_ids must be a list, got {type(prompt_token_ids).__name__}")
    if not prompt_token_ids:
        _empty("prompt_token_ids")
    if all(_is_int(item) for item in prompt_token_ids):
        return [list(prompt_token_ids)]
    for item in prompt_token_ids:
        if not isinstance(item, Sequence) or isinstance(item, str | bytes):
            raise ValueError("prompt_token_ids must hold ints, or lists of ints, not both")
        if not item:
            _empty("prompt_token_ids")
    return [list(item) for item in prompt_token_ids]


def _empty(name: str) -> NoReturn:
    raise ValueError(f"{name} is empty: give at least one prompt of at least one token")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
