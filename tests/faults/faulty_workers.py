"""Workers that are slow enough to be hit, that a certain token kills, or that start only once."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from headrace.workers.protocol import ModelRunnerOutput, SchedulerOutput
from headrace.workers.worker import Worker

STEP_S = 0.005
POISON = 66
STUCK = 77
MARKER = "RECOVERY_TEST_MARKER"  # path of a file whose existence keeps `StartsOnce` from starting


class SlowWorker(Worker):
    """Each step takes a while."""

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        time.sleep(STEP_S)
        return super().execute_model(step)


class PoisonedWorker(SlowWorker):
    """Dies of a step with POISON in a prompt; stands still at STUCK."""

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for request in step.new_requests:
            if POISON in request.token_ids[: request.num_prompt_tokens]:
                os.abort()
            if STUCK in request.token_ids[: request.num_prompt_tokens]:
                time.sleep(3600)
        return super().execute_model(step)


class StartsOnce(SlowWorker):
    """Does not load while there is the marker."""

    def load_model(self, progress: Callable[[str], None]) -> None:
        if Path(os.environ[MARKER]).exists():
            raise RuntimeError("the marker says no")
        super().load_model(progress)


def name_of(worker: type[Worker]) -> str:
    """For `worker_cls`, of a process that has this file's folder in its `sys.path`."""
    return f"{Path(__file__).stem}.{worker.__qualname__}"
