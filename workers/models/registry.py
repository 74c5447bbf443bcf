"""From an architecture's name to a model, and from checkpoint tensors to its weights."""

import importlib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from headrace.configs.errors import ModelFileError
from headrace.configs.model_files.hf_config import normalize_hf_config
from headrace.kernels.dequantize import StoredMatrix
from headrace.kernels.native import NativeKernels
from headrace.workers.distributed import ALONE, Communicator, Place
from headrace.workers.models.decoder import Decoder
from headrace.workers.models.native_decoder import NativeDecoder, obstacle
from headrace.workers.models.sharding import part_of
from headrace.workers.weight_formats import UNQUANTIZED, WeightFormats

# Architecture -> module of this package with `decoder_config(hf_config) -> DecoderConfig`.
MODELS: Mapping[str, str] = MappingProxyType(
    {
        "LlamaForCausalLM": "llama",
        "MistralForCausalLM": "mistral",
        "Qwen2ForCausalLM": "qwen2",
        "Qwen3ForCausalLM": "qwen3",
        "Gemma3ForCausalLM": "gemma3",
    }
)

_MAX_NAMES_SHOWN = 5
FIRST = Place()


def build_model(
    architecture: str,
    hf_config: Mapping[str, Any],
    dtype: torch.dtype,
    source: str,
    kernels: NativeKernels | None = None,
    formats: WeightFormats = UNQUANTIZED,
    place: Place = FIRST,
    partition: Sequence[int] | None = None,
    shards: Communicator = ALONE,
) -> Decoder:
    """The part of a model for the worker at `place`, without memory for its weights.

    `source` names the model in errors. `partition`: layers of each stage, if they are not to be as
    even as can be.

    It runs on `kernels` if these can do all it needs, and on the torch references otherwise.
    `hf_config` may be spelled as any version of transformers does. Raises `ModelFileError` for what
    is not supported.
    """
    if architecture not in MODELS:
        raise ModelFileError(
            f"{source}: not supported: architecture {architecture}; supported: {', '.join(MODELS)}"
        )
    config = normalize_hf_config({**hf_config, "architectures": [architecture]}, source)
    module = importlib.import_module(f"headrace.workers.models.{MODELS[architecture]}")
    try:
        decoder_config = module.decoder_config(config)
        part = part_of(decoder_config, place, partition)
        if kernels is not None and obstacle(part.config, dtype) is None:
            return NativeDecoder(decoder_config, dtype, kernels, formats, part, shards)
        return Decoder(decoder_config, dtype, formats, part, shards)
    except ModelFileError as error:
        raise ModelFileError(f"{source}: {error}") from error


def load_weights(
    model: Decoder, weights: Iterable[tuple[str, torch.Tensor | StoredMatrix]], source: str
) -> None:
    """Copy every checkpoint tensor to its place. The model must have its memory (`allocate`).

    Raises `ModelFileError`, naming the tensor, for one that is missing, unexpected, repeated or of
    another shape.
    """
    slots = model.weight_slots()
    missing = dict.fromkeys(slots)
    for name, tensor in weights:
        if _is_ignored(name, model):
            continue
        slot = slots.get(name)
        if slot is None:
            raise ModelFileError(
                f"{source}: unexpected tensor {name} {list(tensor.shape)}: "
                "the weights do not belong to this config"
            )
        if name not in missing:
            raise ModelFileError(f"{source}: tensor {name} comes twice")
        if tuple(tensor.shape) != slot.shape:
            raise ModelFileError(
                f"{source}: tensor {name} has shape {list(tensor.shape)}, "
                f"but the config asks for {list(slot.shape)}"
            )
        slot.fill(tensor)
        del missing[name]
    if missing:
        shown = ", ".join(list(missing)[:_MAX_NAMES_SHOWN])
        rest = len(missing) - _MAX_NAMES_SHOWN
        more = f" and {rest} more" if rest > 0 else ""
        raise ModelFileError(
            f"{source}: {len(missing)} of {len(slots)} tensors are missing: {shown}{more}. "
            "The file is incomplete: download it again"
        )


def _is_ignored(name: str, model: Decoder) -> bool:
    """Tensors that old checkpoints carry although they follow from others."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and model.head is None)
