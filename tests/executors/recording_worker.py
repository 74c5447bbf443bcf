"""A worker that runs no model: it remembers its steps, and can be told to fail."""

import os
import time
from collections.abc import Callable
from typing import Any

from headrace.configs.config import EngineConfig
from headrace.workers.protocol import (
    KVCacheSpec,
    ModelRunnerOutput,
    SchedulerOutput,
    WorkerInfo,
    WorkerSetup,
)

FAILING_STEP = 13
FAILS_TO_LOAD = "RECORDING_WORKER_FAILS_TO_LOAD"  # a rank
NEVER_LOADS = "RECORDING_WORKER_NEVER_LOADS"  # a rank


class RecordingWorker:
    """Answers every step with its number."""

    def __init__(self, config: EngineConfig, setup: WorkerSetup) -> None:
        self.setup = setup
        self.steps: list[int] = []

    def init_device(self) -> None:
        pass

    def load_model(self, progress: Callable[[str], None]) -> None:
        if os.environ.get(FAILS_TO_LOAD) == str(self.setup.rank):
            raise RuntimeError("no weights")
        if os.environ.get(NEVER_LOADS) == str(self.setup.rank):
            time.sleep(3600)

    def init_kv_cache(self) -> WorkerInfo:
        spec = KVCacheSpec((), 0, 16, 1, 8, 4)
        return WorkerInfo(spec, 10 + self.setup.rank, "none", {}, {})

    def warm_up(self) -> None:
        pass

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if step.step == FAILING_STEP:
            raise RuntimeError("an unlucky number")
        self.steps.append(step.step)
        return ModelRunnerOutput(step.step, {})

    def shutdown(self) -> None:
        pass

    # For collective_rpc

    def seen(self) -> list[int]:
        return self.steps

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def place(self) -> dict[str, Any]:
        setup = self.setup
        return {
            "rank": setup.rank,
            "local": [setup.local_rank, setup.local_size],
            "answers": setup.answers,
            "pid": os.getpid(),
        }

    def fail_on(self, rank: int) -> int:
        if self.setup.rank == rank:
            raise LookupError("not on this one")
        return self.setup.rank


NAME = f"{RecordingWorker.__module__}.{RecordingWorker.__qualname__}"
