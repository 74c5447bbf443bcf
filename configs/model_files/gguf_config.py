"""What a GGUF file says about its model, in the terms of a transformers `config.json`."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from headrace.configs.errors import ModelFileError
from headrace.configs.model_files.gguf import GGUFFile, GGUFTensor
from headrace.configs.model_files.hf_config import normalize_hf_config
from headrace.configs.model_files.weight_layout import WeightSpec, weight_layout

# Element types that `kernels.dequantize` knows.
SUPPORTED_TENSOR_TYPES = (
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q4_K",
    "Q5_K",
    "Q6_K",
)

# `general.architecture` -> architecture in transformers.
_ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "gemma3": "Gemma3ForCausalLM",
    }
)

ROPE_FACTORS = "rope_freqs.weight"  # Llama 3.1 and later: what each rotary frequency is divided by

# Llama 3.1's rescaling of rotary frequencies. Files give the resulting factors only; all released
# models share these.
_LLAMA3_LOW_FREQ_FACTOR = 1.0
_LLAMA3_HIGH_FREQ_FACTOR = 4.0
_LLAMA3_ORIGINAL_POSITIONS = 8192

_GEMMA3_27B_LAYERS = 62  # the one Gemma 3 whose query scale is not 1 / sqrt(head_dim)
_GEMMA3_LOCAL_THETA = 10_000.0

_DEFAULT_ROPE_THETA = 10_000.0


def hf_config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """The normalized `hf_config` of the model in `file`.

    Reads no weights but Llama's rotary factors. Also checks that every weight of the model is there
    with the right shape and a known element type, and that there is none that would be ignored.
    Raises `ModelFileError` for all that is not supported.
    """
    num_parts = file.metadata.get("split.count")  # first: only one part has the other keys
    if isinstance(num_parts, int) and num_parts > 1:
        raise ModelFileError(
            f"{file.path}: one part of a split GGUF file, which is not supported. Merge the parts "
            "with `llama-gguf-split --merge` first"
        )
    keys = _Keys(file)
    if "token_embd.weight" not in file.tensors:
        raise ModelFileError(
            f"{file.path}: no tensor token_embd.weight: this file holds no language model weights. "
            "Give the file of the model itself (not of its vocabulary, projector or adapter)"
        )
    raw = _common_fields(keys, file.tensors)
    if keys.architecture == "gemma3":
        raw |= _gemma3_fields(keys, raw)
    elif keys.architecture == "llama":
        raw |= _llama_fields(keys, raw)
    config = normalize_hf_config(raw, str(file.path))
    if ROPE_FACTORS in file.tensors:
        config["rope_parameters"] = _llama3_rope(file, config)
    _check_tensors(file, config)
    return config


def gguf_weights(
    file: GGUFFile, hf_config: Mapping[str, Any]
) -> list[tuple[WeightSpec, GGUFTensor]]:
    """The weights in file order, so that the file is read once; `hf_config` is this file's."""
    specs = {spec.gguf_name: spec for spec in weight_layout(hf_config).values()}
    return [(specs[name], tensor) for name, tensor in file.tensors.items() if name in specs]


