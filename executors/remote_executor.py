"""What executors share whose workers are in other processes: messages out and in, one death."""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

from headrace.configs.config import EngineConfig
from headrace.configs.errors import HeadraceError, error_from_code
from headrace.executors.executor import WorkerLostError
from headrace.executors.worker_messages import (
    CallDone,
    FromWorker,
    RunStep,
    StepDone,
    ToWorker,
    WorkerFailed,
    WorkerProgress,
    WorkerReady,
    encode,
)
from headrace.workers.protocol import (
    ModelRunnerOutput,
    SchedulerOutput,
    WorkerCall,
    WorkerInfo,
    WorkerResult,
)


class RemoteWorker(Protocol):
    """A worker elsewhere, and what it last said."""

    rank: int
    phase: str  # of the start-up
    info: WorkerInfo | None  # once it takes steps

    def describe(self) -> str:
        """The worker, its process and where it is, for a message."""


class RemoteExecutor(ABC):
    """A step is encoded once and sent to all workers.

    Only the worker that samples answers, and any that fails. When one is lost or fails, the others
    wait for it in vain: all are ended, and the executor is dead.
    """

    def __init__(
        self,
        config: EngineConfig,
        allows_callables: bool,
        on_death: Callable[[], None],
        lifeline: int | None = None,
    ) -> None:
        """`on_death` is called, in a thread of the executor's, when a worker is lost."""
        self.max_in_flight = config.parallel_config.pipeline_parallel_size
        self._config = config
        self._allows_callables = allows_callables
        self._on_death = on_death
        self._lifeline = lifeline
        self._workers: Sequence[RemoteWorker] = []  # by rank
        self._death: WorkerLostError | None = None  # why the executor is dead
        self._lock = threading.Lock()  # over `_death`
        self._outputs: deque[ModelRunnerOutput | Exception] = deque()
        self._results: dict[int, WorkerResult] = {}

    def start(self, progress: Callable[[str], None]) -> WorkerInfo:
        """As `Executor.start`. All workers must be ready within `start_timeout_s`."""
        deadline = time.monotonic() + self._config.parallel_config.start_timeout_s
        try:
            progress("workers")
            self._launch(deadline)
            self._wait_ready(progress, deadline)
        except BaseException:
            self.shutdown()
            raise
        infos = [worker.info for worker in self._workers if worker.info is not None]
        return infos[0]

    def submit(self, step: SchedulerOutput) -> None:
        self._broadcast(RunStep(step))

    def collect(self) -> ModelRunnerOutput:
        while not self._outputs:
            self._receive(None)
        output = self._outputs.popleft()
        if isinstance(output, Exception):
            raise output
        return output

    def call_workers(self, call: WorkerCall) -> list[WorkerResult]:
        self._results.clear()
        self._broadcast(call)
        while len(self._results) < len(self._workers):
            self._receive(None)
        return [self._results[worker.rank] for worker in self._workers]

    def check(self) -> None:
        if self._death is not None:
            raise self._death

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers. Idempotent."""

    @abstractmethod
    def _launch(self, deadline: float) -> None:
        """Start the workers (monotonic `deadline`), set `_workers`, and watch them from now on."""

    @abstractmethod
    def _send_all(self, encoded: bytes) -> None:
        """Send a message to every worker. Raises EngineDeadError if one is gone."""

    @abstractmethod
    def _receive(self, deadline: float | None) -> bool:
        """Take what workers have to say; False if `deadline` (monotonic) has passed.

        Raises EngineDeadError if one is gone.
        """

    @abstractmethod
    def _kill_all(self) -> None:
        """End all workers at once, without asking them."""

    @abstractmethod
    def _meeting_place(self) -> str:
        """How and where the workers meet, for the message about those that did not come."""

    @property
    def _output_rank(self) -> int:
        """The first shard of the last stage samples."""
        parallel = self._config.parallel_config
        return parallel.world_size - parallel.tensor_parallel_size

    def _broadcast(self, message: ToWorker) -> None:
        self.check()
        self._send_all(encode(message))

    def _take(self, worker: RemoteWorker, message: FromWorker) -> None:
        match message:
            case WorkerProgress():
                worker.phase = message.phase
            case WorkerReady():
                worker.info = message.info
            case StepDone():
                self._outputs.append(message.output)
            case CallDone():
                self._results[worker.rank] = message.result
            case WorkerFailed():
                error = error_from_code(message.fault.code, message.fault.message)
                if worker.info is not None and len(self._workers) == 1:
                    self._outputs.append(error)  # of one step
                    return
                death = WorkerLostError(f"{worker.describe()}: {error}")
                self._die(death, error if worker.info is None else None)

    def _wait_ready(self, progress: Callable[[str], None], deadline: float) -> None:
        told = ""
        while any(worker.info is None for worker in self._workers):
            if not self._receive(deadline):
                self._die(WorkerLostError(self._late()))
            if self._workers[0].phase != told:
                told = self._workers[0].phase
                progress(told)

    def _late(self) -> str:
        late = [
            f"{worker.describe()} was at '{worker.phase}'"
            for worker in self._workers
            if worker.info is None
        ]
        return (
            f"{len(late)} of {len(self._workers)} workers were not ready within "
            f"{self._config.parallel_config.start_timeout_s:g} s: {'; '.join(late)}. "
            f"{self._meeting_place()}"
        )

    def _die(self, death: WorkerLostError, error: HeadraceError | None = None) -> NoReturn:
        """`error`: what to raise in its place, as a mistake in the options at start-up."""
        with self._lock:
            self._death = death = self._death or death
        self._kill_all()
        raise error or death
