"""Model definitions: a file per family, which says only how it differs from the decoder."""

from headrace.workers.models.decoder import Decoder, StepAttention, StepPlanner
from headrace.workers.models.decoder_config import DecoderConfig, LayerConfig
from headrace.workers.models.registry import build_model, load_weights

__all__ = [
    "Decoder",
    "DecoderConfig",
    "LayerConfig",
    "StepAttention",
    "StepPlanner",
    "build_model",
    "load_weights",
]
