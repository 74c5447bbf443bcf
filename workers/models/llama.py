"""Llama (Touvron et al. 2023, arXiv:2302.13971) and the models of its shape, SmolLM2 among them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.workers.models.decoder_config import DecoderConfig, LayerConfig, llama_config


def decoder_config(hf_config: Mapping[str, Any]) -> DecoderConfig:
    config = llama_config(hf_config)
    # A Llama has no window, even if a field of that name came along.
    return replace(config, layers=tuple(LayerConfig() for _ in config.layers))
