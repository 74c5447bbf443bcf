"""Options of the KV cache."""

import dataclasses
from functools import partial

from headrace.configs.options import option, parse_size

DEFAULT_BLOCK_SIZE = 16
HASH_ALGORITHMS = (
    "builtin", "sha256", "sha256_cbor", "sha256_cbor_64bit", "xxhash", "xxhash_cbor",
)  # fmt: skip
KV_CACHE_DTYPES = ("bfloat16", "float16", "float32", "int8", "int8_per_token_head")

_option = partial(option, group="CacheConfig")
_later = partial(_option, status="later")
_legacy = partial(_option, status="legacy")


@dataclasses.dataclass
class CacheOptions:
    """Size and sharing of the KV cache."""

    block_size: int | None = _option(
        None, f"tokens per KV-cache block (default: {DEFAULT_BLOCK_SIZE})", minimum=1
    )
    gpu_memory_utilization: float = _option(
        0.92, "most of the device's memory (on a CPU: of the machine or its limit) that this "
        "engine takes, above 0 and at most 1", flags=["--device-memory-utilization"],
    )  # fmt: skip
    swap_space: float = _legacy(4, "sequences are never swapped to host memory")
    kv_cache_dtype: str = _later(
        "auto", "type of keys and values in the cache; auto is the model's dtype; int8 has a "
        "scale per token and head",
        choices=[
            "auto", *KV_CACHE_DTYPES, "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla",
            "fp8_per_token_head", "int4_per_token_head",
        ],
        holds=KV_CACHE_DTYPES,
    )  # fmt: skip
    num_gpu_blocks_override: int | None = _option(
        None, "exact number of KV-cache blocks", minimum=1
    )
    enable_prefix_caching: bool | None = _option(
        None, "reuse the KV of shared prefixes (default: on)"
    )
    prefix_caching_hash_algo: str = _later(
        "sha256", "hash of KV-cache blocks", choices=HASH_ALGORITHMS
    )
    cpu_offload_gb: float = _later(0, "GiB of weights kept in host memory", minimum=0)
    calculate_kv_scales: bool = _later(False, "compute the scales of an fp8 cache at run time")
    kv_cache_memory_bytes: int | None = _option(
        None, "bytes of the KV cache, e.g. 2G (default: min(what max_num_seqs x max_model_len "
        "needs, 40 % of the memory left, 4 GiB))",
        flags=["--kv-cache-memory"], parse=parse_size, minimum=1,
    )  # fmt: skip
