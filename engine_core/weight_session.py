"""A weight update as a transaction on all workers: begin, take, commit or roll back."""

import logging
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from headrace.configs.config import EngineConfig
from headrace.configs.errors import (
    HeadraceError,
    InvalidRequestError,
    ModelFileError,
    UnsupportedFeatureError,
    WrongStateError,
)
from headrace.configs.model_files.weight_source import WeightSource, path_below, read_source

logger = logging.getLogger(__name__)

GROUP_TIMEOUT_S = 300.0  # for a trainer to come, and for each tensor that it sends
MAX_VERSION_CHARS = 256
_TENSOR_FIELDS = ("names", "dtype_names", "shapes")
_GPU_FIELDS = ("nccl_unique_id_b64", "ipc_handles", "ipc_handles_pickled", "num_updates_list")


class WeightSession:
    """What is known of the weights: those that serve, and those that are coming."""

    def __init__(self, config: EngineConfig, call_workers: Callable[..., list[Any]]) -> None:
        self.version = config.model_config.weight_version
        self.source: WeightSource | None = None  # checkpoint with new weights that serve
        self.has_new_weights = False  # others than the configured ones serve
        self.is_open = False
        self._config = config.weight_transfer_config
        self._parallel = config.parallel_config
        self._call_workers = call_workers
        self._has_joined = False
        self._coming: WeightSource | None = None
        self._has_tensors = False

    def join(self, init_info: Mapping[str, Any]) -> None:
        """Meet the trainer. Raises WrongStateError, InvalidRequestError."""
        backend = self._backend()
        if self._has_joined:
            raise WrongStateError("the weight transfer is set up already: shut it down first")
        _check_fields(init_info)
        if backend == "gloo":
            self._join_group(init_info)
        self._has_joined = True

    def _join_group(self, init_info: Mapping[str, Any]) -> None:
        address, port = init_info.get("master_address"), init_info.get("master_port")
        offset = init_info.get("rank_offset", 1)
        size = self._parallel.world_size
        num_workers = size * self._parallel.data_parallel_size
        world_size = init_info.get("world_size", offset + num_workers)
        if not isinstance(address, str) or not address:
            raise InvalidRequestError("init_info needs master_address, a host", "init_info")
        if type(port) is not int or not 0 < port < 65536:
            raise InvalidRequestError("init_info needs master_port, in [1, 65535]", "init_info")
        if type(offset) is not int or type(world_size) is not int:
            raise InvalidRequestError("rank_offset and world_size must be ints", "init_info")
        try:
            # Replicas are told the same, and are one behind the other in the group.
            first = offset + self._parallel.data_parallel_rank * size
            self._call_workers(
                "join_weight_group", address, port, first, world_size, GROUP_TIMEOUT_S
            )
        except HeadraceError:
            self._call_workers("leave_weight_group")
            raise

    def leave(self) -> None:
        """Idempotent. Raises WrongStateError during an update."""
        if self.is_open:
            raise WrongStateError("a weight update is going on: finish it, or roll it back")
        if self._has_joined:
            self._has_joined = False
            self._call_workers("leave_weight_group")

    def begin(self) -> None:
        """Raises WrongStateError if an update is going on."""
        if self._config.backend is None and self._config.update_root is None:
            raise WrongStateError(
                "the engine takes no new weights: start it with --weight-update-root FOLDER or "
                "--weight-transfer-config"
            )
        if self.is_open:
            raise WrongStateError("a weight update was started already: finish it first")
        self._call_workers("begin_weight_update")
        self.is_open, self._coming, self._has_tensors = True, None, False

    def take(self, update_info: Mapping[str, Any]) -> None:
        """Some of the new weights. Whatever is wrong, the update is rolled back."""
        self._check_open()
        try:
            self._take(update_info)
        except BaseException:
            self.roll_back()
            raise

    def _take(self, info: Mapping[str, Any]) -> None:
        if isinstance(info, list):
            raise UnsupportedFeatureError(
                "update_info is one object for all workers here: each takes its own share",
                "update_info",
            )
        if not isinstance(info, dict):
            raise InvalidRequestError("update_info must be an object", "update_info")
        _check_fields(info)
        if "path" in info:
            self._take_path(info)
            return
        names, dtypes, shapes = (info.get(field) for field in _TENSOR_FIELDS)
        _check_tensors(names, dtypes, shapes)
        if self._backend() == "shm":
            memory = info.get("memory")
            if not isinstance(memory, str):
                raise InvalidRequestError(
                    "update_info needs memory, the path of what holds the tensors", "update_info"
                )
            self._call_workers("put_weights_in_memory", memory, names, dtypes, shapes)
        elif not self._has_joined:
            raise WrongStateError("there is no trainer: init_weight_transfer_engine comes first")
        else:
            self._call_workers("put_weights_of_group", names, dtypes, shapes)
        self._has_tensors = True

    def _take_path(self, info: Mapping[str, Any]) -> None:
        given, digest = info["path"], info.get("digest")
        if not isinstance(given, str):
            raise InvalidRequestError("path must be a string", "path")
        source = read_source(path_below(self._config.update_root, given))
        if digest is not None and digest != source.digest:
            raise InvalidRequestError(
                f"{source.path} has the digest {source.digest}, not {digest!r}", "digest"
            )
        self._call_workers("put_weights_of_path", source.path)
        source.check_untouched()
        self._coming, self._has_tensors = source, False

    def check_version(self, version: str | None) -> None:
        """Whether an update may be finished under that name."""
        self._check_open()
        if version is None:
            return
        _check_name(version)
        if version == self.version:
            raise InvalidRequestError(
                f"the weights that serve are called {version!r}: call the new ones otherwise",
                "weight_version",
            )

    def commit(self, version: str | None) -> None:
        """The new weights serve, on all workers or, after an exception, on none.

        `version` None: named after the checkpoint's digest, or a name that is like no other.
        """
        self.check_version(version)
        self._commit(version)

    def _commit(self, version: str | None) -> None:
        source = None if self._has_tensors else self._coming
        try:
            if source is not None:
                source.check_untouched()
            self._call_workers("prepare_weights")
        except BaseException:
            self.roll_back()
            raise
        self._call_workers("commit_weights", None if source is None else source.path)
        self.is_open, self._coming = False, None
        self.source, self.has_new_weights = source, True
        self.version = version or _name_of(source)
        if source is not None:
            logger.info("weights %s serve: %s", self.version, source.path)
        else:
            logger.info("weights %s serve", self.version)

    def roll_back(self) -> None:
        """Raises WrongStateError if no update is going on."""
        self._check_open()
        self.is_open, self._coming = False, None
        self._call_workers("rollback_weights")

    def restore(self, source: WeightSource | None, version: str) -> None:
        """Have the weights of an engine core before serve, if a checkpoint has them still.

        Nothing serves yet, so the memory of the first weights goes first; they are back after an
        exception.
        """
        if source is None:
            raise ModelFileError("they were sent, and no file has them")
        found = read_source(source.path)
        if found.digest != source.digest:
            raise ModelFileError(f"{source.path} holds other weights by now")
        self._call_workers("release_weights", 2, False)
        try:
            self._call_workers("begin_weight_update")
            self.is_open, self._coming, self._has_tensors = True, found, False
            self._call_workers("put_weights_of_path", found.path)
            self._commit(version)
        except HeadraceError:
            if self.is_open:
                self.roll_back()
            self._call_workers("reload_weights")
            raise

    def rename(self, version: str) -> None:
        """Call the serving weights otherwise."""
        _check_name(version)
        self.version = version

    def _backend(self) -> str:
        if self._config.backend is None:
            raise WrongStateError(
                "the engine takes no tensors: start it with --weight-transfer-config "
                '\'{"backend": "gloo"}\' or "shm"'
            )
        return self._config.backend

    def _check_open(self) -> None:
        if not self.is_open:
            raise WrongStateError("no weight update was started")


