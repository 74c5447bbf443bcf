"""From the options of sleep and of weight updates to their configuration."""

from pathlib import Path
from typing import Any, cast

from headrace.configs.config import SleepConfig, WeightTransferBackend, WeightTransferConfig
from headrace.configs.errors import ConfigurationError, UnsupportedFeatureError

_BACKENDS = ("gloo", "shm")
# Names that the API knows. All of them move tensors between GPUs.
_GPU_BACKENDS = ("nccl", "ipc", "sparse_nccl", "nccl_m2n", "sharded_rdt", "modelexpress")


def resolve_weight_transfer(
    update_root: str | None, given: dict[str, Any] | None
) -> WeightTransferConfig:
    """Raises ConfigurationError or UnsupportedFeatureError for what cannot work."""
    root = None if update_root is None else _folder(update_root, "weight_update_root")
    if given is None:
        return WeightTransferConfig(root)
    options = dict(given)
    backend = options.pop("backend", "gloo")
    if options:
        raise ConfigurationError(
            f"weight_transfer_config has {', '.join(map(repr, options))}; it knows backend only"
        )
    if backend in _GPU_BACKENDS:
        raise UnsupportedFeatureError(
            f"the weight transfer backend {backend} moves tensors between GPUs, and this engine "
            f"runs on CPUs: choose one of {', '.join(_BACKENDS)}",
            "weight_transfer_config",
        )
    if backend not in _BACKENDS:
        raise ConfigurationError(
            f"weight_transfer_config: the backend must be one of {', '.join(_BACKENDS)}, got "
            f"{backend!r}"
        )
    return WeightTransferConfig(root, cast(WeightTransferBackend, backend))


def resolve_sleep(is_enabled: bool, spill_dir: str | None) -> SleepConfig:
    """Raises ConfigurationError for a folder that is not there."""
    if spill_dir is None:
        return SleepConfig(is_enabled)
    return SleepConfig(is_enabled, _folder(spill_dir, "sleep_spill_dir"))


def _folder(name: str, option: str) -> str:
    path = Path(name).expanduser()
    try:
        resolved = path.resolve(strict=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"{option} {name!r} cannot be used: {error}") from error
    if not resolved.is_dir():
        raise ConfigurationError(f"{option} {name!r} is no folder")
    return str(resolved)
