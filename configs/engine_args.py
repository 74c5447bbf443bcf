"""`EngineArgs`: every engine option by name, type, default and help; the source of the CLI flags.

The options themselves are in `engine_options/`, by group. `create_engine_config()` resolves the
model and fills in what is unset, giving the frozen `EngineConfig`.
"""

import argparse
import dataclasses
import logging
import os
from enum import Enum
from pathlib import Path
from typing import Any, Self, cast

from headrace.configs import environment
from headrace.configs.config import (
    CacheConfig,
    DType,
    EngineConfig,
    KVCacheDtype,
    LoadConfig,
    LoadFormat,
    LogprobsMode,
    ModelConfig,
    ObservabilityConfig,
    ProfilerConfig,
    RecoveryConfig,
    SchedulerConfig,
    SchedulingPolicy,
)
from headrace.configs.engine_options.cache import DEFAULT_BLOCK_SIZE, CacheOptions
from headrace.configs.engine_options.engine import (
    DecodingOptions,
    DeviceOptions,
    ObservabilityOptions,
    SpeculativeOptions,
    WholeEngineOptions,
)
from headrace.configs.engine_options.load import LoadOptions
from headrace.configs.engine_options.lora import LoRAOptions, PromptAdapterOptions
from headrace.configs.engine_options.model import DEFAULT_MODEL as DEFAULT_MODEL
from headrace.configs.engine_options.model import LOGPROBS_MODES, ModelOptions
from headrace.configs.engine_options.multimodal import MultiModalOptions
from headrace.configs.engine_options.parallel import ParallelOptions
from headrace.configs.engine_options.recovery import RecoveryOptions
from headrace.configs.engine_options.scheduler import DEFAULT_MAX_NUM_SEQS, SchedulerOptions
from headrace.configs.errors import ConfigurationError, UnsupportedFeatureError
from headrace.configs.hardware import cpu_facts
from headrace.configs.model_division import check_division
from headrace.configs.model_files.model_info import ModelInfo, read_model_info
from headrace.configs.model_files.resolve import resolve_model
from headrace.configs.options import add_options, check_options, normalized, option
from headrace.configs.parallel import resolve_parallel
from headrace.configs.quantization import check_quantization, resolve_quantization
from headrace.configs.sampling_sources import resolve_sampling_defaults
from headrace.configs.weight_transfer import resolve_sleep, resolve_weight_transfer

logger = logging.getLogger(__name__)

DTYPES: dict[str, DType] = {
    "float32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
}
OFFLINE_TOKENS_PER_STEP = 4096
SERVER_TOKENS_PER_STEP = 2048
# Of prompts, while others run or wait. Half as many cost a CPU 2 % of its prefill rate, four times
# as many gain 3 %, and the first tokens of waiting requests come with the end of a step.
SERVER_SHARED_PREFILL_TOKENS = 512


class UsageContext(Enum):
    """Who asks for an engine: offline batches get larger steps than a server."""

    LLM_CLASS = "llm"
    API_SERVER = "server"
    ENGINE_CONTEXT = "engine"


# Fields come in the order of the help: those of the last base first.
@dataclasses.dataclass
class EngineArgs(
    WholeEngineOptions,
    SchedulerOptions,
    ObservabilityOptions,
    SpeculativeOptions,
    DeviceOptions,
    PromptAdapterOptions,
    LoRAOptions,
    MultiModalOptions,
    CacheOptions,
    RecoveryOptions,
    ParallelOptions,
    DecodingOptions,
    LoadOptions,
    ModelOptions,
):
    """Arguments of an engine; all have defaults. `headrace serve --help=all` explains each."""

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for every field; returns the parser.

        Spellings that the parser already has are left alone.
        """
        add_options(parser, cls)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Read every field from the namespace; a missing attribute is an AttributeError."""
        values = {field.name: getattr(args, field.name) for field in dataclasses.fields(cls)}
        unset = [name for name, value in values.items() if value == [None]]
        return cls(**values | dict.fromkeys(unset))

    def check(self) -> None:
        """Raise what `create_engine_config` would raise about the arguments alone; touches no file.

        Raises ConfigurationError or UnsupportedFeatureError.
        """
        args = normalized(self)
        check_options(args)
        _Resolver(args, UsageContext.ENGINE_CONTEXT).check()

    def create_engine_config(self, usage_context: UsageContext | None = None) -> EngineConfig:
        """Resolve the model (which may download it) and every default; these arguments stay.

        Raises ConfigurationError for values that cannot work, UnsupportedFeatureError for options
        that cannot do anything yet, ModelFileError for the model.
        """
        args = normalized(self)
        for warning in check_options(args):
            logger.warning("%s", warning)
        return _Resolver(args, usage_context or UsageContext.ENGINE_CONTEXT).engine_config()


