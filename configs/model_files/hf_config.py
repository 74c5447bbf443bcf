"""The one spelling of a model's `config.json` that the rest of headrace reads.

Checkpoints were written by many versions of transformers: fields that had their default value may
be absent, and rotary parameters come as `rope_theta` and `rope_scaling` or as `rope_parameters`.
`normalize_hf_config` fills in the defaults and spells rotary parameters as transformers 5 does,
after checking the numbers that sizes follow from.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from headrace.configs.errors import ModelFileError

MAX_LAYERS = 1000
MAX_SIZE = 1 << 30  # of any one dimension

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_QWEN2: dict[str, Any] = _LLAMA | {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "attention_bias": True,  # of q, k and v only; the class has no switch for it
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

# Class defaults of transformers, by architecture: what an absent field means.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "LlamaForCausalLM": _LLAMA,
        "MistralForCausalLM": _LLAMA
        | {
            "model_type": "mistral",
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        "Qwen2ForCausalLM": _QWEN2,
        "Qwen3ForCausalLM": _QWEN2
        | {"model_type": "qwen3", "head_dim": 128, "attention_bias": False},
        "Gemma3ForCausalLM": {
            "model_type": "gemma3_text",
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "layer_types": None,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "use_bidirectional_attention": False,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "pad_token_id": 0,
        },
    }
)

# What the classes of transformers do whatever the file says.
_FIXED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "LlamaForCausalLM": {"sliding_window": None},
        "MistralForCausalLM": {"attention_bias": False, "mlp_bias": False},
        "Qwen2ForCausalLM": {"attention_bias": True, "mlp_bias": False},
        "Qwen3ForCausalLM": {"mlp_bias": False},
    }
)

SUPPORTED_ARCHITECTURES: tuple[str, ...] = tuple(_DEFAULTS)

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_GEMMA_SLIDING_PATTERN = 6  # every sixth layer is global
_ROPE_THETA = 10_000.0
_GEMMA_ROPE_THETA = 1_000_000.0


def normalize_hf_config(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A copy of `raw` with every field that the model definitions read, defaults filled in.

    The result spells rotary parameters only as `rope_parameters` (for Gemma 3: by layer type),
    gives `layer_types` to every architecture that has them, and `sliding_window` None where no
    layer uses one. Normalizing twice changes nothing. `source` names the file in messages. Raises
    `ModelFileError` for an unsupported architecture, a quantized checkpoint and sizes that cannot
    be.
    """
    architecture = _architecture(raw, source)
    method = raw.get("quantization_config") or raw.get("compression_config")
    if method:
        name = method.get("quant_method", "unknown") if isinstance(method, Mapping) else method
        raise ModelFileError(
            f"{source}: quantization_config ({name}) is not supported. Use an unquantized "
            "checkpoint or a GGUF file of the model"
        )
    config = {**_DEFAULTS[architecture], **raw, **_FIXED.get(architecture, {})}
    config["architectures"] = [architecture]
    if config.get("use_bidirectional_attention"):
        raise ModelFileError(
            f"{source}: use_bidirectional_attention is not supported: this model embeds text and "
            "does not generate it. Use a causal checkpoint"
        )
    if config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = config["num_attention_heads"]
    _check_size(config, "num_hidden_layers", source, MAX_LAYERS)
    _check_size(config, "num_attention_heads", source, MAX_SIZE)
    _check_size(config, "hidden_size", source, MAX_SIZE)
    if config.get("head_dim") is None:
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    for name in _SIZES:
        _check_size(config, name, source, MAX_SIZE)
    _check_heads(config, source)
    _check_positive(config, "rms_norm_eps", source)
    if not isinstance(config["tie_word_embeddings"], bool):
        raise ModelFileError(
            f"{source}: tie_word_embeddings is {config['tie_word_embeddings']!r}, not true or false"
        )
    _fill_layer_types(config, architecture, source)
    config["rope_parameters"] = _rope_parameters(config, architecture, source)
    for old in ("rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern"):
        config.pop(old, None)
    return config


def _architecture(raw: Mapping[str, Any], source: str) -> str:
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    names = raw.get("architectures")
    if not isinstance(names, list) or not names:
        raise ModelFileError(
            f"{source}: no architectures field, so the model's type is unknown. Supported: "
            f"{supported}"
        )
    for name in names:
        if name in _DEFAULTS:
            return str(name)
    raise ModelFileError(
        f"{source}: not supported: architecture {', '.join(map(str, names))[:200]}; supported: "
        f"{supported}"
    )


