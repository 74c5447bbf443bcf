"""What a worker does with its memory between steps: weights that are replaced, dropped, taken back.

The engine core calls these methods on all workers at once, while no step is in flight. It decides
when: a worker only keeps its own part right.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch

from headrace.configs.config import EngineConfig
from headrace.configs.errors import InvalidRequestError, ModelFileError, WrongStateError
from headrace.configs.model_files.weight_source import FileStamp, stamps_of
from headrace.workers.distributed.groups import WorkerGroups
from headrace.workers.distributed.weight_group import TRAINER_RANK, WeightGroup
from headrace.workers.kv_cache import KVCache
from headrace.workers.model_runner import ModelRunner
from headrace.workers.models import Decoder, load_weights
from headrace.workers.shared_tensors import shared_tensors
from headrace.workers.weight_loader import Weight
from headrace.workers.weight_memory import SpilledWeights, discard_weights
from headrace.workers.weight_update import WeightUpdate

# Where a model's weights are. "readable": a checkpoint has them; "discarded": nobody has.
WeightsState = Literal["loaded", "readable", "spilled", "discarded"]
_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


class LiveWeights:
    """Mixed into the worker, which has made a model, a KV cache and a runner by then."""

    config: EngineConfig
    _groups: WorkerGroups
    _model: Decoder | None
    _kv_cache: KVCache | None
    _runner: ModelRunner | None
    _weights_state: WeightsState = "loaded"
    _spilled: SpilledWeights | None = None
    _update: WeightUpdate | None = None
    _prepared: Decoder | None = None
    _weight_group: WeightGroup | None = None
    _source_path: str | None = None  # of the checkpoint that has the serving weights
    _source_stamps: Sequence[FileStamp] = ()
    _build_model: Callable[[str], Decoder]
    _read_weights: Callable[[Decoder, str], Iterable[Weight]]

    # -- updates ------------------------------------------------------------------------------

    def join_weight_group(
        self, address: str, port: int, rank_offset: int, world_size: int, timeout_s: float
    ) -> None:
        """Meet a trainer, which has rank 0; this worker's rank is its own behind `rank_offset`."""
        if self._weight_group is not None:
            raise WrongStateError("the worker is in a group already: leave that one first")
        rank = rank_offset + self._groups.place.rank
        if rank <= TRAINER_RANK or rank >= world_size:
            raise InvalidRequestError(
                f"rank {rank} is not in [1, {world_size - 1}], the workers' ranks in a group of "
                f"{world_size}; rank_offset is {rank_offset}",
                "init_info",
            )
        self._weight_group = WeightGroup(address, port, rank, world_size, timeout_s)

    def leave_weight_group(self) -> None:
        """End that. Idempotent."""
        group, self._weight_group = self._weight_group, None
        if group is not None:
            group.close()

    def begin_weight_update(self) -> None:
        """Begin a second set of weights; it takes memory when the first of them come."""
        serving = self._loaded_model() if self._weights_state == "loaded" else None
        self._prepared = None
        self._update = WeightUpdate(
            self.config.model_config, serving, self._build_model, self._read_weights
        )

    def put_weights_of_path(self, path: str) -> None:
        """All weights, from a checkpoint."""
        self._running_update().load(path)

    def put_weights_in_memory(
        self, path: str, names: list[str], dtype_names: list[str], shapes: list[list[int]]
    ) -> None:
        """Some weights, from memory that another process shares; see `shared_tensors`."""
        update = self._running_update()
        update.put(shared_tensors(path, names, _dtypes(dtype_names), shapes))

    def put_weights_of_group(
        self, names: list[str], dtype_names: list[str], shapes: list[list[int]]
    ) -> None:
        """Some weights, which the trainer broadcasts in this order."""
        update, dtypes = self._running_update(), _dtypes(dtype_names)
        if self._weight_group is None:
            raise WrongStateError("there is no group with a trainer: init_weight_transfer_engine")
        tensors = self._weight_group.receive(names, dtypes, shapes)
        try:
            update.put(tensors)
        finally:
            for _ in tensors:  # what is wrong with one must not leave the others waiting
                pass

    def prepare_weights(self) -> None:
        """Everything that can fail, so that `commit_weights` cannot."""
        self._prepared = self._running_update().finished()

    def commit_weights(self, path: str | None) -> None:
        """Serve the new weights; the old ones' memory is free. `path`: the checkpoint with them."""
        model, runner = self._prepared, self._runner
        if model is None or runner is None:
            raise WrongStateError("prepare_weights comes before commit_weights")
        self._update = self._prepared = None
        self._drop_spilled()
        runner.replace_model(model)
        self._model = model
        self._weights_state = "loaded"
        self.note_weight_source(path)

    def rollback_weights(self) -> None:
        """Drop the new weights, whatever there is of them. Idempotent; nothing else changes."""
        self._update = self._prepared = None

    def note_weight_source(self, path: str | None) -> None:
        """Remember which checkpoint has the serving weights, if any; one that is gone has not."""
        self._source_path, self._source_stamps = path, ()
        if path is None or self._is_random(path):
            return
        try:
            self._source_stamps = stamps_of(path)
        except ModelFileError:
            self._source_path = None

    # -- sleep --------------------------------------------------------------------------------

    def release_weights(self, level: int, may_read_again: bool) -> int:
        """Give the weights' memory back; returns the bytes.

        At level 1 they are read again from their checkpoint, or kept in a file if that has changed
        or `may_read_again` is not so: somebody may have changed them in memory. At level 2 they are
        lost. Not below 1.
        """
        model = self._loaded_model()
        if self._weights_state != "loaded":
            return 0
        if level > 1:
            self._weights_state = "discarded"
        elif may_read_again and self._has_source():
            self._weights_state = "readable"
        else:
            self._spilled = SpilledWeights(model, self.config.sleep_config.spill_dir)
            self._weights_state = "spilled"
        return discard_weights(model)

    def restore_weights(self) -> bool:
        """Bring the weights back. False if they were discarded, and have to be loaded.

        Raises ModelFileError if their checkpoint has changed meanwhile.
        """
        if self._weights_state == "spilled":
            assert self._spilled is not None
            self._spilled.restore(self._loaded_model())
            self._spilled = None
            self._weights_state = "loaded"
        elif self._weights_state == "readable":
            self._read_again()
        return self._weights_state == "loaded"

    def reload_weights(self) -> None:
        """Read the weights again from the checkpoint that has them, whatever the memory holds."""
        if self._source_path is None:
            raise WrongStateError(
                "no file has the weights of this version, which came as tensors: send weights"
            )
        self._read_again()
        self._drop_spilled()

    def release_kv_cache(self) -> int:
        """Give the cache's memory back; returns the bytes. What it held is lost."""
        return 0 if self._kv_cache is None else self._kv_cache.release()

    def restore_kv_cache(self) -> None:
        """Take memory for the cache again."""
        if self._kv_cache is not None:
            self._kv_cache.restore()

    def _read_again(self) -> None:
        model, path = self._loaded_model(), self._source_path
        assert path is not None
        self._check_source()
        self._weights_state = "discarded" if self._weights_state == "discarded" else "readable"
        with torch.inference_mode():
            load_weights(model, self._read_weights(model, path), path)
        self._check_source()
        self._weights_state = "loaded"

    def _check_source(self) -> None:
        if not self._has_source():
            raise ModelFileError(
                f"{self._source_path} has changed since its weights were loaded: update the "
                "weights, under a version of their own"
            )

    def _has_source(self) -> bool:
        """Whether a checkpoint has the serving weights, as far as can be seen without reading."""
        path = self._source_path
        if path is None:
            return False
        try:
            return self._is_random(path) or stamps_of(path) == self._source_stamps
        except ModelFileError:
            return False

    def _is_random(self, path: str) -> bool:
        """Whether the engine makes its first weights up; they are the same every time."""
        config = self.config
        return config.load_config.load_format == "dummy" and path == config.model_config.path

    def _loaded_model(self) -> Decoder:
        if self._model is None:
            raise WrongStateError("the worker has no model yet")
        return self._model

    def _running_update(self) -> WeightUpdate:
        if self._update is None:
            raise WrongStateError("no update was started on this worker")
        return self._update

    def _drop_spilled(self) -> None:
        spilled, self._spilled = self._spilled, None
        if spilled is not None:
            spilled.close()


def _dtypes(names: Sequence[str]) -> list[torch.dtype]:
    """By name, with or without `torch.` in front. Raises InvalidRequestError."""
    dtypes = []
    for name in names:
        dtype = _DTYPES.get(name.removeprefix("torch."))
        if dtype is None:
            raise InvalidRequestError(
                f"dtype {name!r} is none of {', '.join(_DTYPES)}", "dtype_names"
            )
        dtypes.append(dtype)
    return dtypes