class _Keys:
    """Typed look-ups in the metadata; keys are relative to the architecture's own prefix."""

    def __init__(self, file: GGUFFile) -> None:
        self._metadata = file.metadata
        self.path = file.path
        self._prefix = ""
        self.architecture = str(self._optional("general.architecture", str) or "")
        if self.architecture not in _ARCHITECTURES:
            raise ModelFileError(
                f"{file.path}: not supported: arch {self.architecture[:80] or '(none)'}; "
                f"supported: {', '.join(_ARCHITECTURES)}"
            )
        self._prefix = f"{self.architecture}."

    def required_int(self, name: str) -> int:
        value = self.optional_int(name)
        if value is None:
            raise ModelFileError(
                f"{self.path}: the key {self._prefix}{name} is missing. The file is incomplete: "
                "download it again or use another conversion of the model"
            )
        return value

    def optional_int(self, name: str, prefix: str | None = None) -> int | None:
        return self._optional((self._prefix if prefix is None else prefix) + name, int)

    def optional_float(self, name: str) -> float | None:
        """A float as it was before it became a float32: 1e-05, not 9.999999747378752e-06."""
        value = self._optional(self._prefix + name, float)
        return None if value is None else float(str(np.float32(value)))

    def optional_str(self, name: str) -> str | None:
        return self._optional(self._prefix + name, str)

    def _optional(self, key: str, kind: type) -> Any:
        if key not in self._metadata:
            return None
        value = self._metadata[key]
        if (
            isinstance(value, np.ndarray)
            and kind is int
            and value.size
            and (value == value[0]).all()
        ):
            value = value[0].item()  # one number per layer, all the same
        if type(value) is kind:
            return value
        shown = "an array" if isinstance(value, np.ndarray | list) else repr(value)[:80]
        raise ModelFileError(
            f"{self.path}: the key {key} is {shown}, but must be one {kind.__name__}. Models "
            "whose layers differ are not supported; else the file is corrupt: download it again"
        )


def _common_fields(keys: _Keys, tensors: Mapping[str, GGUFTensor]) -> dict[str, Any]:
    heads = keys.required_int("attention.head_count")
    hidden = keys.required_int("embedding_length")
    fields: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[keys.architecture]],
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.required_int("feed_forward_length"),
        "num_hidden_layers": keys.required_int("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.optional_int("attention.head_count_kv") or heads,
        "head_dim": keys.optional_int("attention.key_length") or hidden // max(heads, 1),
        "max_position_embeddings": keys.required_int("context_length"),
        "rms_norm_eps": keys.optional_float("attention.layer_norm_rms_epsilon") or 1e-6,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "rope_parameters": _rope(keys),
        "bos_token_id": keys.optional_int("tokenizer.ggml.bos_token_id", prefix=""),
        "eos_token_id": keys.optional_int("tokenizer.ggml.eos_token_id", prefix=""),
        "pad_token_id": keys.optional_int("tokenizer.ggml.padding_token_id", prefix=""),
    }
    for name, expected in (
        ("rope.dimension_count", "head_dim"),
        ("attention.value_length", "head_dim"),
    ):
        value = keys.optional_int(name)
        if value is not None and value != fields[expected]:
            raise ModelFileError(
                f"{keys.path}: {name} {value} is not supported; only {fields[expected]}, the size "
                "of a head, is"
            )
    if keys.optional_int("expert_count"):
        raise ModelFileError(
            f"{keys.path}: not supported: a mixture of {keys.optional_int('expert_count')} "
            "experts; supported: dense models"
        )
    return fields


def _rope(keys: _Keys) -> dict[str, Any]:
    theta = keys.optional_float("rope.freq_base") or _DEFAULT_ROPE_THETA
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = keys.optional_str("rope.scaling.type") or "none"
    factor = keys.optional_float("rope.scaling.factor") or keys.optional_float("rope.scale_linear")
    if kind == "none" and factor in (None, 1.0):
        return rope
    if kind not in ("none", "linear", "yarn"):
        raise ModelFileError(
            f"{keys.path}: rope.scaling.type {kind[:80]} is not supported; supported: none, "
            "linear, yarn"
        )
    rope |= {"rope_type": "linear" if kind == "none" else kind, "factor": factor or 1.0}
    original = keys.optional_int("rope.scaling.original_context_length")
    if original is not None and kind == "yarn":
        rope["original_max_position_embeddings"] = original
    return rope


def _gemma3_fields(keys: _Keys, raw: Mapping[str, Any]) -> dict[str, Any]:
    head_dim, num_layers = raw["head_dim"], raw["num_hidden_layers"]
    is_27b = num_layers == _GEMMA3_27B_LAYERS
    fields = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": raw["hidden_size"] // raw["num_attention_heads"]
        if is_27b
        else head_dim,
        "sliding_window": keys.required_int("attention.sliding_window"),
        "final_logit_softcapping": keys.optional_float("final_logit_softcapping"),
        "attn_logit_softcapping": keys.optional_float("attn_logit_softcapping"),
        "rope_parameters": {
            "full_attention": raw["rope_parameters"],
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": keys.optional_float("rope.freq_base_swa") or _GEMMA3_LOCAL_THETA,
            },
        },
    }
    pattern = keys.optional_int("attention.sliding_window_pattern")
    return fields if pattern is None else fields | {"sliding_window_pattern": pattern}


