"""Sampling values for what a request leaves unset: the files', then the operator's over them."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.configs.errors import ConfigurationError, ModelFileError
from headrace.configs.model_files.json_file import read_json_object
from headrace.configs.model_files.model_info import (
    GENERATION_CONFIG,
    SAMPLING_FIELDS,
    ModelInfo,
    sampling_defaults,
    token_ids,
)

OVERRIDE_SOURCE = "--override-generation-config"
_OWN_DEFAULTS_ONLY = ("headrace", "vllm")


@dataclass(frozen=True)
class SamplingDefaults:
    """Defaults by their names in `SamplingParams`, and where each comes from."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    max_output_tokens: int | None = None  # limit of every request, as the operator said
    eos_token_ids: tuple[int, ...] = ()  # of a generation config given by folder


def resolve_sampling_defaults(
    info: ModelInfo, generation_config: str, override: Mapping[str, Any]
) -> SamplingDefaults:
    """The defaults of `generation_config` (auto, headrace, or a folder), `override` over them.

    The keys of `override` are those of generation_config.json. A `max_new_tokens` that the
    operator gave (by override or folder) also limits every request; the model's own is only a
    default. Raises ConfigurationError for a folder or an override that cannot be used.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    limit: int | None = None
    eos: tuple[int, ...] = ()
    if generation_config == "auto":
        values = dict(info.default_sampling_params)
        sources = dict.fromkeys(values, f"model file {info.sampling_file}")
    elif generation_config not in _OWN_DEFAULTS_ONLY:
        path = _file_in(generation_config)
        generation = read_json_object(path)
        values = sampling_defaults(generation, str(path))
        sources = dict.fromkeys(values, f"--generation-config {path}")
        limit = values.get("max_tokens")
        eos = tuple(token_ids(generation.get("eos_token_id")))
    given = _overridden(override)
    values |= given
    sources |= dict.fromkeys(given, OVERRIDE_SOURCE)
    return SamplingDefaults(values, sources, given.get("max_tokens", limit), eos)


def _file_in(folder: str) -> Path:
    path = Path(folder).expanduser() / GENERATION_CONFIG
    if not path.is_file():
        raise ConfigurationError(
            f"generation_config must be auto, headrace, or a folder with a {GENERATION_CONFIG}, "
            f"and {path} is no file"
        )
    return path


def _overridden(override: Mapping[str, Any]) -> dict[str, Any]:
    for name in override:
        if name not in SAMPLING_FIELDS:
            near = difflib.get_close_matches(name, SAMPLING_FIELDS, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigurationError(
                f"override_generation_config: {name!r} is not a sampling default; {hint}"
                f"known: {', '.join(SAMPLING_FIELDS)}"
            )
    try:
        return sampling_defaults(override, "override_generation_config")
    except ModelFileError as error:
        raise ConfigurationError(str(error)) from error
