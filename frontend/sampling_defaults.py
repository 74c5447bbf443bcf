"""Sampling values for what a request leaves unset.

A request goes before the command line, that before the model's files, those before the built-in
values.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from headrace.configs.config import ModelConfig

# Fields of SamplingParams that the command line or a model's files may give a default for.
DEFAULTED_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class TokenNames(Protocol):
    """What naming tokens in the log needs of a tokenizer."""

    def id_to_token(self, token_id: int) -> str | None: ...


def applied_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the defaults to start `SamplingParams` from."""
    return {name: defaults[name] for name in DEFAULTED_FIELDS if defaults.get(name) is not None}


def default_max_tokens(defaults: Mapping[str, Any]) -> int | None:
    """The model's own length limit of an answer, for requests that give none."""
    limit = defaults.get("max_tokens")
    return limit if isinstance(limit, int) else None


def sampling_facts(model_config: ModelConfig, tokenizer: TokenNames | None) -> list[str]:
    """Lines for the log: which tokens end a sequence, which sampling defaults hold and whence."""
    ids = (model_config.eos_token_id, *model_config.extra_eos_token_ids)
    ends = [_named(token, tokenizer) for token in ids if token is not None]
    defaults = applied_defaults(model_config.default_sampling_params)
    limit = default_max_tokens(model_config.default_sampling_params)
    if limit is not None:
        defaults["max_tokens"] = limit
    sources = model_config.sampling_param_sources
    values = [
        f"{name}={value} ({sources.get(name, 'model files')})" for name, value in defaults.items()
    ]
    values.append("everything else built-in" if values else "all built-in")
    lines = [
        f"end-of-text tokens: {', '.join(ends) or 'none'}",
        f"sampling defaults: {', '.join(values)}",
    ]
    if model_config.max_output_tokens is not None:
        lines.append(f"at most {model_config.max_output_tokens} output tokens for every request")
    return lines


def _named(token: int, tokenizer: TokenNames | None) -> str:
    return f"{token}" if tokenizer is None else f"{token} {tokenizer.id_to_token(token)!r}"
