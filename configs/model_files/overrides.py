"""Changes that the user makes to a model's `config.json`."""

from collections.abc import Callable, Mapping
from typing import Any

from headrace.configs.errors import ConfigurationError

HfOverrides = Mapping[str, Any] | Callable[[dict[str, Any]], dict[str, Any]]

_OLD_ROPE_NAMES = ("rope_theta", "rope_scaling", "rope_local_base_freq")


def apply_hf_overrides(config: Mapping[str, Any], overrides: HfOverrides) -> dict[str, Any]:
    """A copy of `config` with `overrides` merged into it, objects inside it key by key.

    A function gets a copy and returns the new config. The rotary names of older files
    (`rope_theta`, `rope_scaling`) also change a config that spells them as `rope_parameters`.
    """
    if callable(overrides):
        changed = overrides(_copied(config))
        if not isinstance(changed, dict):
            raise ConfigurationError(
                f"hf_overrides must return the changed config, a dict; it returned a "
                f"{type(changed).__name__}"
            )
        return changed
    changed = _copied(config)
    if any(name in overrides for name in _OLD_ROPE_NAMES):
        changed = _with_old_rope_names(changed)
    return _merged(changed, overrides)


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


def _merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for key, value in overrides.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[key] = _merged(old, value)
        else:
            merged[key] = _copied(value)
    return merged


def _with_old_rope_names(config: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` split into `rope_theta` and `rope_scaling`, so that both can change."""
    parameters = config.pop("rope_parameters", None) or {}
    sliding = parameters.get("sliding_attention")
    full = dict(parameters.get("full_attention", {} if sliding else parameters))
    if "rope_theta" in full:
        config["rope_theta"] = full.pop("rope_theta")
    if full.get("rope_type", "default") != "default":
        config["rope_scaling"] = full
    if sliding and "rope_theta" in sliding:
        config["rope_local_base_freq"] = sliding["rope_theta"]
    return config