def _check_size(config: Mapping[str, Any], name: str, source: str, limit: int) -> None:
    value = config.get(name)
    if type(value) is not int or not 1 <= value <= limit:
        raise ModelFileError(
            f"{source}: {name} is {value!r}, but must be an integer from 1 to {limit}. The file "
            "is corrupt: download it again"
        )


def _check_positive(values: Mapping[str, Any], name: str, source: str) -> None:
    value: Any = values.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0.0 < value < math.inf:
        raise ModelFileError(
            f"{source}: {name} is {value!r}, but must be a number above 0. The file is corrupt: "
            "download it again"
        )


def _check_heads(config: Mapping[str, Any], source: str) -> None:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if heads % kv_heads:
        raise ModelFileError(
            f"{source}: num_attention_heads {heads} is not a multiple of num_key_value_heads "
            f"{kv_heads}. The file is corrupt: download it again"
        )
    if config["head_dim"] % 2:
        raise ModelFileError(
            f"{source}: head_dim {config['head_dim']} is odd, but rotary embeddings need pairs. "
            "The file is corrupt: download it again"
        )


def _fill_layer_types(config: dict[str, Any], architecture: str, source: str) -> None:
    num_layers = config["num_hidden_layers"]
    window = config.get("sliding_window")
    if "use_sliding_window" in config and not config["use_sliding_window"]:
        window = None
    if "layer_types" in _DEFAULTS[architecture] and config.get("layer_types") is None:
        if architecture == "Gemma3ForCausalLM":
            config.setdefault("sliding_window_pattern", _GEMMA_SLIDING_PATTERN)
            _check_size(config, "sliding_window_pattern", source, MAX_SIZE)
            pattern = config["sliding_window_pattern"]
            slides = [bool((layer + 1) % pattern) for layer in range(num_layers)]
        else:
            first = config["max_window_layers"]
            slides = [window is not None and layer >= first for layer in range(num_layers)]
        config["layer_types"] = [
            "sliding_attention" if slide else "full_attention" for slide in slides
        ]
    layer_types = config.get("layer_types")
    if layer_types is not None:
        known = ("sliding_attention", "full_attention")
        is_list = isinstance(layer_types, list) and len(layer_types) == num_layers
        if not is_list or any(kind not in known for kind in layer_types):
            raise ModelFileError(
                f"{source}: layer_types must name one of {', '.join(known)} for each of the "
                f"{num_layers} layers, got {str(layer_types)[:200]}"
            )
        if "sliding_attention" not in layer_types:
            window = None
        elif window is None:
            raise ModelFileError(
                f"{source}: layer_types has sliding_attention layers, but sliding_window is not set"
            )
    config["sliding_window"] = window
    if window is not None:
        _check_size(config, "sliding_window", source, MAX_SIZE)


def _rope_parameters(config: Mapping[str, Any], architecture: str, source: str) -> dict[str, Any]:
    given = config.get("rope_parameters")
    scaling = config.get("rope_scaling")
    for name, value in (("rope_parameters", given), ("rope_scaling", scaling)):
        if value is not None and not isinstance(value, Mapping):
            raise ModelFileError(f"{source}: {name} is {value!r}, but must be an object or null")
    max_positions = config["max_position_embeddings"]
    if architecture != "Gemma3ForCausalLM":
        theta = config.get("rope_theta", _ROPE_THETA)
        return _one_rope(scaling or given or {}, theta, max_positions, source)
    given = dict(given or {})
    if given and not {"full_attention", "sliding_attention"} & set(given):
        given = {"full_attention": given}  # flat: the older spelling, which meant the global layers
    full = dict(given.get("full_attention") or {}) | dict(scaling or {})
    sliding = given.get("sliding_attention") or {}
    full_theta = config.get("rope_theta", _GEMMA_ROPE_THETA)
    sliding_theta = config.get("rope_local_base_freq", _ROPE_THETA)
    return {
        "full_attention": _one_rope(full, full_theta, max_positions, source),
        "sliding_attention": _one_rope(sliding, sliding_theta, max_positions, source),
    }


def _one_rope(
    given: Mapping[str, Any], theta: Any, max_positions: int, source: str
) -> dict[str, Any]:
    rope = dict(given)
    rope["rope_type"] = rope.pop("rope_type", None) or rope.get("type") or "default"
    rope.pop("type", None)
    rope.setdefault("rope_theta", theta)
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        rope.setdefault("original_max_position_embeddings", max_positions)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelFileError(
            f"{source}: partial_rotary_factor {rope['partial_rotary_factor']} is not supported; "
            "only 1.0 is"
        )
    _check_positive(rope, "rope_theta", source)
    if "factor" in rope:
        _check_positive(rope, "factor", source)
    return rope
