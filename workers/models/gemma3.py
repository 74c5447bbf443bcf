"""Gemma 3, text (Gemma Team 2025, arXiv:2503.19786).

Sliding and global layers with a rotary embedding each, norms before and after, query and key norms,
scaled embeddings.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.workers.models.decoder_config import (
    DecoderConfig,
    LayerConfig,
    activation_name,
    llama_config,
)

_ROPES = ("full_attention", "sliding_attention")


def decoder_config(hf_config: Mapping[str, Any]) -> DecoderConfig:
    activation = activation_name(hf_config, "hidden_activation")
    config = llama_config({**hf_config, "hidden_act": activation})
    kinds = hf_config["layer_types"]
    return replace(
        config,
        layers=tuple(
            LayerConfig(window=layer.window, rope=_ROPES.index(kind))
            for layer, kind in zip(config.layers, kinds, strict=True)
        ),
        attention=replace(
            config.attention,
            scale=hf_config["query_pre_attn_scalar"] ** -0.5,
            norm_eps=config.norm_eps,
            norm_unit_offset=True,
            soft_cap=hf_config.get("attn_logit_softcapping"),
        ),
        ropes=tuple(hf_config["rope_parameters"][kind] for kind in _ROPES),
        norm_unit_offset=True,
        post_norms=True,
        embedding_scale=config.hidden_size**0.5,
        final_soft_cap=hf_config.get("final_logit_softcapping"),
    )
