"""From the options of several workers to a `ParallelConfig`."""

import importlib.util
import sys
from typing import Any, Literal, cast

from headrace.configs.config import ParallelConfig
from headrace.configs.engine_options.parallel import ParallelOptions
from headrace.configs.errors import ConfigurationError, UnsupportedFeatureError

_BACKENDS = ("uni", "mp", "ray", "external_launcher")


def resolve_parallel(options: ParallelOptions, seed: int | None = None) -> ParallelConfig:
    """Raises ConfigurationError for values that contradict each other."""
    stages = options.pipeline_parallel_size
    ranks = resolve_ranks(options)
    group, address = _surrounding_ray()
    backend = _backend(options, group is not None)
    config = ParallelConfig(
        data_parallel_size=options.data_parallel_size,
        data_parallel_size_local=len(ranks),
        data_parallel_start_rank=ranks.start,
        data_parallel_rank=ranks.start,
        data_parallel_backend=cast(Literal["mp", "ray"], options.data_parallel_backend),
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=stages,
        pp_layer_partition=_partition(options.pp_layer_partition, stages),
        worker_cls="" if options.worker_cls == "auto" else options.worker_cls,
        worker_extension_cls=options.worker_extension_cls,
        distributed_executor_backend=backend,
        ray_address=address if "ray" in (backend, options.data_parallel_backend) else None,
        placement_group=group if backend == "ray" else None,
        nnodes=options.nnodes,
        node_rank=options.node_rank,
        master_addr=options.master_addr,
        master_port=options.master_port,
        cluster_key_file=options.cluster_key_file or "",
    )
    if config.worker_cls and "." not in config.worker_cls:
        raise ConfigurationError(
            f"worker_cls must name a class as module.Class, got {config.worker_cls!r}"
        )
    _check_nodes(config)
    if options.data_parallel_backend == "ray":
        _check_replicas_of_ray(config)
        _check_ray("data_parallel_backend")
    if backend == "ray":
        _check_ray("distributed_executor_backend")
    if backend == "external_launcher" and seed is None:
        raise ConfigurationError(
            "distributed_executor_backend external_launcher needs a seed, the same in every "
            "process, so that all of them sample alike: give --seed (in Python, seed=0)"
        )
    return config


def runs_in_core(options: ParallelOptions) -> bool:
    """Whether the worker will be in the engine core's process, as far as the options say.

    It can import torch then before the configuration is resolved.
    """
    num_workers = options.tensor_parallel_size * options.pipeline_parallel_size
    return (
        num_workers == 1
        and options.distributed_executor_backend in (None, "uni")
        and options.data_parallel_backend != "ray"
    )


def resolve_ranks(options: ParallelOptions) -> range:
    """The ranks of the replicas that this engine runs. Raises ConfigurationError.

    External: one, behind a load balancer over all. Hybrid: some, behind one over the servers. Else
    internal: all of them. Replicas of dense models know nothing of each other, so that the modes
    differ in nothing else.
    """
    size, rank = options.data_parallel_size, options.data_parallel_rank
    local, start = options.data_parallel_size_local, options.data_parallel_start_rank
    is_external = options.data_parallel_external_lb or rank is not None
    is_hybrid = options.data_parallel_hybrid_lb or start is not None
    if is_external and is_hybrid:
        raise ConfigurationError(
            "data_parallel_rank and data_parallel_external_lb (external mode) exclude "
            "data_parallel_start_rank and data_parallel_hybrid_lb (hybrid mode)"
        )
    if local == 0:
        raise UnsupportedFeatureError(
            "--data-parallel-size-local 0, a server without replicas, is not implemented yet; "
            "every server runs at least one",
            "data_parallel_size_local",
        )
    if is_external:
        if rank is None:
            raise ConfigurationError("data_parallel_external_lb needs data_parallel_rank")
        if local not in (None, 1):
            raise ConfigurationError(
                f"external mode runs one replica, but data_parallel_size_local is {local}; leave "
                "it out, or give data_parallel_start_rank for hybrid mode"
            )
        return _within(range(rank, rank + 1), size, "data_parallel_rank")
    if is_hybrid:
        if local is None:
            raise ConfigurationError("hybrid mode needs data_parallel_size_local")
        first = start or 0
        return _within(range(first, first + local), size, "data_parallel_start_rank")
    if local is not None and local > size:
        raise ConfigurationError(
            f"data_parallel_size_local {local} is above data_parallel_size {size}"
        )
    if local is not None and local < size:
        raise UnsupportedFeatureError(
            f"--data-parallel-size-local {local} of {size}: replicas on other machines behind this "
            "server are not implemented yet; with data_parallel_start_rank each server spreads "
            "requests over its own (hybrid mode)",
            "data_parallel_size_local",
        )
    return range(size)