def _name_of(source: WeightSource | None) -> str:
    return uuid.uuid4().hex[:16] if source is None else source.digest[:16]


def _check_name(version: object) -> None:
    if not isinstance(version, str) or not 0 < len(version) <= MAX_VERSION_CHARS:
        raise InvalidRequestError(
            f"a weight version is a name of 1 to {MAX_VERSION_CHARS} characters", "weight_version"
        )


def _check_fields(info: Mapping[str, Any]) -> None:
    """Refuse, by name, what only GPUs can do."""
    for field in _GPU_FIELDS:
        if info.get(field) is not None:
            raise UnsupportedFeatureError(f"{field} is for GPUs; leave it out", field)
    if info.get("packed"):
        raise UnsupportedFeatureError("packed tensors are not taken: send each alone", "packed")


def _check_tensors(names: object, dtypes: object, shapes: object) -> None:
    lists = (names, dtypes, shapes)
    if not all(isinstance(items, list) for items in lists):
        raise InvalidRequestError(
            f"update_info needs path, or the lists {', '.join(_TENSOR_FIELDS)}", "update_info"
        )
    assert isinstance(names, list) and isinstance(dtypes, list) and isinstance(shapes, list)
    if not len(names) == len(dtypes) == len(shapes) > 0:
        raise InvalidRequestError(
            f"names, dtype_names and shapes have {len(names)}, {len(dtypes)} and {len(shapes)} "
            "entries: they must be as many, and not none",
            "update_info",
        )
    are_names = all(isinstance(name, str) for name in (*names, *dtypes))
    are_shapes = all(
        isinstance(shape, list) and all(type(size) is int and size > 0 for size in shape)
        for shape in shapes
    )
    if not (are_names and are_shapes):
        raise InvalidRequestError(
            "names and dtype_names are strings, shapes lists of positive ints", "update_info"
        )
