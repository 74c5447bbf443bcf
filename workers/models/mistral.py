"""Mistral (Jiang et al. 2023, arXiv:2310.06825).

A Llama whose layers may all have a sliding window, without biases.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.workers.models.decoder_config import DecoderConfig, LayerConfig, llama_config


def decoder_config(hf_config: Mapping[str, Any]) -> DecoderConfig:
    config = llama_config(hf_config)
    layers = tuple(LayerConfig(window=hf_config.get("sliding_window")) for _ in config.layers)
    return replace(
        config,
        layers=layers,
        attention=replace(config.attention, qkv_bias=False, output_bias=False),
        mlp_bias=False,
    )
