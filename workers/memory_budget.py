"""How a worker divides its memory: weights, activations, KV cache. All values in bytes."""

from dataclasses import dataclass

from headrace.configs.config import EngineConfig
from headrace.configs.errors import InsufficientMemoryError
from headrace.workers.logprobs import SCORE_COPIES, SCORE_ROWS
from headrace.workers.models import DecoderConfig
from headrace.workers.protocol import KVCacheSpec

_KV_SHARE = 0.4  # of what the weights leave
_KV_DEFAULT_MAX = 4 << 30
_WIDE_BYTES = 4  # of a float32
_LOGITS_COPIES = 3  # logits, scores and what the sampler makes of them


@dataclass(frozen=True)
class MemoryBudget:
    """The parts, which the caller prints; `num_blocks` includes the null block."""

    available: int
    weights: int
    activations: int
    kv_cache: int
    num_blocks: int

    def lines(self) -> dict[str, int]:
        used = self.weights + self.activations + self.kv_cache
        return {
            "available": self.available,
            "weights": self.weights,
            "activations (at most)": self.activations,
            "KV cache": self.kv_cache,
            "left": self.available - used,
        }


def plan_memory(
    config: EngineConfig,
    decoder: DecoderConfig,
    spec: KVCacheSpec,
    num_weight_bytes: int,
    available: int,
) -> MemoryBudget:
    """Check that the model fits and size the KV cache.

    Default size: the smallest of max_num_seqs sequences of max_model_len tokens, 40 % of what the
    weights leave, and 4 GiB. Raises `InsufficientMemoryError` with the numbers and the flag value
    that would start.
    """
    activations = _activation_bytes(config, decoder)
    left = available - num_weight_bytes - activations
    if left <= 0:
        raise InsufficientMemoryError(
            f"the weights need {_mib(num_weight_bytes)} {_kept_in(config)} and a step needs "
            f"{_mib(activations)}, but {_mib(available)} of memory are available: "
            f"{_mib(-left)} short. {_smaller_model_hint(config, num_weight_bytes, available)}"
        )
    smallest = spec.block_bytes * (len(spec.groups) + 1)  # one block per group and the null block
    wanted = _wanted_kv_bytes(config, spec, left)
    if wanted > left:
        raise InsufficientMemoryError(
            f"{_kv_flag(config, spec, wanted)} asks for {wanted} bytes of KV cache, but after the "
            f"weights ({num_weight_bytes}) and a step's activations ({activations}) only {left} "
            f"of {available} bytes are left. Start with {_kv_flag(config, spec, left)} or less"
        )
    if wanted < smallest:
        flag = _kv_flag(config, spec, smallest)
        fix = f"{flag} would start" if smallest <= left else "Free some memory"
        raise InsufficientMemoryError(
            f"the KV cache gets {wanted} bytes ({left} are left of {available}), but a sequence of "
            f"one block of {spec.block_size} tokens needs {smallest}. {fix}"
        )
    num_blocks = wanted // spec.block_bytes
    return MemoryBudget(
        available, num_weight_bytes, activations, num_blocks * spec.block_bytes, num_blocks
    )


def _wanted_kv_bytes(config: EngineConfig, spec: KVCacheSpec, left: int) -> int:
    """Bytes of KV cache to take."""
    cache = config.cache_config
    if cache.num_blocks is not None:
        return cache.num_blocks * spec.block_bytes
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes
    per_sequence = -(-config.model_config.max_model_len // spec.block_size) * len(spec.groups)
    num_blocks = config.scheduler_config.max_num_seqs * per_sequence + 1
    return min(num_blocks * spec.block_bytes, int(left * _KV_SHARE), _KV_DEFAULT_MAX)


def _kv_flag(config: EngineConfig, spec: KVCacheSpec, num_bytes: int) -> str:
    """The option that decides in this configuration, with the value that takes `num_bytes`."""
    if config.cache_config.num_blocks is not None:
        return f"--num-gpu-blocks-override {num_bytes // spec.block_bytes}"
    return f"--kv-cache-memory {num_bytes}"


def _activation_bytes(config: EngineConfig, decoder: DecoderConfig) -> int:
    """An upper bound of what one step needs beside weights and cache."""
    scheduler, attention = config.scheduler_config, decoder.attention
    heads = attention.num_heads + 2 * attention.num_kv_heads
    widest = max(2 * decoder.hidden_size + 3 * decoder.inner_size, 4 * heads * attention.head_dim)
    tokens = scheduler.max_num_batched_tokens * (4 * decoder.hidden_size + widest)
    logits = scheduler.max_num_seqs * decoder.vocab_size * _LOGITS_COPIES
    scores = SCORE_ROWS * decoder.vocab_size * SCORE_COPIES
    return (tokens + logits + scores) * _WIDE_BYTES


def _kept_in(config: EngineConfig) -> str:
    model = config.model_config
    is_quantized = model.quantization != "none"
    return f"in {model.dtype}" + (
        f" with quantization {model.quantization}" if is_quantized else ""
    )


def _smaller_model_hint(config: EngineConfig, num_weight_bytes: int, available: int) -> str:
    is_wide = config.model_config.dtype == "float32"
    if is_wide and num_weight_bytes // 2 < available:
        return "Start with --dtype bfloat16, which halves the weights, or free some memory"
    return "Use a smaller model, or free some memory"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