@dataclasses.dataclass
class AsyncEngineArgs(EngineArgs):
    """Arguments of an asynchronous engine: those of any engine, and the log of requests."""

    enable_log_requests: bool = option(
        False, "log each request's parameters and end", group="ObservabilityConfig"
    )
    disable_log_requests: bool = option(
        False, "the older spelling of --no-enable-log-requests", group="ObservabilityConfig",
        switch=True,
    )  # fmt: skip

    @classmethod
    def add_cli_args(
        cls, parser: argparse.ArgumentParser, async_args_only: bool = False
    ) -> argparse.ArgumentParser:
        """Add a flag for every field, or for those that `EngineArgs` lacks; returns the parser."""
        names = [field.name for field in dataclasses.fields(EngineArgs)] if async_args_only else []
        add_options(parser, cls, skip=names)
        return parser

    @property
    def logs_requests(self) -> bool:
        """What both spellings say together."""
        if self.enable_log_requests and self.disable_log_requests:
            raise ConfigurationError(
                "enable_log_requests and disable_log_requests contradict each other; give one"
            )
        return self.enable_log_requests


class _Resolver:
    """Makes the parts of an `EngineConfig` from checked arguments, which it owns."""

    def __init__(self, args: EngineArgs, usage_context: UsageContext) -> None:
        self._args = args
        self._usage_context = usage_context

    def engine_config(self) -> EngineConfig:
        args = self._args
        self.check()  # before a download
        path = resolve_model(
            args.model,
            revision=args.revision,
            token=args.hf_token,
            download_dir=Path(args.download_dir) if args.download_dir else None,
            progress=args.use_tqdm_on_load,
        )
        self._check_format(path)
        info = read_model_info(
            path,
            overrides=args.hf_overrides,
            config_path=Path(args.hf_config_path) if args.hf_config_path else None,
        )
        parallel_config = resolve_parallel(args, args.seed)
        check_division(info.hf_config, parallel_config)
        interval = environment.read_number(environment.LOG_STATS_INTERVAL, os.environ)
        return EngineConfig(
            model_config=self._model_config(path, info),
            cache_config=self._cache_config(),
            scheduler_config=self._scheduler_config(),
            parallel_config=parallel_config,
            recovery_config=RecoveryConfig(
                args.max_restarts,
                args.restart_window,
                args.step_timeout,
                args.allow_replay_after_rpc,
            ),
            load_config=LoadConfig(cast(LoadFormat, args.load_format), args.download_dir),
            weight_transfer_config=resolve_weight_transfer(
                args.weight_update_root, args.weight_transfer_config
            ),
            sleep_config=resolve_sleep(args.enable_sleep_mode, args.sleep_spill_dir),
            observability_config=ObservabilityConfig(log_stats_interval_s=interval),
            profiler_config=self._profiler_config(),
            log_stats=not args.disable_log_stats,
        )

    def check(self) -> None:
        """Everything that can be said without the model."""
        args = self._args
        self._scheduler_config()
        self._profiler_config()
        resolve_parallel(args, args.seed)
        check_quantization(args.quantization)
        resolve_weight_transfer(args.weight_update_root, args.weight_transfer_config)
        resolve_sleep(args.enable_sleep_mode, args.sleep_spill_dir)
        if args.enable_chunked_prefill is False:
            raise ConfigurationError(
                "enable_chunked_prefill=False is refused: there is no separate prefill phase, a "
                "prompt longer than a step's token budget runs over several steps. Leave it on; a "
                "lower max_num_batched_tokens makes long prompts delay other requests less"
            )
        names = args.served_model_name
        if names is not None and not all([names] if isinstance(names, str) else names or [""]):
            raise ConfigurationError("served_model_name must name the model, got an empty name")
        if args.max_model_len in ("auto", "-1", -1):
            raise UnsupportedFeatureError(
                "--max-model-len auto is not implemented yet; give a number, or leave it out for "
                "the model's own limit",
                "max_model_len",
            )
        if args.max_model_len is not None and (
            not isinstance(args.max_model_len, int) or args.max_model_len < 1
        ):
            raise ConfigurationError(f"max_model_len must be at least 1, got {args.max_model_len}")
        if not 0 < args.gpu_memory_utilization <= 1:
            raise ConfigurationError(
                "gpu_memory_utilization must be above 0 and at most 1, got "
                f"{args.gpu_memory_utilization}"
            )

    def _check_format(self, path: Path) -> None:
        """The format that the arguments name must be the one of the files."""
        args, is_gguf = self._args, _is_gguf(path)
        found = "a GGUF file" if is_gguf else "a directory of safetensors"
        if args.load_format not in ("auto", "dummy") and is_gguf != (args.load_format == "gguf"):
            raise ConfigurationError(
                f"load_format {args.load_format} does not go with {path}, {found}"
            )
        if check_quantization(args.quantization) != "gguf":
            return
        if not is_gguf:
            raise ConfigurationError(
                f"quantization gguf does not go with {path}, {found}; int8 quantizes any model"
            )
        if args.load_format == "dummy":
            raise ConfigurationError(
                "quantization gguf does not go with load_format dummy: random weights are not "
                "stored anywhere. Give quantization int8 or none"
            )

    def _model_config(self, path: Path, info: ModelInfo) -> ModelConfig:
        args = self._args
        names = args.model if args.served_model_name is None else args.served_model_name
        defaults = resolve_sampling_defaults(
            info, args.generation_config, args.override_generation_config
        )
        extra_eos = {*info.extra_eos_token_ids, *defaults.eos_token_ids} - {info.eos_token_id}
        quantization, dtype = resolve_quantization(
            args.quantization,
            DTYPES.get(args.dtype),
            cpu_facts().preferred_dtype,
            is_stored=_is_gguf(path) and args.load_format != "dummy",
        )
        return ModelConfig(
            model=args.model,
            path=str(path),
            tokenizer_path=str(args.tokenizer or path),
            served_model_names=(names,) if isinstance(names, str) else tuple(names),
            architecture=info.architecture,
            hf_config=info.hf_config,
            dtype=dtype,
            max_model_len=self._max_model_len(info),
            vocab_size=info.vocab_size,
            eos_token_id=info.eos_token_id,
            extra_eos_token_ids=tuple(sorted(t for t in extra_eos if t < info.vocab_size)),
            default_sampling_params=defaults.values,
            sampling_param_sources=defaults.sources,
            max_output_tokens=defaults.max_output_tokens,
            max_logprobs=args.max_logprobs,
            logprobs_mode=cast(LogprobsMode, LOGPROBS_MODES[args.logprobs_mode]),
            seed=args.seed,
            skip_tokenizer_init=args.skip_tokenizer_init,
            renderer_num_workers=args.renderer_num_workers,
            quantization=quantization,
        )

    def _max_model_len(self, info: ModelInfo) -> int:
        wanted = self._args.max_model_len
        if not isinstance(wanted, int):
            return info.max_model_len
        allowed = environment.read_switch(environment.ALLOW_LONG_MAX_MODEL_LEN, os.environ)
        if wanted > info.max_model_len and not allowed:
            raise ConfigurationError(
                f"max_model_len {wanted} is above the {info.max_model_len} tokens that "
                f"{self._args.model} was trained for; give at most that, or set "
                f"{environment.ALLOW_LONG_MAX_MODEL_LEN.name}=1"
            )
        return wanted

    def _cache_config(self) -> CacheConfig:
        args = self._args
        return CacheConfig(
            block_size=args.block_size or DEFAULT_BLOCK_SIZE,
            gpu_memory_utilization=args.gpu_memory_utilization,
            enable_prefix_caching=args.enable_prefix_caching is not False,
            kv_cache_memory_bytes=args.kv_cache_memory_bytes,
            num_blocks=args.num_gpu_blocks_override,
            kv_cache_dtype=cast(KVCacheDtype, args.kv_cache_dtype.removesuffix("_per_token_head")),
        )

    def _scheduler_config(self) -> SchedulerConfig:
        args, budget = self._args, self._args.max_num_batched_tokens
        seqs = args.max_num_seqs or min(DEFAULT_MAX_NUM_SEQS, budget or DEFAULT_MAX_NUM_SEQS)
        shared_prefill = None
        if budget is None:
            is_offline = self._usage_context is UsageContext.LLM_CLASS
            shared_prefill = None if is_offline else SERVER_SHARED_PREFILL_TOKENS
            budget = max(OFFLINE_TOKENS_PER_STEP if is_offline else SERVER_TOKENS_PER_STEP, seqs)
        if budget < seqs:
            raise ConfigurationError(
                f"max_num_batched_tokens {budget} is below max_num_seqs {seqs}: a step could not "
                "give every sequence a token; raise the first or lower the second"
            )
        return SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_shared_prefill_tokens=shared_prefill,
            policy=cast(SchedulingPolicy, args.scheduling_policy),
            max_num_queued_reqs=args.max_num_queued_reqs,
            max_num_queued_tokens=args.max_num_queued_tokens,
        )

    def _profiler_config(self) -> ProfilerConfig | None:
        given: dict[str, Any] = dict(self._args.profiler_config or {})
        if not given:
            return None
        directory, profiler = given.pop("torch_profiler_dir", None), given.pop("profiler", "torch")
        if given:
            raise UnsupportedFeatureError(
                f"--profiler-config: {', '.join(given)} is not implemented yet; known are profiler "
                "and torch_profiler_dir",
                "profiler_config",
            )
        if profiler != "torch" or not isinstance(directory, str) or not directory:
            raise ConfigurationError(
                'profiler_config must name a folder, as in {"torch_profiler_dir": "traces"}, '
                f"and the profiler must be torch; got {profiler!r} and {directory!r}"
            )
        return ProfilerConfig(str(Path(directory).expanduser().absolute()))


def _is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf"
