"""One worker in the calling process: no extra hop."""

from collections import deque
from collections.abc import Callable

from headrace.configs.config import EngineConfig
from headrace.executors.worker_host import WorkerHost
from headrace.workers.protocol import (
    ModelRunnerOutput,
    SchedulerOutput,
    WorkerCall,
    WorkerInfo,
    WorkerResult,
    WorkerSetup,
)


class UniprocExecutor:
    """Runs the worker in this process, when a step is collected."""

    max_in_flight = 1

    def __init__(
        self,
        config: EngineConfig,
        allows_callables: bool,
        on_death: Callable[[], None],
        lifeline: int | None = None,
    ) -> None:
        parallel = config.parallel_config
        setup = WorkerSetup(
            machine_rank=parallel.local_worker(0), machine_size=parallel.num_local_workers
        )
        self._host = WorkerHost(config, setup, allows_callables)
        self._steps: deque[SchedulerOutput] = deque()

    def start(self, progress: Callable[[str], None]) -> WorkerInfo:
        return self._host.start(progress)

    def submit(self, step: SchedulerOutput) -> None:
        self._steps.append(step)

    def collect(self) -> ModelRunnerOutput:
        return self._host.execute_model(self._steps.popleft())

    def call_workers(self, call: WorkerCall) -> list[WorkerResult]:
        return [self._host.call(call)]

    def check(self) -> None:
        pass

    def shutdown(self) -> None:
        self._host.shutdown()
