"""What every engine has: names for parts of its configuration and of its front end."""

from typing import NoReturn

from headrace.configs.config import (
    CacheConfig,
    DecodingConfig,
    DeviceConfig,
    EngineConfig,
    LoadConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
)
from headrace.frontend.front_end import FrontEnd
from headrace.frontend.renderer import Renderer
from headrace.frontend.stats import StatLoggerBase
from headrace.frontend.tokenizers import Tokenizer


class EngineAttributes:
    """Mixed into an engine that has `config` and, once it is ready, `front_end`."""

    config: EngineConfig
    front_end: FrontEnd

    def __reduce__(self) -> NoReturn:
        raise RuntimeError(
            "an engine cannot be pickled; a callable for collective_rpc must not refer to it"
        )

    @property
    def renderer(self) -> Renderer:
        """What makes token ids of prompts."""
        return self.front_end.renderer

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.front_end.renderer.tokenizer

    @property
    def log_stats(self) -> bool:
        """Whether statistics are kept."""
        return self.config.log_stats

    @property
    def stat_loggers(self) -> dict[str, StatLoggerBase]:
        """By name: "logging", "prometheus" and what was added; none if statistics are disabled."""
        return self.front_end.stat_loggers.by_name

    def add_logger(self, logger_name: str, logger: StatLoggerBase) -> None:
        """RuntimeError if statistics are disabled, KeyError if the name is taken."""
        self.front_end.stat_loggers.add(logger_name, logger)

    def remove_logger(self, logger_name: str) -> None:
        """RuntimeError if statistics are disabled, KeyError if there is no such logger."""
        self.front_end.stat_loggers.remove(logger_name)

    @property
    def vllm_config(self) -> EngineConfig:
        """`config`, under the name that vLLM's users know."""
        return self.config

    @property
    def model_config(self) -> ModelConfig:
        return self.config.model_config

    @property
    def cache_config(self) -> CacheConfig:
        return self.config.cache_config

    @property
    def parallel_config(self) -> ParallelConfig:
        return self.config.parallel_config

    @property
    def scheduler_config(self) -> SchedulerConfig:
        return self.config.scheduler_config

    @property
    def device_config(self) -> DeviceConfig:
        return self.config.device_config

    @property
    def load_config(self) -> LoadConfig:
        return self.config.load_config

    @property
    def decoding_config(self) -> DecodingConfig:
        return self.config.decoding_config

    @property
    def observability_config(self) -> ObservabilityConfig:
        return self.config.observability_config

    @property
    def lora_config(self) -> None:
        return self.config.lora_config

    @property
    def speculative_config(self) -> None:
        return self.config.speculative_config

    @property
    def prompt_adapter_config(self) -> None:
        return self.config.prompt_adapter_config
