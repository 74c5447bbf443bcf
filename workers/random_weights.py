"""Random weights of the right shapes, for measuring speed without a checkpoint."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.configs.model_files.hf_config import normalize_hf_config
from headrace.configs.model_files.weight_layout import WeightSpec, weight_layout
from headrace.workers.share import Share

_STD = 0.02  # what checkpoints are initialized with: logits stay finite at any depth


def random_weights(
    path: str | Path,
    hf_config: Mapping[str, Any],
    dtype: torch.dtype,
    shares: Mapping[str, Share | None] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, CPU tensor in `dtype`) for every weight of a model, the same at every call.

    Names and shapes are those of `iter_weights`. Matrices are normal, norms scale by one, biases
    are zero. `path` only names the model in messages. `shares`: as of `iter_weights`.
    """
    generator = torch.Generator().manual_seed(0)
    layout = weight_layout(normalize_hf_config(hf_config, str(path)))
    for name, spec in layout.items():
        weight = _random_weight(spec, dtype, generator)  # whatever is wanted: one sequence
        if shares is None:
            yield name, weight
        elif name in shares:
            share = shares[name]
            yield name, weight if share is None else share.of(weight)


def _random_weight(spec: WeightSpec, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if len(spec.shape) > 1:
        return torch.empty(spec.shape).normal_(0.0, _STD, generator=generator).to(dtype)
    is_scale = spec.name.endswith(".weight") and spec.transform != "minus_one"
    return torch.full(spec.shape, 1.0 if is_scale else 0.0, dtype=dtype)
