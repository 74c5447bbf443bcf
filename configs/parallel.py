"""From the options of several workers to a `ParallelConfig`."""

from headrace.configs.config import ParallelConfig
from headrace.configs.engine_options.parallel import ParallelOptions
from headrace.configs.errors import ConfigurationError, UnsupportedFeatureError

_BACKENDS = ("uni", "mp")
_LATER = ("ray", "external_launcher")


def resolve_parallel(options: ParallelOptions) -> ParallelConfig:
    """Raises ConfigurationError for values that contradict each other."""
    stages = options.pipeline_parallel_size
    config = ParallelConfig(
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=stages,
        pp_layer_partition=_partition(options.pp_layer_partition, stages),
        worker_cls="" if options.worker_cls == "auto" else options.worker_cls,
        worker_extension_cls=options.worker_extension_cls,
        distributed_executor_backend=_backend(options),
    )
    if config.worker_cls and "." not in config.worker_cls:
        raise ConfigurationError(
            f"worker_cls must name a class as module.Class, got {config.worker_cls!r}"
        )
    return config


def _backend(options: ParallelOptions) -> str:
    backend = options.distributed_executor_backend
    world_size = options.tensor_parallel_size * options.pipeline_parallel_size
    if isinstance(backend, type):
        return f"{backend.__module__}.{backend.__qualname__}"
    if backend is None:
        return "uni" if world_size == 1 else "mp"
    if backend in _LATER:
        raise UnsupportedFeatureError(
            f"--distributed-executor-backend {backend} is not implemented yet; choose one of "
            f"{', '.join(_BACKENDS)}",
            "distributed_executor_backend",
        )
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
