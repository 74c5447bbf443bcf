"""Frozen, resolved configuration: what the engine runs with, after every default is filled in.

`EngineArgs.create_engine_config()` makes an `EngineConfig`; it travels once, as msgpack, to the
engine core. Nothing here is looked up later: classes get the part they need as an argument.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

DType = Literal["float32", "bfloat16", "float16"]
SchedulingPolicy = Literal["fcfs", "priority"]
LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
QuantizationMethod = Literal["none", "gguf", "int8_per_channel_weight_only"]


@dataclass(frozen=True)
class ModelConfig:
    """A model on disk and how to run it.

    `hf_config` has the field names of a transformers `config.json` (text part only), whatever the
    file format; the model definitions read nothing else.
    """

    model: str  # as the user named it
    path: str  # the directory or .gguf file it resolved to
    tokenizer_path: str  # directory, tokenizer.json or .gguf file that the tokenizer comes from
    served_model_names: tuple[str, ...]
    architecture: str  # e.g. "LlamaForCausalLM"
    hf_config: dict[str, Any]
    dtype: DType
    max_model_len: int
    vocab_size: int  # width of the logits
    # The union of what tokenizer, model and generation files say: the primary one, which ends a
    # request with stop_reason None, and the rest.
    eos_token_id: int | None
    extra_eos_token_ids: tuple[int, ...] = ()
    # Sampling values for what a request leaves unset, and where each of them comes from.
    default_sampling_params: dict[str, Any] = field(default_factory=dict)
    sampling_param_sources: dict[str, str] = field(default_factory=dict)
    max_output_tokens: int | None = None  # the operator's cap for every request
    max_logprobs: int = 20  # -1: no cap
    logprobs_mode: LogprobsMode = "raw_logprobs"
    seed: int | None = None
    weight_version: str = "default"
    skip_tokenizer_init: bool = False  # token ids in, token ids out
    renderer_num_workers: int = 1  # threads that tokenize and render templates
    quantization: QuantizationMethod = "none"  # how weights are kept; see `quantization.py`

    @property
    def served_model_name(self) -> str:
        return self.served_model_names[0]


KVCacheDtype = Literal["auto", "bfloat16", "float16", "float32", "int8"]


@dataclass(frozen=True)
class CacheConfig:
    """KV-cache size and prefix caching. `num_blocks` None: decided from memory by the worker."""

    block_size: int = 16  # tokens per block
    gpu_memory_utilization: float = 0.92  # most of the device's memory that this engine may take
    enable_prefix_caching: bool = True
    kv_cache_memory_bytes: int | None = None
    num_blocks: int | None = None
    kv_cache_dtype: KVCacheDtype = "auto"  # auto: as the model


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step and the order of the queue."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    # Most prompt tokens in a step while several sequences want tokens; None: as many as fit.
    max_shared_prefill_tokens: int | None = None
    policy: SchedulingPolicy = "fcfs"
    max_bypasses: int = 64  # how often a waiting head that does not fit may be overtaken
    ageing_s: float = 10.0  # priority policy: waiting this long is worth one priority level
    max_num_queued_reqs: int | None = None  # waiting requests before new ones are refused (503)
    max_num_queued_tokens: int | None = None  # the same in prompt tokens


# "module.Class" names an executor class of the user's own.
ExecutorBackend = Literal["uni", "mp", "ray", "external_launcher"] | str


@dataclass(frozen=True)
class ParallelConfig:
    """How many workers run the model and each replica of it, and what is mixed into their class.

    A replica's workers have ranks 0 to `world_size` - 1: stage by stage, and in a stage shard by
    shard. Replicas know nothing of each other; this engine runs those in `ranks`.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1  # replicas in all, those of other servers included
    data_parallel_size_local: int = 1
    data_parallel_start_rank: int = 0  # of the first replica here
    data_parallel_rank: int = 0  # in an engine core: of its replica
    # What all replicas here may take together, found out before any of them took some. None: what
    # each of them finds.
    memory_available: int | None = None
    # Who starts the replicas' engine cores: the supervisor on its machine, or Ray on some node. Of
    # a node, how many replicas divide it, and which of them this is; None: all of this engine.
    data_parallel_backend: Literal["mp", "ray"] = "mp"
    replicas_on_node: int | None = None
    replica_on_node: int = 0
    distributed_executor_backend: ExecutorBackend = "uni"
    # Layers of each stage; None: as even as the stages' parameters can be.
    pp_layer_partition: tuple[int, ...] | None = None
    # "module.Class" in place of the worker's own class; "" for that.
    worker_cls: str = ""
    # "module.Class" whose methods join the worker's, for collective_rpc; "" for none.
    worker_extension_cls: str = ""
    start_timeout_s: float = 600.0  # for all workers to be there, and to load the model
    # Of Ray: the cluster to join, the placement group of the workers (its id, in hexadecimal), and
    # what a worker takes one of. `initialize_ray_cluster` sets the first two.
    ray_address: str | None = None
    placement_group: str | None = None
    ray_resource: Literal["CPU", "GPU"] = "CPU"
    # Machines that run workers (mp); machine 0 has the engine core and listens at the address.
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    cluster_key_file: str = ""

    @property
    def runs_in_core(self) -> bool:
        """Whether the worker, which is the only one, is in the engine core's process here."""
        return self.distributed_executor_backend == "uni" and self.data_parallel_backend != "ray"

    @property
    def world_size(self) -> int:
        """Workers of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks(self) -> range:
        """Of the replicas that this engine runs."""
        first = self.data_parallel_start_rank
        return range(first, first + self.data_parallel_size_local)

    @property
    def num_local_workers(self) -> int:
        """Workers of all replicas on a machine, which divide it."""
        return (self.replicas_on_node or self.data_parallel_size_local) * self.world_size

    def local_worker(self, rank: int) -> int:
        """Number among those of a worker of this engine core's replica."""
        replica = self.replica_on_node
        if self.replicas_on_node is None:
            replica = self.data_parallel_rank - self.data_parallel_start_rank
        return replica * self.world_size + rank


