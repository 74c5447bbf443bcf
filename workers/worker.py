"""A worker on the CPU: device set-up, weights, KV cache, warm-up, steps."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from headrace.configs import environment
from headrace.configs.config import EngineConfig
from headrace.configs.hardware import CpuFacts, cpu_facts
from headrace.configs.quantization import INT8
from headrace.configs.sampling_params import SamplingParams
from headrace.kernels.native import NativeKernels, load_kernels
from headrace.workers.distributed import Place
from headrace.workers.distributed.groups import WorkerGroups, join_groups
from headrace.workers.distributed.shared_memory import StepLimits
from headrace.workers.kv_cache import KVCache, choose_cache_dtype, make_kv_cache_spec
from headrace.workers.live_weights import LiveWeights
from headrace.workers.logprobs import SCORE_ROWS
from headrace.workers.memory_budget import MemoryBudget, plan_memory
from headrace.workers.model_runner import ModelRunner
from headrace.workers.models import Decoder, build_model, load_weights
from headrace.workers.models.native_decoder import NativeDecoder, obstacle
from headrace.workers.protocol import (
    CachedRequestData,
    ChoiceId,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    WorkerInfo,
    WorkerSetup,
)
from headrace.workers.random_weights import random_weights
from headrace.workers.remote_calls import RemoteCalls
from headrace.workers.weight_formats import WeightFormats
from headrace.workers.weight_loader import Weight, iter_weights, rounded_to_int8, stored_types

logger = logging.getLogger(__name__)

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_WARM_UP_TOKENS = 16
ALONE_HERE = WorkerSetup()


class Worker(RemoteCalls, LiveWeights):
    """Runs a model, or its part of one, on this machine's CPUs.

    Calls come in the order of the methods below, from one thread. Where there are several workers,
    all get the same calls.
    """

    def __init__(self, config: EngineConfig, setup: WorkerSetup = ALONE_HERE) -> None:
        self.config = config
        self.setup = setup
        self._groups = WorkerGroups(Place.of(setup.rank, config.parallel_config))
        self._phases: dict[str, float] = {}
        self._facts: CpuFacts | None = None
        self._kernels: NativeKernels | None = None
        self._model: Decoder | None = None
        self._kv_cache: KVCache | None = None
        self._budget: MemoryBudget | None = None
        self._runner: ModelRunner | None = None

    @property
    def kv_cache(self) -> KVCache:
        if self._kv_cache is None:
            raise RuntimeError("load_model makes the KV cache")
        return self._kv_cache

    def init_device(self) -> None:
        """Threads from what this process may use; denormals flushed to zero in all of them.

        Threads of the pool take the flag over from the thread that starts them, so it is set before
        any computation. Workers on one machine divide its cores. Then the worker meets the others.
        """
        memory = self.config.parallel_config.memory_available
        setup = self.setup
        self._facts = cpu_facts().shared(setup.machine_rank, setup.machine_size, memory)
        if setup.machine_size > 1:
            os.sched_setaffinity(0, self._facts.allowed_cpus)
        torch.set_flush_denormal(True)
        torch.set_num_threads(self._facts.num_threads)
        logger.info("%s", self._facts.describe())
        choice = environment.read(environment.CPU_KERNELS, os.environ)
        pinning = environment.read(environment.CPU_PINNING, os.environ) or "none"
        cpus = self._facts.helper_cpus(pinning)
        self._kernels = load_kernels(choice, self._facts.num_threads, cpus)
        with self._timed("meet the other workers"):
            scheduler = self.config.scheduler_config
            limits = StepLimits(
                max(_WARM_UP_TOKENS, scheduler.max_num_batched_tokens),
                max(SCORE_ROWS, scheduler.max_num_seqs),
            )
            parallel = self.config.parallel_config
            self._groups = join_groups(self.setup, parallel, self._kernels, limits)
        if self._groups.world.size == 1:
            del self._phases["meet the other workers"]

    def load_model(self, progress: Callable[[str], None]) -> None:
        """Size everything, allocate it and copy the weights.

        Raises `InsufficientMemoryError` before anything is allocated, `ModelFileError` for a bad
        file.
        """
        model_config = self.config.model_config
        dtype = _DTYPES[model_config.dtype]
        with self._timed("size memory"):
            model = self._build_model(model_config.path)
            self._log_kernels(model)
            attention = model.config.attention
            cache_dtype = choose_cache_dtype(
                self.config.cache_config.kv_cache_dtype, dtype, model.kernels is not None
            )
            whole_spec = make_kv_cache_spec(
                model.windows,
                self.config.cache_config.block_size,
                attention.num_kv_heads,
                attention.head_dim,
                cache_dtype,
            )
            spec = whole_spec.of_layers(model.part.layers)
            share = self.config.cache_config.gpu_memory_utilization
            available = (self._facts or cpu_facts()).memory_for(share)
            num_bytes = model.num_weight_bytes + model.num_rotary_bytes(model_config.max_model_len)
            self._budget = plan_memory(self.config, model.config, spec, num_bytes, available)
            num_blocks = self._groups.least(self._budget.num_blocks)
            model.allocate(model_config.max_model_len)
            self._kv_cache = KVCache(spec, num_blocks, cache_dtype)
            logger.info("%s", self._kv_cache.describe())
        with self._timed("load weights"), torch.inference_mode():
            load_weights(model, self._read_weights(model, model_config.path), model_config.path)
        self._model = model
        self.note_weight_source(model_config.path)

    def init_kv_cache(self) -> WorkerInfo:
        """Join model and cache to a runner and report.

        `phases` gets the warm-up's seconds when that is done.
        """
        if self._model is None or self._kv_cache is None or self._budget is None:
            raise RuntimeError("load_model comes before init_kv_cache")
        self._runner = ModelRunner(
            self._model, self._kv_cache, self.config.model_config.logprobs_mode, self._groups
        )
        return WorkerInfo(
            kv_cache_spec=self._kv_cache.spec,
            num_blocks=self._kv_cache.num_blocks,
            contract_id=self._contract_id(),
            phases=self._phases,
            memory=self._budget.lines(),
            num_threads=torch.get_num_threads(),
        )

    def _build_model(self, path: str) -> Decoder:
        """This worker's part of the model for the weights at `path`, without memory for them."""
        config = self.config.model_config
        is_stored = config.quantization == "gguf"
        return build_model(
            config.architecture,
            config.hf_config,
            _DTYPES[config.dtype],
            path,
            self._kernels,
            WeightFormats(config.quantization, stored_types(path) if is_stored else {}),
            self._groups.place,
            self.config.parallel_config.pp_layer_partition,
            self._groups.shards,
        )

    def _read_weights(self, model: Decoder, path: str) -> Iterator[Weight]:
        """What the model's slots take of the checkpoint at `path`.

        Rounded as if quantized where there is no kernel for it.
        """
        config = self.config.model_config
        shares = model.shares if self._groups.world.size > 1 else None
        weights: Iterator[Weight]
        if self._is_random(path):
            weights = random_weights(path, config.hf_config, model.dtype, shares)
        else:
            weights = iter_weights(
                path, config.hf_config, model.dtype, model.stored_matrices, shares
            )
        if config.quantization == INT8 and model.kernels is None:
            return rounded_to_int8(weights, model.stored_matrices, model.dtype)
        return weights

    def _log_kernels(self, model: Decoder) -> None:
        if isinstance(model, NativeDecoder):
            logger.info("CPU kernels: %s", model.kernels.contract)
        elif self._kernels is not None:
            reason = obstacle(model.config, model.dtype)
            logger.info("CPU kernels: torch; the native ones are left out: %s", reason)
        else:
            logger.info("CPU kernels: torch")
        formats, dtype = model.matrix_formats, self.config.model_config.dtype
        logger.info("%s", formats.describe(model.num_weight_bytes))
        if formats.unsupported:
            logger.info(
                "%d matrices are kept in %s: there is no kernel for them as they are (%s, ...)",
                len(formats.unsupported),
                dtype,
                formats.unsupported[0],
            )
        elif formats.method != "none" and model.kernels is None:
            logger.info(
                "quantized weights are dequantized into %s: torch computes with them", dtype
            )

    def _contract_id(self) -> str:
        """Names the rules of arithmetic: library, types of model and cache, instruction sets."""
        config = self.config.model_config
        library = f"torch-{torch.__version__}-{config.dtype}"
        if config.quantization != "none":
            library += f"-{config.quantization}"
        library += f"-kv-{str(self.kv_cache.pool.dtype).removeprefix('torch.')}"
        parallel = self.config.parallel_config
        if parallel.world_size > 1:
            library += f"-tp{parallel.tensor_parallel_size}-pp{parallel.pipeline_parallel_size}"
        isa = "+".join(sorted((self._facts or cpu_facts()).isa))
        if isinstance(self._model, NativeDecoder):
            return f"{self._model.kernels.contract}-{library}-{isa}"  # torch edits logits
        return f"{library}-reference-{isa}"

    def warm_up(self) -> None:
        """Run prefill, decode and every kind of sampling once: the first request is not slower.

        Uses blocks of the empty cache and leaves them zeroed. Then the cache's other pages are
        touched, whenever no step runs; not before, since on memory that the machine has to find
        first, touching holds everything else up.
        """
        with self._timed("warm up"):
            for index, params in enumerate(_warm_up_params()):
                for step in self._warm_up_steps(index, params):
                    for fault in self.execute_model(step).failed.values():
                        logger.warning("warm-up: %s", fault.message)
        self.kv_cache.toucher.start()

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step.

        An exception here concerns the whole batch; single faults are in the output.
        """
        if self._runner is None:
            raise RuntimeError("init_kv_cache comes before execute_model")
        with self.kv_cache.toucher.held():
            return self._runner.execute(step)

    def share(self, data: bytes, source: int) -> bytes:
        """What the worker of rank `source` gives, on all workers. All of them call it."""
        return self._groups.share(data, source)

    def shutdown(self) -> None:
        """Stop what runs in the background; memory goes with the worker itself."""
        self.leave_weight_group()
        if self._kv_cache is not None:
            self._kv_cache.close()
        self._groups.close()

    def _warm_up_steps(self, index: int, params: SamplingParams) -> Iterator[SchedulerOutput]:
        """A prompt, two decode steps, and the end."""
        spec, config = self.kv_cache.spec, self.config
        num_groups = len(spec.groups)
        blocks_per_group = (self.kv_cache.num_blocks - 1) // num_groups
        num_tokens = min(
            _WARM_UP_TOKENS,
            config.scheduler_config.max_num_batched_tokens,
            config.model_config.max_model_len - 2,
            blocks_per_group * spec.block_size - 2,
        )
        if num_tokens < 1:
            return
        per_group = -(-(num_tokens + 2) // spec.block_size)
        ids = range(1, 1 + num_groups * per_group)
        tables = [list(ids[group::num_groups]) for group in range(num_groups)]
        choice = ChoiceId(f"warm-up {index}")
        token_ids = [token % config.model_config.vocab_size for token in range(num_tokens)]
        new = NewRequestData(choice, token_ids, num_tokens, params, tables, 0)
        yield SchedulerOutput(0, [new], [], {choice: num_tokens}, [])
        for computed in (num_tokens, num_tokens + 1):
            cached = CachedRequestData(choice, [[] for _ in tables], computed)
            yield SchedulerOutput(0, [], [cached], {choice: 1}, [])
        yield SchedulerOutput(0, [], [], {}, [choice], blocks_to_zero=list(ids))

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._phases[phase] = time.perf_counter() - start


def _warm_up_params() -> tuple[SamplingParams, ...]:
    return (
        SamplingParams(temperature=0.0, max_tokens=None, logprobs=2),
        SamplingParams(max_tokens=None, seed=0, top_k=20, top_p=0.9, min_p=0.01, logprobs=0),
        SamplingParams(
            max_tokens=None, seed=0, repetition_penalty=1.1, frequency_penalty=0.1,
            logit_bias={0: 1.0}, prompt_logprobs=2,
        ),
    )  # fmt: skip
