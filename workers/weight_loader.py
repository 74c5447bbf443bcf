"""Read weights tensor by tensor, in the names and layout of transformers, from either format."""

from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.configs.errors import ModelFileError
from headrace.configs.model_files.gguf import GGUFFile, GGUFTensor
from headrace.configs.model_files.gguf_config import gguf_weights, hf_config_from_gguf
from headrace.configs.model_files.hf_config import normalize_hf_config
from headrace.configs.model_files.safetensors_index import (
    StoredTensor,
    corrupt_file,
    read_safetensors_index,
)
from headrace.configs.model_files.weight_layout import WeightSpec, weight_layout
from headrace.kernels.dequantize import StoredMatrix, dequantize
from headrace.kernels.quantize import dequantize_rows, quantize_rows
from headrace.workers.share import Share

Weight = tuple[str, Tensor | StoredMatrix]

# Buffers that older checkpoints saved beside the weights; they follow from the config.
_SAVED_BUFFERS = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")
_TIED_HEAD = "lm_head.weight"


def iter_weights(
    path: str | Path,
    hf_config: Mapping[str, Any],
    dtype: torch.dtype,
    as_stored: Container[str] = (),
    shares: Mapping[str, Share | None] | None = None,
) -> Iterator[Weight]:
    """Yield (name, CPU tensor in `dtype`) for every weight of the model at `path`.

    With `shares` only the weights in it, and of those no more than the share is read; None there
    means all of a weight.

    The matrices `as_stored` come as they are in the file instead: as `StoredMatrix` from GGUF, as
    tensors of their own dtype from safetensors.

    `path` is a `.gguf` file or a directory with safetensors; names and shapes are those of
    transformers (`model.layers.0.self_attn.q_proj.weight`, [out, in]). A tied head is not yielded.
    Order is that of the file, and one tensor is held at a time: copy or keep it. A tensor may be a
    view of the mapped file: do not write to it. Raises `ModelFileError`, naming the file and the
    tensor, before the first weight for all that the headers show.
    """
    path = Path(path)
    if path.is_dir():
        config = normalize_hf_config(hf_config, str(path))
        yield from _iter_safetensors(path, weight_layout(config), dtype, as_stored, shares)
    else:
        yield from _iter_gguf(path, dtype, as_stored, shares)


def stored_types(path: str | Path) -> dict[str, str]:
    """The element types of the matrices in the GGUF file `path`, by their names in transformers.

    Reads the header alone. Raises `ModelFileError` as `iter_weights` does.
    """
    with GGUFFile.open(path) as file:
        weights = gguf_weights(file, hf_config_from_gguf(file))
    return {spec.name: tensor.type_name for spec, tensor in weights if len(spec.shape) == 2}


def is_derived(name: str) -> bool:
    """Whether a checkpoint may have this tensor although the model needs none: a buffer that
    follows from the config, or a head that is the embedding.
    """
    return name == _TIED_HEAD or name.endswith(_SAVED_BUFFERS)


