"""Which numbers of workers a model can be divided among."""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.configs.config import ParallelConfig
from headrace.configs.errors import ConfigurationError


def check_division(hf_config: Mapping[str, Any], config: ParallelConfig) -> None:
    """Raises ConfigurationError, with the numbers that would work, before anything is started."""
    check_shards(
        config.tensor_parallel_size,
        hf_config["num_attention_heads"],
        hf_config["num_key_value_heads"],
        hf_config["intermediate_size"],
    )
    num_layers = hf_config["num_hidden_layers"]
    check_stages(config.pipeline_parallel_size, num_layers, config.pp_layer_partition)


def check_shards(size: int, num_heads: int, num_kv_heads: int, inner_size: int) -> None:
    """Heads and inner values are divided; key and value heads divided or repeated."""
    sizes = [n for n in range(1, num_heads + 1) if not (num_heads % n or inner_size % n)]
    usable = " or ".join(str(n) for n in sizes if not (num_kv_heads % n and n % num_kv_heads))
    for count, what in ((num_heads, "query heads"), (inner_size, "inner values")):
        if count % size:
            raise ConfigurationError(
                f"tensor_parallel_size {size} does not divide the model's {count} {what}; use "
                f"{usable}"
            )
    if num_kv_heads % size and size % num_kv_heads:
        raise ConfigurationError(
            f"tensor_parallel_size {size} neither divides nor is a multiple of the model's "
            f"{num_kv_heads} key and value heads; use {usable}"
        )


def check_stages(size: int, num_layers: int, partition: Sequence[int] | None) -> None:
    """Every stage has a layer, and `partition`, if there is one, has all of them."""
    if size > num_layers:
        raise ConfigurationError(
            f"pipeline_parallel_size {size} is above the model's {num_layers} layers"
        )
    if partition is not None and (
        len(partition) != size or sum(partition) != num_layers or min(partition) < 1
    ):
        raise ConfigurationError(
            f"pp_layer_partition {','.join(map(str, partition))} must be {size} numbers of "
            f"layers, at least 1 each, that are {num_layers} together"
        )
