"""Options of structured output, speculation, observability, and what concerns the whole engine."""

# ruff: noqa: RUF009 (every default here is made by option(), a dataclass field)

import dataclasses
from functools import partial
from typing import Any

from headrace.configs.options import option, parse_json

_decoding_later = partial(option, group="DecodingConfig", status="later")
_observability = partial(option, group="ObservabilityConfig")
_engine_later = partial(option, group="EngineConfig", status="later")


@dataclasses.dataclass
class DecodingOptions:
    """Structured output and reasoning."""

    guided_decoding_backend: str = _decoding_later(
        "auto", "library for structured output",
        choices=["auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer"],
    )  # fmt: skip
    guided_decoding_disable_fallback: bool = _decoding_later(
        False, "fail where the chosen library cannot do it"
    )
    guided_decoding_disable_any_whitespace: bool = _decoding_later(False, "compact JSON")
    guided_decoding_disable_additional_properties: bool = _decoding_later(
        False, "JSON objects get no further keys"
    )
    reasoning_parser: str = _decoding_later("", "separates reasoning from answers")
    structured_outputs_config: dict[str, Any] = _decoding_later(
        {}, "settings of structured output, as JSON"
    )


@dataclasses.dataclass
class DeviceOptions:
    """The device, which is found out."""

    device: str = option("auto", "the device is found out", group="DeviceConfig", status="legacy")


@dataclasses.dataclass
class SpeculativeOptions:
    """Speculative decoding."""

    speculative_config: dict[str, Any] | None = option(
        None, "draft tokens and how many, as JSON", group="SpeculativeConfig", flags=["-sc"],
        status="later",
    )  # fmt: skip


@dataclasses.dataclass
class ObservabilityOptions:
    """Metrics, traces, logs, profiles."""

    show_hidden_metrics_for_version: str | None = _observability(
        None, "show metrics again that were hidden since this version", status="later"
    )
    otlp_traces_endpoint: str | None = _observability(
        None, "where to send OpenTelemetry traces", status="later"
    )
    collect_detailed_traces: list[str] | None = _observability(
        None, "parts to trace in detail: model, worker, all", status="later"
    )
    disable_log_stats: bool = _observability(
        False, "no periodic statistics line, and no metrics of steps", switch=True
    )
    profiler_config: dict[str, Any] | None = _observability(
        None, 'JSON such as {"torch_profiler_dir": "traces"}: where start_profile and '
        "stop_profile leave traces",
    )  # fmt: skip


@dataclasses.dataclass
class WholeEngineOptions:
    """Transfer of KV, compilation, and settings of a platform."""

    kv_transfer_config: dict[str, Any] | None = _engine_later(
        None, "sending KV between engines, as JSON"
    )
    kv_events_config: dict[str, Any] | None = _engine_later(
        None, "publishing KV-cache events, as JSON"
    )
    compilation_config: int | dict[str, Any] | None = _engine_later(
        None, "torch.compile and captured graphs: a level, or JSON",
        flags=["-O", "-cc", "--optimization-level"], parse=parse_json,
    )  # fmt: skip
    additional_config: dict[str, Any] = _engine_later({}, "settings of a platform, as JSON")
    use_v2_block_manager: bool = option(
        True, "there is one block manager", group="EngineConfig", status="legacy", switch=True
    )
