"""`EngineArgs`: every engine option by name, type, default and help; the source of the CLI flags.

`create_engine_config()` resolves the model and fills in what is unset, giving the frozen
`EngineConfig`.
"""

import argparse
import dataclasses
from enum import Enum
from pathlib import Path
from typing import Any, cast

from headrace.configs.config import (
    CacheConfig,
    DType,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SchedulingPolicy,
)
from headrace.configs.errors import ConfigurationError
from headrace.configs.hardware import cpu_facts
from headrace.configs.model_files.model_info import ModelInfo, read_model_info
from headrace.configs.model_files.resolve import resolve_model
from headrace.configs.options import add_options, option, parse_size

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_MAX_NUM_SEQS = 256
DTYPES: dict[str, DType] = {
    "float32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
}


class UsageContext(Enum):
    """Who asks for an engine: offline batches get larger steps than a server."""

    LLM_CLASS = "llm"
    API_SERVER = "server"
    ENGINE_CONTEXT = "engine"


@dataclasses.dataclass
class EngineArgs:
    """Arguments of an engine; all have defaults. See `headrace serve --help` for what each does."""

    model: str = option(
        DEFAULT_MODEL, "a directory or .gguf file, an alias, or a hub id (org/name)", group="model"
    )
    tokenizer: str | None = option(
        None, "directory, tokenizer.json or .gguf file with the tokenizer (default: the model)",
        group="model",
    )  # fmt: skip
    served_model_name: str | list[str] | None = option(
        None, "name(s) in the API; the first is reported (default: the model)", group="model"
    )
    revision: str | None = option(None, "branch, tag or commit of a hub id", group="model")
    hf_token: str | None = option(
        None, "hub token (default: the saved login or HF_TOKEN)", group="model", secret=True
    )
    download_dir: str | None = option(None, "where hub downloads are kept", group="model")
    dtype: str = option(
        "auto", "type of weights and activations; auto: bfloat16 where the CPU computes with it",
        group="model", choices=["auto", *DTYPES],
    )  # fmt: skip
    seed: int | None = option(
        None, "derive the seeds of requests that give none (default: fresh entropy)", group="model"
    )
    max_model_len: int | None = option(
        None, "longest prompt plus output, in tokens (default: the model's)", group="model",
        parse=parse_size,
    )  # fmt: skip
    max_logprobs: int = option(20, "most log-probabilities a request may ask for", group="model")
    generation_config: str = option(
        "auto", "sampling defaults: auto takes the model's, headrace ignores them", group="model",
        choices=["auto", "headrace", "vllm"],
    )  # fmt: skip
    block_size: int = option(16, "tokens per KV-cache block", group="cache")
    kv_cache_memory_bytes: int | None = option(
        None, "bytes of the KV cache, e.g. 2G (default: min(what max_num_seqs x max_model_len "
        "needs, 40 %% of the memory left, 4 GiB))",
        group="cache", flags=["--kv-cache-memory"], parse=parse_size,
    )  # fmt: skip
    num_gpu_blocks_override: int | None = option(
        None, "exact number of KV-cache blocks", group="cache"
    )
    enable_prefix_caching: bool = option(True, "reuse the KV of shared prefixes", group="cache")
    max_num_seqs: int | None = option(
        None, f"most sequences in one step (default: {DEFAULT_MAX_NUM_SEQS})", group="scheduler"
    )
    max_num_batched_tokens: int | None = option(
        None, "token budget of one step (default: 4096 offline, 2048 in a server)",
        group="scheduler", parse=parse_size,
    )  # fmt: skip
    scheduling_policy: str = option(
        "fcfs", "order of the queue; with priority, lower numbers run first", group="scheduler",
        choices=["fcfs", "priority"],
    )  # fmt: skip
    disable_log_stats: bool = option(False, "no periodic statistics line", group="observability")

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add all flags but `--model`, which is positional in the commands."""
        add_options(parser, cls, skip=["model"])
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        """Read every field from the namespace; a missing attribute is an AttributeError."""
        return cls(**{field.name: getattr(args, field.name) for field in dataclasses.fields(cls)})

    def create_engine_config(
        self, usage_context: UsageContext = UsageContext.ENGINE_CONTEXT
    ) -> EngineConfig:
        """Resolve the model (which may download it) and every default.

        Raises ConfigurationError for values that cannot work, ModelFileError for the model.
        """
        self._check()
        path = resolve_model(
            self.model,
            revision=self.revision,
            token=self.hf_token,
            download_dir=Path(self.download_dir) if self.download_dir else None,
        )
        model_config = self._model_config(path, read_model_info(path))
        return EngineConfig(
            model_config=model_config,
            cache_config=CacheConfig(
                block_size=self.block_size,
                enable_prefix_caching=self.enable_prefix_caching,
                kv_cache_memory_bytes=self.kv_cache_memory_bytes,
                num_blocks=self.num_gpu_blocks_override,
            ),
            scheduler_config=self._scheduler_config(usage_context),
            log_stats=not self.disable_log_stats,
        )

    def _check(self) -> None:
        positive = (
            "max_model_len", "block_size", "kv_cache_memory_bytes", "num_gpu_blocks_override",
            "max_num_seqs", "max_num_batched_tokens",
        )  # fmt: skip
        for name in positive:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"{name} must be at least 1, got {value}")
        if self.max_logprobs < 0:
            raise ConfigurationError(f"max_logprobs must be at least 0, got {self.max_logprobs}")
        for field in dataclasses.fields(self):
            choices, value = field.metadata["choices"], getattr(self, field.name)
            if choices is not None and value not in choices:
                raise ConfigurationError(
                    f"{field.name} must be one of {', '.join(choices)}, got {value!r}"
                )

    def _model_config(self, path: Path, info: ModelInfo) -> ModelConfig:
        if self.max_model_len is not None and self.max_model_len > info.max_model_len:
            raise ConfigurationError(
                f"max_model_len {self.max_model_len} is above the {info.max_model_len} tokens that "
                f"{self.model} was trained for; give at most that"
            )
        names = self.served_model_name or self.model
        dtype = cpu_facts().preferred_dtype if self.dtype == "auto" else DTYPES[self.dtype]
        defaults: dict[str, Any] = (
            dict(info.default_sampling_params) if self.generation_config == "auto" else {}
        )
        return ModelConfig(
            model=self.model,
            path=str(path),
            tokenizer_path=str(self.tokenizer or path),
            served_model_names=(names,) if isinstance(names, str) else tuple(names),
            architecture=info.architecture,
            hf_config=info.hf_config,
            dtype=dtype,
            max_model_len=self.max_model_len or info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_id=info.eos_token_id,
            extra_eos_token_ids=info.extra_eos_token_ids,
            default_sampling_params=defaults,
            max_logprobs=self.max_logprobs,
            seed=self.seed,
        )

    def _scheduler_config(self, usage_context: UsageContext) -> SchedulerConfig:
        budget = self.max_num_batched_tokens
        seqs = self.max_num_seqs or min(DEFAULT_MAX_NUM_SEQS, budget or DEFAULT_MAX_NUM_SEQS)
        if budget is None:
            budget = max(4096 if usage_context is UsageContext.LLM_CLASS else 2048, seqs)
        if budget < seqs:
            raise ConfigurationError(
                f"max_num_batched_tokens {budget} is below max_num_seqs {seqs}: a step could not "
                "give every sequence a token; raise the first or lower the second"
            )
        return SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            policy=cast(SchedulingPolicy, self.scheduling_policy),
        )


@dataclasses.dataclass
class AsyncEngineArgs(EngineArgs):
    """Arguments of an asynchronous engine: those of any engine."""
