"""One worker in the calling process: no extra hop."""

import importlib
from collections.abc import Callable
from typing import Any

from headrace.configs.config import EngineConfig
from headrace.workers.protocol import ModelRunnerOutput, SchedulerOutput, WorkerInfo

DEFAULT_WORKER = "headrace.workers.worker:Worker"


def preload(worker_class: str = DEFAULT_WORKER) -> None:
    """Import what workers need (torch takes seconds) while the configuration is on its way."""
    importlib.import_module(worker_class.partition(":")[0])


class UniprocExecutor:
    """Runs `worker_class` ("module:Class") in this process; the import of it loads torch."""

    def __init__(self, config: EngineConfig, worker_class: str = DEFAULT_WORKER) -> None:
        module, _, name = worker_class.partition(":")
        self._worker: Any = getattr(importlib.import_module(module), name)(config)

    def start(self, progress: Callable[[str], None]) -> WorkerInfo:
        """Load the model and set up the KV cache; `progress` is told each phase as it begins."""
        progress("device")
        self._worker.init_device()
        progress("weights")
        self._worker.load_model(progress)
        progress("KV cache")
        info: WorkerInfo = self._worker.init_kv_cache()
        progress("warm-up")
        self._worker.warm_up()
        return info

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step.

        An exception here concerns the whole batch; single faults are in the output.
        """
        output: ModelRunnerOutput = self._worker.execute_model(step)
        return output

    def shutdown(self) -> None:
        """Stop what the worker runs in the background."""
        self._worker.shutdown()
