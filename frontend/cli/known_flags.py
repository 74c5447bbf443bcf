"""Flags and commands that users of other versions may type and that headrace does not have.

They are refused by name, with what they are for, instead of as unknown.
"""

from collections.abc import Mapping
from types import MappingProxyType

KNOWN_COMMANDS = ("launch", "run-batch", "preload", "snapshot", "download-kernels")

_BY_PURPOSE: dict[str, tuple[str, ...]] = {
    "TLS": ("ssl-ciphers", "enable-ssl-refresh"),
    "LoRA adapters": (
        "lora-modules", "lora-target-modules", "enable-tower-connector-lora",
        "specialize-active-lora", "lora-path", "lora-assignment",
    ),
    "tool calls": (
        "enable-auto-tool-choice", "tool-call-parser", "tool-parser-plugin", "tool-strict-level",
        "exclude-tools-when-tool-choice-none", "tool-server",
    ),
    "reasoning": ("reasoning-parser-plugin", "reasoning-config"),
    "media in prompts": (
        "trust-request-mm-kwargs", "allowed-media-domains", "language-model-only",
        "enable-mm-embeds", "skip-mm-profiling", "mm-encoder-only", "mm-processor-cache-gb",
        "mm-processor-cache-type", "mm-encoder-tp-mode", "mm-hasher-algorithm",
        "video-pruning-rate",
    ),
    "further fields in responses": (
        "enable-per-request-metrics", "enable-request-id-headers", "fingerprint-mode",
        "fingerprint-value",
    ),
    "further routes": (
        "enable-tokenizer-info-endpoint", "enable-scale-out", "tokens-only",
        "disable-fastapi-docs", "enable-offline-docs",
    ),
    "what the server logs": (
        "enable-log-outputs", "enable-log-deltas", "log-error-stack",
        "disable-access-log-for-endpoints", "log-config-file", "logging-config",
        "aggregate-engine-logging",
    ),
    "code of your own in the server": ("middleware",),
    "APIs of other vendors": (
        "anthropic-disabled-thinking-effort", "cohere-format", "cohere-is-reasoning-model",
        "enable-flash-late-interaction", "grpc", "grpc-port", "omni", "diffusion-config",
    ),
    "several processes or machines": (
        "data-parallel-supervisor-port",
        "dp-supervisor-probe-interval-s", "dp-supervisor-probe-timeout-s",
        "dp-supervisor-probe-failure-threshold", "prefill-context-parallel-size",
        "decode-context-parallel-size", "data-parallel-multi-port-external-lb",
        "dp-sync-interval",
        "device-ids", "numa-bind", "numa-bind-nodes", "numa-bind-cpus",
        "distributed-timeout-seconds", "cpu-distributed-timeout-seconds", "enable-dbo",
        "dbo-decode-token-threshold", "dbo-prefill-token-threshold", "ubatch-size",
        "enable-fault-tolerance", "fault-tolerance-config",
    ),
    "mixtures of experts": (
        "eplb-config", "expert-placement-strategy", "all2all-backend", "enable-elastic-ep",
        "elastic-ep-max-dp-size", "moe-backend", "enable-return-routed-experts",
    ),
    "quantized weights": ("quantization-config", "allow-deprecated-quantization"),
    "reading weights": ("safetensors-load-strategy",),
    "pooling models": ("io-processor-plugin", "pooler-config"),
    "kinds of KV cache": (
        "kv-cache-dtype-skip-layers", "mamba-cache-mode", "mamba-block-size",
        "mamba-cache-dtype", "mamba-ssm-cache-dtype", "mamba-backend",
    ),
    "moving KV or weights elsewhere": (
        "kv-offloading-size", "kv-offloading-backend", "ec-transfer-config", "offload-backend",
        "offload-group-size", "offload-num-in-group", "offload-prefetch-step", "offload-params",
    ),
    "further limits of the scheduler": (
        "max-num-active-seqs", "max-num-scheduled-tokens", "watermark", "watermark-config",
        "scheduler-reserve-full-isl", "prefill-schedule-interval",
    ),
    "speculative decoding": ("spec-method", "spec-model", "spec-tokens"),
    "compilation and captured graphs": (
        "performance-mode", "cudagraph-capture-sizes", "max-cudagraph-capture-size",
        "linear-backend", "kernel-config", "aux-output-config",
    ),
    "further metrics": (
        "kv-cache-metrics", "kv-cache-metrics-sample", "cudagraph-metrics", "enable-mfu-metrics",
        "custom-histogram-buckets", "per-request-spec-decode-metrics",
        "enable-logging-iteration-details",
    ),
    "checking environment variables, which is always done": ("fail-on-environ-validation",),
}  # fmt: skip

_SHORT_FLAGS = {
    "-pcp": "several processes or machines", "-dcp": "several processes or machines",
    "-dpm": "several processes or machines",
    "-dc": "APIs of other vendors",
}  # fmt: skip

# Flag -> what it is for.
KNOWN_FLAGS: Mapping[str, str] = MappingProxyType(
    {f"--{name}": purpose for purpose, names in _BY_PURPOSE.items() for name in names}
    | _SHORT_FLAGS
)