def _llama_fields(keys: _Keys, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Files of Mistral models say `llama` too; one with a window is certainly not a Llama."""
    window = keys.optional_int("attention.sliding_window")
    if window is None:
        return {"hidden_act": "silu"}
    if raw["attention_bias"]:
        raise ModelFileError(
            f"{keys.path}: a sliding window with attention biases is not supported"
        )
    return {
        "architectures": ["MistralForCausalLM"],
        "hidden_act": "silu",
        "sliding_window": window,
    }


def _llama3_rope(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """Recover Llama 3.1's rope parameters from the factors they lead to.

    Frequency f with wavelength w = 2 pi / f is kept for w < P / high, divided by `factor` for w > P
    / low, and interpolated between (P: original positions). The largest factor is therefore
    `factor` itself.
    """
    tensor = file.tensors[ROPE_FACTORS]
    rope: dict[str, Any] = dict(config["rope_parameters"])
    if tensor.type_name != "F32" or tensor.shape != (config["head_dim"] // 2,):
        raise ModelFileError(
            f"{file.path}: {ROPE_FACTORS} is {tensor.type_name} {list(tensor.shape)}, but must be "
            f"F32 [{config['head_dim'] // 2}]. The file is corrupt: download it again"
        )
    factors = np.frombuffer(file.data(tensor), "<f4").astype(np.float64)
    exponents = np.arange(0, config["head_dim"], 2) / config["head_dim"]
    wavelengths = 2 * math.pi * rope["rope_theta"] ** exponents
    low, high = _LLAMA3_LOW_FREQ_FACTOR, _LLAMA3_HIGH_FREQ_FACTOR
    factor = float(factors.max())
    smooth = (_LLAMA3_ORIGINAL_POSITIONS / wavelengths - low) / (high - low)
    smooth = smooth.clip(0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth) if factor > 0 else np.zeros(1)
    is_known = rope["rope_type"] == "default" and math.isfinite(factor) and factor > 0
    if not is_known or not np.allclose(factors, expected, rtol=1e-3):
        raise ModelFileError(
            f"{file.path}: the rotary factors in {ROPE_FACTORS} are not Llama 3.1's, which are "
            "the only ones supported. Use the safetensors checkpoint of the model"
        )
    return rope | {
        "rope_type": "llama3",
        "factor": float(str(np.float32(factor))),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL_POSITIONS,
    }


def _check_tensors(file: GGUFFile, config: Mapping[str, Any]) -> None:
    specs = {spec.gguf_name: spec for spec in weight_layout(config).values()}
    missing = sorted(set(specs) - set(file.tensors))
    if missing:
        raise ModelFileError(
            f"{file.path}: {len(missing)} of {len(specs)} tensors are missing, the first is "
            f"{missing[0]}. The file is incomplete: download it again or use another conversion "
            "of the model"
        )
    unknown = sorted(set(file.tensors) - set(specs) - {ROPE_FACTORS})
    if unknown:
        raise ModelFileError(
            f"{file.path}: not supported: {len(unknown)} tensors that a "
            f"{config['architectures'][0]} does not have, the first is {unknown[0]}"
        )
    for name, spec in specs.items():
        tensor = file.tensors[name]
        if tensor.shape != spec.shape:
            raise ModelFileError(
                f"{file.path}: the tensor {name} has shape {list(tensor.shape)}, but the metadata "
                f"asks for {list(spec.shape)}. The file is corrupt: download it again"
            )
        if tensor.type_name not in SUPPORTED_TENSOR_TYPES:
            raise ModelFileError(
                f"{file.path}: not supported: tensor type {tensor.type_name} (of {name}); "
                f"supported: {', '.join(SUPPORTED_TENSOR_TYPES)}. Use another quantization of the "
                "model"
            )
