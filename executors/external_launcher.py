"""Workers in processes that torchrun has started, each with an engine of its own.

All engines are given the same requests in the same order, schedule alike, and have all outputs.
"""

import os
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from headrace.configs.config import EngineConfig, ParallelConfig
from headrace.configs.errors import ConfigurationError, EngineDeadError
from headrace.executors.worker_host import WorkerHost
from headrace.workers.protocol import (
    ChoiceId,
    ModelRunnerOutput,
    RequestFault,
    SchedulerOutput,
    WorkerCall,
    WorkerInfo,
    WorkerResult,
    WorkerSetup,
)


class SharedOutput(msgspec.Struct, array_like=True):
    """From the worker that samples to all: its step, in the order of its schedule, and output."""

    choice_ids: list[ChoiceId]
    num_tokens: list[int]
    output: ModelRunnerOutput | None
    fault: RequestFault | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SharedOutput).decode


class ExternalLauncherExecutor:
    """Runs this process's worker when a step is submitted; the output comes to every process.

    With several stages a process would wait for the sampled tokens of its own step, so the outputs
    of a step are exchanged only when they are collected.
    """

    def __init__(
        self,
        config: EngineConfig,
        allows_callables: bool,
        on_death: Callable[[], None],
        lifeline: int | None = None,
    ) -> None:
        parallel = config.parallel_config
        self.max_in_flight = parallel.pipeline_parallel_size
        self._setup = launched_setup(parallel, os.environ)
        self._output_rank = parallel.world_size - parallel.tensor_parallel_size
        self._host = WorkerHost(config, self._setup, allows_callables)
        self._done: deque[tuple[SchedulerOutput, ModelRunnerOutput | None, RequestFault | None]]
        self._done = deque()

    def start(self, progress: Callable[[str], None]) -> WorkerInfo:
        return self._host.start(progress)

    def submit(self, step: SchedulerOutput) -> None:
        try:
            self._done.append((step, self._host.execute_model(step), None))
        except Exception as error:
            if self._setup.local_size > 1 or self._output_rank > 0:
                raise EngineDeadError(  # the others wait for this worker in vain
                    f"worker {self._setup.rank} failed in step {step.step}: "
                    f"{type(error).__name__}: {error}"
                ) from error
            fault = RequestFault("request_failed", f"{type(error).__name__}: {error}")
            self._done.append((step, None, fault))

    def collect(self) -> ModelRunnerOutput:
        step, output, fault = self._done.popleft()
        own_ids, counts = list(step.num_scheduled_tokens), list(step.num_scheduled_tokens.values())
        message = b""
        if self._setup.rank == self._output_rank:
            message = _encode(SharedOutput(own_ids, counts, output, fault))
        shared = _decode(self._host.share(message, self._output_rank))
        if shared.num_tokens != counts:
            raise EngineDeadError(
                f"the processes do not schedule alike: step {step.step} has sequences of "
                f"{counts} tokens on rank {self._setup.rank}, and of {shared.num_tokens} on rank "
                f"{self._output_rank}; give all of them the same requests in the same order"
            )
        if shared.output is None:
            raise RuntimeError(shared.fault.message if shared.fault else "the step failed")
        return _renamed(shared.output, dict(zip(shared.choice_ids, own_ids, strict=True)))

    def call_workers(self, call: WorkerCall) -> list[WorkerResult]:
        """Of this process's worker alone; the other processes have theirs."""
        return [self._host.call(call)]

    def check(self) -> None:
        pass

    def shutdown(self) -> None:
        self._host.shutdown()


def launched_setup(parallel: ParallelConfig, environ: Mapping[str, str]) -> WorkerSetup:
    """Which worker this process is, from torchrun's variables. Raises ConfigurationError."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not environ.get(name)]
    if missing:
        raise ConfigurationError(
            f"distributed_executor_backend external_launcher needs {', '.join(missing)} in the "
            f"environment: start the program with torchrun --nproc-per-node {parallel.world_size}"
        )
    try:
        rank, world_size, local_rank = (int(environ[name]) for name in names[:3])
        local_size = int(environ.get("LOCAL_WORLD_SIZE") or world_size)
    except ValueError as error:
        raise ConfigurationError(
            f"one of {', '.join(names[:3])} in the environment is no number: {error}"
        ) from error
    if world_size != parallel.world_size or not 0 <= rank < world_size:
        raise ConfigurationError(
            f"torchrun has started {world_size} processes (this is rank {rank}), but "
            f"tensor_parallel_size {parallel.tensor_parallel_size} and pipeline_parallel_size "
            f"{parallel.pipeline_parallel_size} need {parallel.world_size}"
        )
    return WorkerSetup(rank, local_rank, local_size, store="env://" if world_size > 1 else "")


def _renamed(output: ModelRunnerOutput, names: Mapping[ChoiceId, ChoiceId]) -> ModelRunnerOutput:
    """The output with this process's ids in place of the other's."""
    return ModelRunnerOutput(
        output.step,
        {names[choice]: tokens for choice, tokens in output.sampled.items()},
        {names[choice]: fault for choice, fault in output.failed.items()},
        {names[choice]: scores for choice, scores in output.prompt_logprobs.items()},
    )
