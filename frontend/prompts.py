"""From the forms of a prompt (see `inputs`) to the one that the renderer works with: a dict."""

from collections.abc import Mapping
from typing import Any

from headrace.configs.errors import InvalidRequestError, UnsupportedFeatureError

# What this version does not render -> what to say about it.
_UNSUPPORTED = {
    "prompt_embeds": "prompt embeddings are not supported yet; send text or token ids",
    "encoder_prompt": "encoder-decoder prompts are not supported; this model is decoder-only",
    "token_type_ids": "token_type_ids are for cross-encoders, which are not supported yet",
    "multi_modal_data": "this model takes text only",
    "mm_processor_kwargs": "this model takes text only and has no media processor",
}


def prompt_dict(item: Any) -> dict[str, Any]:
    """A prompt in any accepted form as a new dict with `prompt` or `prompt_token_ids`.

    Raises TypeError for what is no prompt at all, InvalidRequestError for a dict without text and
    ids and (UnsupportedFeatureError) for kinds of prompt that are not rendered. Ids are not checked
    here but at admission.
    """
    if isinstance(item, str):
        return {"prompt": item}
    if isinstance(item, bytes | bytearray):
        raise UnsupportedFeatureError(_UNSUPPORTED["prompt_embeds"], "prompt_embeds")
    if isinstance(item, Mapping):
        prompt = dict(item)
        check_supported(prompt)
        return _checked(prompt)
    if isinstance(item, list | tuple) and not any(isinstance(i, str | list | dict) for i in item):
        return {"prompt_token_ids": list(item)}
    raise TypeError(
        "a prompt is a str, a list of token ids, {'prompt': str} or {'prompt_token_ids': [int]}, "
        f"got {_name_of(item)}"
    )


def check_supported(prompt: Mapping[str, Any]) -> None:
    """Refuse, by name, what is given and cannot be rendered; empty media count as none."""
    for key, reason in _UNSUPPORTED.items():
        value = prompt.get(key)
        is_given = value is not None if key == "prompt_embeds" else bool(value)
        if is_given:
            raise UnsupportedFeatureError(f"{key}: {reason}", key)


def _checked(prompt: dict[str, Any]) -> dict[str, Any]:
    ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
    if ids is None and text is None:
        raise InvalidRequestError(
            "a prompt dict needs 'prompt' (a str) or 'prompt_token_ids' (a list of ints), got the "
            f"keys {sorted(map(str, prompt))}",
            "prompt",
        )
    if text is not None and not isinstance(text, str):
        raise InvalidRequestError(f"'prompt' must be a str, got {type(text).__name__}", "prompt")
    if ids is not None:
        if isinstance(ids, str | bytes | Mapping) or not hasattr(ids, "__iter__"):
            raise InvalidRequestError(
                f"'prompt_token_ids' must be a list of ints, got {type(ids).__name__}", "prompt"
            )
        prompt["prompt_token_ids"] = list(ids)
    salt = prompt.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise InvalidRequestError(
            f"cache_salt must be a str, got {type(salt).__name__}", "cache_salt"
        )
    return prompt


def _name_of(item: Any) -> str:
    if isinstance(item, list | tuple):
        inner = sorted({type(i).__name__ for i in item})
        return f"a {type(item).__name__} of {', '.join(inner)}"
    return type(item).__name__