def _within(ranks: range, size: int, name: str) -> range:
    if ranks.stop > size:
        raise ConfigurationError(
            f"{name} {ranks.start} and {len(ranks)} replicas here need ranks up to "
            f"{ranks.stop - 1}, but data_parallel_size {size} has ranks 0 to {size - 1}"
        )
    return ranks


def _backend(options: ParallelOptions, is_in_placement_group: bool) -> str:
    backend = options.distributed_executor_backend
    is_in_placement_group &= options.data_parallel_backend != "ray"
    world_size = options.tensor_parallel_size * options.pipeline_parallel_size
    if isinstance(backend, type):
        return f"{backend.__module__}.{backend.__qualname__}"
    if backend is None:
        if world_size == 1:
            return "uni"
        return "ray" if is_in_placement_group and options.nnodes == 1 else "mp"
    if backend not in _BACKENDS and "." not in backend:
        raise ConfigurationError(
            f"distributed_executor_backend {backend!r} is none of {', '.join(_BACKENDS)} and no "
            "module.Class"
        )
    if backend == "uni" and world_size > 1:
        raise ConfigurationError(
            f"distributed_executor_backend uni runs one worker, but tensor_parallel_size "
            f"{options.tensor_parallel_size} and pipeline_parallel_size "
            f"{options.pipeline_parallel_size} need {world_size}; leave it out, or choose mp"
        )
    return backend


def _surrounding_ray() -> tuple[str | None, str | None]:
    """The placement group (its id) that this process runs in, and the address of its Ray.

    Ray is neither imported nor connected to for that.
    """
    ray: Any = sys.modules.get("ray")
    if ray is None or not hasattr(ray, "is_initialized") or not ray.is_initialized():
        return None, None
    group = ray.util.get_current_placement_group()
    address = ray.get_runtime_context().gcs_address
    return None if group is None else group.id.hex(), address


def _check_ray(name: str) -> None:
    if "ray" not in sys.modules and importlib.util.find_spec("ray") is None:
        raise ConfigurationError(
            f"{name} ray needs Ray, which is not installed: pip install 'headrace[ray]', or "
            "choose mp"
        )


def _check_replicas_of_ray(config: ParallelConfig) -> None:
    if config.nnodes > 1:
        raise ConfigurationError(
            f"data_parallel_backend ray places whole replicas on the nodes of a Ray cluster; leave "
            f"nnodes {config.nnodes} out"
        )
    if config.distributed_executor_backend in ("ray", "external_launcher"):
        raise UnsupportedFeatureError(
            "--data-parallel-backend ray with --distributed-executor-backend "
            f"{config.distributed_executor_backend} is not implemented yet: the workers of a "
            "replica are processes of its node; leave distributed_executor_backend out",
            "data_parallel_backend",
        )


def _check_nodes(config: ParallelConfig) -> None:
    if config.node_rank >= config.nnodes:
        raise ConfigurationError(
            f"node_rank {config.node_rank} does not go with nnodes {config.nnodes}: machines are "
            f"numbered 0 to {config.nnodes - 1}"
        )
    if config.nnodes == 1:
        return
    if config.distributed_executor_backend != "mp":
        raise ConfigurationError(
            f"nnodes {config.nnodes} is for distributed_executor_backend mp, not "
            f"{config.distributed_executor_backend}: Ray and torchrun know their machines "
            "themselves; leave nnodes out"
        )
    if config.world_size % config.nnodes:
        raise ConfigurationError(
            f"{config.world_size} workers (tensor_parallel_size {config.tensor_parallel_size} x "
            f"pipeline_parallel_size {config.pipeline_parallel_size}) cannot be divided among "
            f"nnodes {config.nnodes}"
        )
    if not config.cluster_key_file:
        raise ConfigurationError(
            f"nnodes {config.nnodes} needs a cluster_key_file, the same on every machine: "
            "`headrace doctor --make-key FILE` makes one"
        )


def _partition(text: str | None, num_stages: int) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        counts = tuple(int(word) for word in text.split(","))
    except ValueError:
        counts = ()
    if len(counts) != num_stages or min(counts, default=0) < 1:
        raise ConfigurationError(
            f"pp_layer_partition must give each of the {num_stages} stages a number of layers, as "
            f"in {','.join(['8'] * num_stages)}, got {text!r}"
        )
    return counts
