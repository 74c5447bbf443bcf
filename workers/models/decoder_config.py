"""What distinguishes one decoder-only transformer from another, as plain values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.configs.errors import ModelFileError
from headrace.workers.layers.attention import AttentionShape
from headrace.workers.layers.mlp import ACTIVATIONS


@dataclass(frozen=True)
class LayerConfig:
    """One layer.

    `window`: tokens a query sees, itself included; None: all. `rope`: index into
    `DecoderConfig.ropes`.
    """

    window: int | None = None
    rope: int = 0


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder: embedding, `layers`, norm, head.

    `post_norms`: attention and feed-forward outputs are normalized before they join the residual
    stream, too. `norm_unit_offset`: norms scale by 1 + w. `ropes`: rotary parameters as in a
    normalized model config.
    """

    vocab_size: int
    hidden_size: int
    inner_size: int
    layers: tuple[LayerConfig, ...]
    attention: AttentionShape
    ropes: tuple[Mapping[str, Any], ...]
    norm_eps: float
    is_head_tied: bool
    activation: str = "silu"
    mlp_bias: bool = False
    norm_unit_offset: bool = False
    post_norms: bool = False
    embedding_scale: float = 1.0
    final_soft_cap: float | None = None


def llama_config(hf_config: Mapping[str, Any]) -> DecoderConfig:
    """A Llama as its normalized config says; the families that follow it replace what differs.

    Windows: `sliding_window` for the layers that `layer_types` names, or for all if there is no
    such list.
    """
    window = hf_config.get("sliding_window")
    kinds = hf_config.get("layer_types") or ["sliding_attention"] * hf_config["num_hidden_layers"]
    has_bias = bool(hf_config["attention_bias"])
    return DecoderConfig(
        vocab_size=hf_config["vocab_size"],
        hidden_size=hf_config["hidden_size"],
        inner_size=hf_config["intermediate_size"],
        layers=tuple(
            LayerConfig(window=window if kind == "sliding_attention" else None) for kind in kinds
        ),
        attention=AttentionShape(
            num_heads=hf_config["num_attention_heads"],
            num_kv_heads=hf_config["num_key_value_heads"],
            head_dim=hf_config["head_dim"],
            scale=hf_config["head_dim"] ** -0.5,
            qkv_bias=has_bias,
            output_bias=has_bias,
        ),
        ropes=(hf_config["rope_parameters"],),
        norm_eps=hf_config["rms_norm_eps"],
        is_head_tied=bool(hf_config["tie_word_embeddings"]),
        activation=activation_name(hf_config, "hidden_act"),
        mlp_bias=bool(hf_config.get("mlp_bias")),
    )


def activation_name(hf_config: Mapping[str, Any], field: str) -> str:
    """The activation function that `field` names; `ModelFileError` if it is not known here."""
    name = hf_config[field]
    if name not in ACTIVATIONS:
        raise ModelFileError(
            f"{field} {name!r} of the model is not supported; supported: {', '.join(ACTIVATIONS)}"
        )
    return str(name)
