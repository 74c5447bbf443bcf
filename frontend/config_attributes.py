"""Attributes of the public engines that name a part of their configuration."""

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


class ConfigAttributes:
    """Mixed into an engine that has `config`."""

    config: EngineConfig

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
