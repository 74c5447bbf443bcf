"""Qwen2 (Yang et al. 2024, arXiv:2407.10671).

A Llama with biases on query, key and value, and windows in some layers.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.workers.models.decoder_config import DecoderConfig, llama_config


def decoder_config(hf_config: Mapping[str, Any]) -> DecoderConfig:
    config = llama_config(hf_config)
    attention = replace(config.attention, qkv_bias=True, output_bias=False)
    return replace(config, attention=attention, mlp_bias=False)