@dataclass(frozen=True)
class RecoveryConfig:
    """What happens when an engine core dies or stands still. `docs/recovery.md` explains it."""

    max_restarts: int = 10  # within the window; one more death ends the engine
    restart_window_s: float = 600.0
    step_timeout_s: float = 300.0  # that an engine core may take for a step before it is killed
    # Replay requests also after calls that may have changed the worker, of which a fresh one does
    # not know.
    allow_replay_after_rpc: bool = False


WeightTransferBackend = Literal["gloo", "shm"]


@dataclass(frozen=True)
class WeightTransferConfig:
    """How weights may be replaced while the engine runs; by default not at all.

    `update_root`: absolute path of the folder below which checkpoints may be named. `backend`: how
    tensors come from another process: broadcast in a group of torch.distributed, or in shared
    memory.
    """

    update_root: str | None = None
    backend: WeightTransferBackend | None = None


@dataclass(frozen=True)
class SleepConfig:
    """Whether the engine may sleep, and where it leaves weights that no file has meanwhile."""

    is_enabled: bool = False
    spill_dir: str | None = None  # None: the system's folder for temporary files


@dataclass(frozen=True)
class DeviceConfig:
    """What the model runs on."""

    device: Literal["cpu"] = "cpu"


@dataclass(frozen=True)
class LoadConfig:
    """How weights come into memory. `dummy` fills them with random values and reads no file."""

    load_format: LoadFormat = "auto"
    download_dir: str | None = None


@dataclass(frozen=True)
class DecodingConfig:
    """Structured output and reasoning; the empty parser name means none."""

    backend: str = "auto"
    reasoning_backend: str = ""


@dataclass(frozen=True)
class ObservabilityConfig:
    """What is measured and how often it is logged."""

    log_stats_interval_s: float = 10.0


@dataclass(frozen=True)
class ProfilerConfig:
    """Where `start_profile` and `stop_profile` leave traces of torch's profiler."""

    torch_profiler_dir: str  # absolute


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine core needs; the value of the start-up handshake."""

    model_config: ModelConfig
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    device_config: DeviceConfig = field(default_factory=DeviceConfig)
    recovery_config: RecoveryConfig = field(default_factory=RecoveryConfig)
    load_config: LoadConfig = field(default_factory=LoadConfig)
    weight_transfer_config: WeightTransferConfig = field(default_factory=WeightTransferConfig)
    sleep_config: SleepConfig = field(default_factory=SleepConfig)
    decoding_config: DecodingConfig = field(default_factory=DecodingConfig)
    observability_config: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    profiler_config: ProfilerConfig | None = None  # None: profiling is refused
    lora_config: None = None
    speculative_config: None = None
    prompt_adapter_config: None = None
    log_stats: bool = True
