"""Sampling defaults that a model's files give: which of them are applied, and to what."""

from collections.abc import Mapping
from typing import Any

# Fields of SamplingParams that a model's files may give a default for.
DEFAULTED_FIELDS = ("temperature", "top_p", "top_k", "min_p")
# Those that this version knows but cannot apply, with the value at which that makes no difference.
UNAPPLIED_FIELDS: Mapping[str, float] = {"repetition_penalty": 1.0}


def applied_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a model's defaults to start `SamplingParams` from."""
    return {name: defaults[name] for name in DEFAULTED_FIELDS if defaults.get(name) is not None}


def default_max_tokens(defaults: Mapping[str, Any]) -> int | None:
    """The model's own length limit of an answer, for requests that give none."""
    limit = defaults.get("max_tokens")
    return limit if isinstance(limit, int) else None


def unapplied_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The part that would change answers but cannot be applied; worth a warning."""
    return {
        name: defaults[name]
        for name, neutral in UNAPPLIED_FIELDS.items()
        if defaults.get(name, neutral) not in (neutral, None)
    }
