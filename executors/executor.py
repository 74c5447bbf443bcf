"""What the engine core asks of an executor, and the choice of one."""

import importlib
from collections.abc import Callable
from typing import Protocol

from headrace.configs.config import EngineConfig
from headrace.configs.errors import ConfigurationError, EngineDeadError
from headrace.workers.protocol import (
    ModelRunnerOutput,
    SchedulerOutput,
    WorkerCall,
    WorkerInfo,
    WorkerResult,
)


class WorkerLostError(EngineDeadError):
    """A worker process has ended; `exit_code` is negative for a signal."""

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Executor(Protocol):
    """The workers of one replica: starts them, gives all of them the same calls, watches them.

    One thread calls it. A worker that is lost is an EngineDeadError from whichever call meets it.
    """

    max_in_flight: int  # steps that may be submitted before the first of them is collected

    def start(self, progress: Callable[[str], None]) -> WorkerInfo:
        """Load the model and set up the KV cache; `progress` is told each phase as it begins."""

    def submit(self, step: SchedulerOutput) -> None:
        """Hand out a step; steps run in this order."""

    def collect(self) -> ModelRunnerOutput:
        """The output of the oldest step that was not collected.

        An exception other than EngineDeadError concerns that step alone.
        """

    def call_workers(self, call: WorkerCall) -> list[WorkerResult]:
        """Run a call on every worker, after the steps submitted so far; results by rank."""

    def check(self) -> None:
        """Raise EngineDeadError if a worker is gone."""

    def shutdown(self) -> None:
        """End the workers. Idempotent."""


def make_executor(
    config: EngineConfig,
    allows_callables: bool,
    on_death: Callable[[], None],
    lifeline: int | None = None,
) -> Executor:
    """The executor of the configuration's backend, not started.

    `on_death` is called, in any thread, when a worker is lost while nothing is asked of it.
    `lifeline`: a descriptor that worker processes are to keep open as long as they live.
    """
    backend = config.parallel_config.distributed_executor_backend
    names = {
        "uni": "headrace.executors.uniproc.UniprocExecutor",
        "mp": "headrace.executors.multiproc.MultiprocExecutor",
        "ray": "headrace.executors.ray_executor.RayExecutor",
        "external_launcher": "headrace.executors.external_launcher.ExternalLauncherExecutor",
    }
    if config.parallel_config.nnodes > 1:  # which goes with mp only
        backend = "headrace.executors.multinode.MultiNodeExecutor"
    module, _, name = names.get(backend, backend).rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"distributed_executor_backend {backend!r} is neither one of {', '.join(names)} nor a "
            f"class that can be imported: {error}"
        ) from error
    executor: Executor = cls(config, allows_callables, on_death, lifeline)
    return executor
