"""What a model on disk says about itself, for engine arguments and front end; torch-free."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from headrace.configs.errors import ConfigurationError, ModelFileError
from headrace.configs.model_files.hf_config import normalize_hf_config
from headrace.configs.model_files.json_file import read_json_object, read_optional_json_object
from headrace.configs.model_files.overrides import HfOverrides, apply_hf_overrides

GENERATION_CONFIG = "generation_config.json"

# Name in generation_config.json -> name in SamplingParams, whether it is an int, lowest and highest
# value.
SAMPLING_FIELDS: Mapping[str, tuple[str, bool, float, float]] = MappingProxyType(
    {
        "temperature": ("temperature", False, 0.0, math.inf),
        "top_k": ("top_k", True, -1, math.inf),
        "top_p": ("top_p", False, 0.0, 1.0),
        "min_p": ("min_p", False, 0.0, 1.0),
        "repetition_penalty": ("repetition_penalty", False, 0.0, math.inf),
        "max_new_tokens": ("max_tokens", True, 1, math.inf),
    }
)

# Key in a GGUF file -> name in generation_config.json.
_GGUF_SAMPLING_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "general.sampling.temp": "temperature",
        "general.sampling.top_k": "top_k",
        "general.sampling.top_p": "top_p",
        "general.sampling.min_p": "min_p",
        "general.sampling.penalty_repeat": "repetition_penalty",
    }
)
_GGUF_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")  # the primary one first


@dataclass(frozen=True)
class ModelInfo:
    """A model on disk. `hf_config` is normalized (see `hf_config.py`)."""

    architecture: str  # e.g. "LlamaForCausalLM"
    hf_config: dict[str, Any]
    max_model_len: int  # tokens, prompt and output; what the model was made for
    vocab_size: int  # width of the logits
    eos_token_id: int | None  # the primary one
    extra_eos_token_ids: tuple[int, ...] = ()  # ascending
    default_sampling_params: dict[str, Any] = field(default_factory=dict)
    sampling_file: str = GENERATION_CONFIG  # name of the file that those come from


def read_model_info(
    path: Path, *, overrides: HfOverrides | None = None, config_path: Path | None = None
) -> ModelInfo:
    """What a model directory or a GGUF file says about itself; reads no weights.

    Of a directory: `config.json` (or the one in `config_path`), and `generation_config.json` and
    `tokenizer_config.json` if they are there. `overrides` change the config before anything
    follows from it. Raises `ModelFileError` if the model is missing, damaged or not supported.
    """
    path = Path(path)
    if path.is_dir():
        return _from_directory(path, overrides or {}, config_path or path)
    if config_path is not None:
        raise ConfigurationError(
            f"hf_config_path {config_path} does not go with {path}: a GGUF file has its own "
            "config. Leave it out, or change single values with hf_overrides"
        )
    return _from_gguf(path, overrides or {})


def _from_directory(directory: Path, overrides: HfOverrides, config_path: Path) -> ModelInfo:
    source = config_path if config_path.is_file() else config_path / "config.json"
    config = normalize_hf_config(
        apply_hf_overrides(read_json_object(source), overrides), str(source)
    )
    generation = read_optional_json_object(directory / GENERATION_CONFIG)
    tokenizer = read_optional_json_object(directory / "tokenizer_config.json")
    eos = [
        *token_ids(_tokenizer_eos(directory, tokenizer)),
        *token_ids(generation.get("eos_token_id")),
        *token_ids(config.get("eos_token_id")),
    ]
    sampling_source = str(directory / GENERATION_CONFIG)
    return _model_info(
        config,
        max_model_len=_max_model_len(config, tokenizer.get("model_max_length")),
        eos=eos,
        sampling=sampling_defaults(generation, sampling_source),
        sampling_file=GENERATION_CONFIG,
    )


def _from_gguf(path: Path, overrides: HfOverrides) -> ModelInfo:
    # With numpy, a third of what `headrace serve` would import before it starts its engine.
    from headrace.configs.model_files.gguf import GGUFFile
    from headrace.configs.model_files.gguf_config import hf_config_from_gguf

    with GGUFFile.open(path) as file:
        config = hf_config_from_gguf(file)
        if overrides:
            config = normalize_hf_config(apply_hf_overrides(config, overrides), str(path))
        eos = [
            token
            for key in _GGUF_EOS_KEYS
            for token in token_ids(file.metadata.get(f"tokenizer.ggml.{key}"))
        ]
        generation = {
            name: _shortest_float(file.metadata[key])
            for key, name in _GGUF_SAMPLING_KEYS.items()
            if key in file.metadata
        }
    return _model_info(
        config,
        max_model_len=_max_model_len(config, None),
        eos=eos,
        sampling=sampling_defaults(generation, str(path)),
        sampling_file=path.name,
    )


def _model_info(
    config: dict[str, Any],
    *,
    max_model_len: int,
    eos: Iterable[int],
    sampling: dict[str, Any],
    sampling_file: str,
) -> ModelInfo:
    vocab_size = config["vocab_size"]
    known = [token for token in dict.fromkeys(eos) if token < vocab_size]  # others never come up
    return ModelInfo(
        architecture=config["architectures"][0],
        hf_config=config,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_id=known[0] if known else None,
        extra_eos_token_ids=tuple(sorted(known[1:])),
        default_sampling_params=sampling,
        sampling_file=sampling_file,
    )


def _max_model_len(config: Mapping[str, Any], tokenizer_limit: object) -> int:
    """Positions the model was made for.

    Rescaled rotary embeddings reach further than `max_position_embeddings`.

    Llama 3.1, longrope and Gemma 3 already count the rescaling in `max_position_embeddings`.
    """
    limit = int(config["max_position_embeddings"])
    rope = config["rope_parameters"]
    if rope.get("rope_type") in ("linear", "dynamic"):
        limit = int(limit * rope.get("factor", 1.0))
    elif rope.get("rope_type") == "yarn":
        original = rope["original_max_position_embeddings"]
        limit = max(limit, int(original * rope.get("factor", 1.0)))
    if isinstance(tokenizer_limit, int) and 1 <= tokenizer_limit < limit:
        limit = tokenizer_limit
    return limit


def sampling_defaults(generation: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The sampling values that a generation config sets, by their names in `SamplingParams`.

    `source` names the file in messages. Raises `ModelFileError` for a value that cannot be.
    """
    params: dict[str, Any] = {}
    for name, (field_name, is_int, low, high) in SAMPLING_FIELDS.items():
        value = generation.get(name)
        if value is None:
            continue
        allowed = int if is_int else (int, float)
        is_number = isinstance(value, allowed) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or value == math.inf:
            raise ModelFileError(
                f"{source}: {name} is {value!r}, but must be "
                f"{'an integer' if is_int else 'a number'} from {low:g} to {high:g}. Correct or "
                "remove it"
            )
        params[field_name] = value
    return params


def _shortest_float(value: Any) -> Any:
    """A float32 as it was written: 0.7, not 0.699999988079071."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def token_ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token for token in values if type(token) is int and token >= 0]


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    """The part of tokenizer.json that is read here."""

    added_tokens: list[_AddedToken] = []


def _tokenizer_eos(directory: Path, tokenizer: Mapping[str, Any]) -> int | None:
    """The id of the tokenizer's `eos_token`, which tokenizer_config.json names by its text."""
    token = tokenizer.get("eos_token")
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str):
        return None
    decoder = tokenizer.get("added_tokens_decoder")
    for token_id, entry in decoder.items() if isinstance(decoder, Mapping) else ():
        if isinstance(entry, Mapping) and entry.get("content") == text and token_id.isdecimal():
            return int(token_id)
    path = directory / "tokenizer.json"
    try:
        added = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile).added_tokens
    except OSError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelFileError(
            f"{path}: not a valid tokenizer.json: {error}. The file is corrupt: download it again"
        ) from error
    return next((token.id for token in added if token.content == text), None)
