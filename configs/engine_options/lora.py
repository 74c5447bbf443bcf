"""Options of adapters: LoRA, and the older prompt adapters."""

# ruff: noqa: RUF009 (every default here is made by option(), a dataclass field)

import dataclasses
from functools import partial

from headrace.configs.options import option, parse_json_object

_lora_later = partial(option, group="LoRAConfig", status="later")
_lora_legacy = partial(option, group="LoRAConfig", status="legacy")
_prompt_legacy = partial(option, group="PromptAdapterConfig", status="legacy")


@dataclasses.dataclass
class LoRAOptions:
    """Low-rank adapters of the model's weights."""

    enable_lora: bool = _lora_later(False, "accept LoRA adapters")
    enable_lora_bias: bool = _lora_later(False, "accept adapters with biases")
    max_loras: int = _lora_later(1, "adapters in one batch", minimum=1)
    max_lora_rank: int = _lora_later(16, "largest rank of an adapter", minimum=1)
    lora_extra_vocab_size: int = _lora_legacy(256, "adapters cannot bring tokens")
    lora_dtype: str | None = _lora_later(
        "auto", "type of adapters", choices=["auto", "float16", "bfloat16"]
    )
    long_lora_scaling_factors: tuple[float, ...] | None = _lora_legacy(
        None, "adapters share the model's rotary embedding", parse=float
    )
    max_cpu_loras: int | None = _lora_later(None, "adapters kept in host memory")
    fully_sharded_loras: bool = _lora_later(False, "shard all of an adapter's computation")
    default_mm_loras: dict[str, str] | None = _lora_later(
        None, "adapter for each kind of media, as JSON", parse=parse_json_object
    )


@dataclasses.dataclass
class PromptAdapterOptions:
    """Prompt adapters, which no longer exist."""

    enable_prompt_adapter: bool = _prompt_legacy(False, "prompt adapters are not supported")
    max_prompt_adapters: int = _prompt_legacy(1, "prompt adapters are not supported")
    max_prompt_adapter_token: int = _prompt_legacy(0, "prompt adapters are not supported")
