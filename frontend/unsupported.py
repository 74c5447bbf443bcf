"""Known parts of the Python API that this version refuses, by the feature they belong to."""

from typing import Any, NoReturn

from headrace.configs.errors import UnsupportedFeatureError

LORA = "LoRA adapters"
PROMPT_ADAPTERS = "prompt adapters"
TRACING = "tracing"
POOLING = "pooling models (encode, embed, classify, score)"


def refuse(feature: str, parameter: str | None = None) -> NoReturn:
    """Raise UnsupportedFeatureError for `feature`, asked for by `parameter`."""
    named = f" ({parameter})" if parameter else ""
    raise UnsupportedFeatureError(f"this version has no {feature}{named}", parameter)


def refuse_given(**features: Any) -> None:
    """Refuse the first argument that is not None; each value is (given, name of the feature)."""
    for parameter, (given, feature) in features.items():
        if given is not None:
            refuse(feature, parameter)


class UnsupportedMethods:
    """Methods of `LLMEngine` whose features this version lacks."""

    def add_lora(self, lora_request: Any) -> bool:
        refuse(LORA)

    def remove_lora(self, lora_id: int) -> bool:
        refuse(LORA)

    def pin_lora(self, lora_id: int) -> bool:
        refuse(LORA)

    def list_loras(self) -> set[int]:
        refuse(LORA)

    def add_prompt_adapter(self, prompt_adapter_request: Any) -> bool:
        refuse(PROMPT_ADAPTERS)

    def remove_prompt_adapter(self, prompt_adapter_id: int) -> bool:
        refuse(PROMPT_ADAPTERS)

    def list_prompt_adapters(self) -> list[int]:
        refuse(PROMPT_ADAPTERS)

    def do_tracing(self, *arguments: Any) -> None:
        refuse(TRACING)

    def create_trace_span(self, seq_group: Any) -> None:
        refuse(TRACING)
