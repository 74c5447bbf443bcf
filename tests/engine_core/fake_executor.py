"""An executor without a model, for real engine-core processes that need no torch."""

import os
import time
from collections import defaultdict, deque
from collections.abc import Callable

from headrace.configs.config import EngineConfig
from headrace.workers.protocol import (
    ModelRunnerOutput,
    SchedulerOutput,
    WorkerCall,
    WorkerInfo,
    WorkerResult,
)
from tests.engine_core.factories import FakeWorker, make_spec

NUM_BLOCKS = 200
STEP_S = 0.002
POISON = 31  # as the first token of a prompt: the process ends when it runs
NAME = f"{__name__}.FakeExecutor"


class FakeExecutor:
    """Runs `FakeWorker`; a call gives the replica's rank."""

    max_in_flight = 1

    def __init__(
        self,
        config: EngineConfig,
        allows_callables: bool,
        on_death: Callable[[], None],
        lifeline: int | None = None,
    ) -> None:
        self._config = config
        block_size = config.cache_config.block_size
        self._spec = make_spec(block_size=block_size)
        self._worker = FakeWorker((None,), block_size, NUM_BLOCKS)
        self._worker.domains = defaultdict(str)
        self._steps: deque[SchedulerOutput] = deque()

    def start(self, progress: Callable[[str], None]) -> WorkerInfo:
        return WorkerInfo(self._spec, NUM_BLOCKS + 1, "fake", {}, {})

    def submit(self, step: SchedulerOutput) -> None:
        self._steps.append(step)

    def collect(self) -> ModelRunnerOutput:
        time.sleep(STEP_S)
        step = self._steps.popleft()
        if any(new.token_ids[0] == POISON for new in step.new_requests):
            os._exit(3)
        return self._worker.execute(step)

    def call_workers(self, call: WorkerCall) -> list[WorkerResult]:
        return [WorkerResult(self._config.parallel_config.data_parallel_rank)]

    def check(self) -> None:
        pass

    def shutdown(self) -> None:
        pass
