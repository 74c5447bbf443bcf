"""Qwen3, dense (Yang et al. 2025, arXiv:2505.09388).

A Llama with query and key norms, and windows in some layers.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.workers.models.decoder_config import DecoderConfig, llama_config


def decoder_config(hf_config: Mapping[str, Any]) -> DecoderConfig:
    config = llama_config(hf_config)
    attention = replace(config.attention, norm_eps=config.norm_eps)
    return replace(config, attention=attention, mlp_bias=False)