def rounded_to_int8(
    weights: Iterable[Weight], names: Container[str], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """`weights`, of which the matrices `names` go through 8 bits, with a scale per row.

    They come in `dtype`, with the values that a matrix packed in 8 bits has.
    """
    for name, weight in weights:
        if name not in names:
            assert isinstance(weight, Tensor)
            yield name, weight
            continue
        out = torch.empty(weight.shape, dtype=dtype)
        chunks = [(0, weight)] if isinstance(weight, Tensor) else weight.chunks(torch.float32)
        for start, rows in chunks:
            out[start : start + rows.shape[0]] = dequantize_rows(*quantize_rows(rows), dtype)
        yield name, out


def _iter_gguf(
    path: Path,
    dtype: torch.dtype,
    as_stored: Container[str],
    shares: Mapping[str, Share | None] | None,
) -> Iterator[Weight]:
    with GGUFFile.open(path) as file:
        for spec, tensor in gguf_weights(file, hf_config_from_gguf(file)):
            if shares is not None and spec.name not in shares:
                continue
            share = None if shares is None else shares[spec.name]
            if len(spec.shape) == 2:
                matrix, rest = _stored_matrix(file, spec, tensor, share)
                if spec.name in as_stored:
                    assert rest is None, spec.name
                    yield spec.name, matrix
                else:
                    weight = matrix.dequantized(dtype)
                    yield spec.name, weight if rest is None else rest.of(weight)
                continue
            # Norms lose their 1 in fp32, before rounding.
            read_dtype = torch.float32 if spec.transform == "minus_one" else dtype
            weight = dequantize(file.data(tensor), tensor.type_name, tensor.shape, read_dtype)
            weight = _to_transformers_layout(weight, spec).to(dtype)
            yield spec.name, weight if share is None else share.of(weight)


def _stored_matrix(
    file: GGUFFile, spec: WeightSpec, tensor: GGUFTensor, share: Share | None
) -> tuple[StoredMatrix, Share | None]:
    """The share of a matrix, or a larger part that can be had without computing, and its share."""
    num_rows, num_inputs = spec.shape
    rows = np.frombuffer(file.data(tensor), np.uint8).reshape(num_rows, -1)
    matrix, num_heads = StoredMatrix(tensor.type_name, (num_rows, num_inputs), rows), spec.num_heads
    if share is not None and share.is_whole_blocks(tensor.type_name):
        matrix = share.of_stored(matrix)
        num_heads = num_heads * matrix.shape[0] // num_rows  # whole heads
        share = None
    if spec.transform == "unpermute":
        matrix = matrix.unpermuted(num_heads)
    return matrix, share


def _to_transformers_layout(weight: Tensor, spec: WeightSpec) -> Tensor:
    if spec.transform == "minus_one":
        return weight.sub_(1.0)
    if spec.transform == "unpermute":
        # [heads, pair, first or second half] -> [heads, half, pair]
        return weight.view(spec.num_heads, -1, 2).transpose(1, 2).reshape(spec.shape)
    return weight


def _iter_safetensors(
    directory: Path,
    layout: Mapping[str, WeightSpec],
    dtype: torch.dtype,
    as_stored: Container[str],
    shares: Mapping[str, Share | None] | None,
) -> Iterator[tuple[str, Tensor]]:
    stored = read_safetensors_index(directory)
    names = _checked_names(directory, stored, layout)
    if shares is not None:
        names = [name for name in names if name in shares]
    files = dict.fromkeys(stored[name].file for name in names)  # in order, without repeats
    for path in files:
        try:
            with safe_open(path, framework="pt") as opened:
                for name in names:
                    if stored[name].file == path:
                        tensor = _read_share(opened, name, shares)
                        yield name, tensor if name in as_stored else tensor.to(dtype)
        except (SafetensorError, OSError) as error:
            raise corrupt_file(path, error) from error


def _read_share(opened: Any, name: str, shares: Mapping[str, Share | None] | None) -> Tensor:
    share = None if shares is None else shares[name]
    if share is None:
        whole: Tensor = opened.get_tensor(name)
        return whole
    part = slice(share.start, share.start + share.length)
    tensor = opened.get_slice(name)
    cut: Tensor = tensor[part] if share.axis == 0 else tensor[:, part]
    return cut


def _checked_names(
    directory: Path, stored: Mapping[str, StoredTensor], layout: Mapping[str, WeightSpec]
) -> list[str]:
    """The names to read, after comparing what is stored with what the model needs."""
    missing = sorted(set(layout) - set(stored))
    if missing:
        raise ModelFileError(
            f"{directory}: {len(missing)} of {len(layout)} weights are missing, the first is "
            f"{missing[0]}. Download the model again"
        )
    unknown = sorted(name for name in set(stored) - set(layout) if not is_derived(name))
    if unknown:
        raise ModelFileError(
            f"{directory}: {len(unknown)} tensors do not belong to the architecture in "
            f"config.json, the first is {unknown[0]}. Correct config.json or download the model "
            "again"
        )
    for name, spec in layout.items():
        if stored[name].shape != spec.shape:
            raise ModelFileError(
                f"{stored[name].file}: {name} has shape {list(stored[name].shape)}, but "
                f"config.json asks for {list(spec.shape)}. Download the model again"
            )
    return [name for name in stored if name in layout]
