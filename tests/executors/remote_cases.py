"""What every executor with workers in other processes is tested with."""

import threading
from collections.abc import Callable

from headrace.configs.config import EngineConfig, ModelConfig, ParallelConfig
from headrace.executors.remote_executor import RemoteExecutor
from headrace.workers.protocol import SchedulerOutput
from tests.executors.recording_worker import NAME


def make_config(tp: int = 1, pp: int = 1, timeout_s: float = 60.0) -> EngineConfig:
    """Of recording workers."""
    model = ModelConfig("m", "m", "m", ("m",), "None", {}, "float32", 64, 32, 1)
    parallel = ParallelConfig(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        worker_cls=NAME,
        start_timeout_s=timeout_s,
    )
    return EngineConfig(model, parallel_config=parallel)


def make_step(number: int) -> SchedulerOutput:
    return SchedulerOutput(number, [], [], {}, [])


class Started:
    """An executor that is up, and the event of a death that nobody waited for."""

    def __init__(
        self, cls: Callable[..., RemoteExecutor], config: EngineConfig, lifeline: int | None = None
    ) -> None:
        self.death = threading.Event()
        self.phases: list[str] = []
        self.executor = cls(config, True, self.death.set, lifeline)
        self.info = self.executor.start(self.phases.append)
