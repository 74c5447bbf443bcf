"""New weights on a worker: beside those that serve, until they take their place or are dropped."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from headrace.configs.config import ModelConfig
from headrace.configs.errors import (
    InsufficientMemoryError,
    InvalidRequestError,
    WrongStateError,
)
from headrace.configs.hardware import cpu_facts
from headrace.configs.model_files.hf_config import normalize_hf_config
from headrace.configs.model_files.weight_layout import WeightSpec, weight_layout
from headrace.configs.quantization import INT8
from headrace.workers.models import Decoder, load_weights
from headrace.workers.weight_loader import Weight, is_derived, rounded_to_int8
from headrace.workers.weight_memory import weight_memory

Named = tuple[str, Tensor]
_MAX_NAMES_SHOWN = 5


class WeightUpdate:
    """A second set of weights in memory of its own.

    Whatever goes wrong with it, the model that serves is not touched. While it lasts, the worker
    holds both sets, or this one alone where the serving weights are not in memory (a sleeping
    engine's): that is the peak.
    """

    def __init__(
        self,
        config: ModelConfig,
        serving: Decoder | None,
        build: Callable[[str], Decoder],
        read: Callable[[Decoder, str], Iterable[Weight]],
    ) -> None:
        """`serving`: the model whose weights stand in for those that are not sent; None: all are.

        `build` makes a model without memory for the checkpoint at a path, `read` gives what its
        slots take of that.
        """
        self._config = config
        self._serving = serving
        self._build = build
        self._read = read
        self._model: Decoder | None = None
        self._missing: set[str] = set()  # names that are neither sent nor the serving model's
        self._layout: Mapping[str, WeightSpec] | None = None

    def load(self, path: str) -> None:
        """Take all weights from a checkpoint, in place of whatever was sent before.

        Raises ModelFileError for one of another architecture or size, InsufficientMemoryError.
        """
        self._model = None  # its memory goes first
        if self._config.quantization == "gguf" and not path.endswith(".gguf"):
            raise InvalidRequestError(
                f"{path} is no .gguf file, and the weights that serve are kept as in one: an "
                "update takes a .gguf file, too",
                "path",
            )
        model = self._allocated(path)
        with torch.inference_mode():
            load_weights(model, self._read(model, path), path)
        self._model, self._missing = model, set()

    def put(self, tensors: Iterable[Named]) -> None:
        """Take tensors in the names and shapes of the checkpoint; they may be reused afterwards.

        Raises InvalidRequestError for a name or shape that the architecture does not have.
        """
        if self._config.quantization == "gguf":
            raise InvalidRequestError(
                "the weights that serve are kept as in a .gguf file, and tensors have another "
                "form: name a .gguf file as the path of the update",
                "update_info",
            )
        model = self._model
        if model is None:
            self._model = model = self._begun()
        slots = model.weight_slots()
        with torch.inference_mode():
            for name, weight in self._as_loaded(model, self._own_parts(model, tensors)):
                slots[name].fill(weight)
                self._missing.discard(name)

    def finished(self) -> Decoder:
        """The model with all its weights. Raises WrongStateError if some were not sent."""
        if self._model is None:
            raise WrongStateError("the update has no weights: send some, or roll it back")
        if self._missing:
            names = sorted(self._missing)
            more = len(names) - _MAX_NAMES_SHOWN
            raise WrongStateError(
                f"{len(names)} weights were not sent, and those that served are gone: "
                f"{', '.join(names[:_MAX_NAMES_SHOWN])}{f' and {more} more' if more > 0 else ''}"
            )
        return self._model

    def _begun(self) -> Decoder:
        """A model to put tensors in; those that nobody sends are the serving ones'."""
        model = self._allocated(self._config.path)
        if self._serving is None:
            self._missing = set(model.weight_slots())
            return model
        pieces = zip(weight_memory(model), weight_memory(self._serving), strict=True)
        for new, old in pieces:
            new.copy_(old)
        return model

    def _allocated(self, path: str) -> Decoder:
        model, max_model_len = self._build(path), self._config.max_model_len
        need = model.num_weight_bytes + model.num_rotary_bytes(max_model_len)
        available = cpu_facts().memory_available
        if need > available:
            raise InsufficientMemoryError(
                f"new weights need {need / 2**20:.1f} MiB beside those that serve until they take "
                f"their place, but {available / 2**20:.1f} MiB of memory are available. Let the "
                "engine sleep at level 2 first, which gives the old weights' memory back"
            )
        model.allocate(max_model_len)
        return model

    def _own_parts(self, model: Decoder, tensors: Iterable[Named]) -> Iterator[Weight]:
        """What this worker has of each tensor; whole tensors are checked first."""
        if self._layout is None:
            config = normalize_hf_config(self._config.hf_config, self._config.path)
            self._layout = weight_layout(config)
        slots, shares = model.weight_slots(), model.shares
        for name, tensor in tensors:
            spec = self._layout.get(name)
            if spec is None and is_derived(name):
                continue
            if spec is None:
                raise InvalidRequestError(
                    f"{name} {list(tensor.shape)} is no weight of this architecture", "names"
                )
            if tuple(tensor.shape) != tuple(spec.shape):
                raise InvalidRequestError(
                    f"{name} has shape {list(tensor.shape)}, but the model's is {list(spec.shape)}",
                    "shapes",
                )
            if name in slots:
                share = shares.get(name)
                yield name, tensor if share is None else share.of(tensor)

    def _as_loaded(self, model: Decoder, weights: Iterable[Weight]) -> Iterable[Weight]:
        """In the types in which a checkpoint's weights come, so that they are rounded alike."""
        typed = (
            (name, weight if name in model.stored_matrices else _to(weight, model.dtype))
            for name, weight in weights
        )
        if self._config.quantization == INT8 and model.kernels is None:
            return rounded_to_int8(typed, model.stored_matrices, model.dtype)
        return typed


def _to(weight: Any, dtype: torch.dtype) -> Tensor:
    tensor: Tensor = weight.to(dtype)
    return tensor
