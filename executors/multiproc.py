"""Workers as processes on this machine, each with its part of the model."""

import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import NoReturn

from headrace.configs.config import EngineConfig
from headrace.configs.errors import HeadraceError, error_from_code
from headrace.executors.child_process import ChildProcess
from headrace.executors.executor import WorkerLostError
from headrace.executors.worker_messages import (
    CallDone,
    FromWorker,
    RunStep,
    StepDone,
    ToWorker,
    WorkerExit,
    WorkerFailed,
    WorkerHello,
    WorkerProgress,
    WorkerReady,
    decode_from_worker,
    encode,
)
from headrace.workers.protocol import (
    ModelRunnerOutput,
    SchedulerOutput,
    WorkerCall,
    WorkerInfo,
    WorkerResult,
    WorkerSetup,
)

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 1.0  # from the exit message to SIGKILL


class WorkerHandle:
    """A worker process, its connection and what it last said."""

    def __init__(self, rank: int, pass_fds: list[int]) -> None:
        self.rank = rank
        self.phase = "start of the process"  # of the start-up
        self.info: WorkerInfo | None = None
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = [
                "--connection", str(theirs.fileno()), "--rank", str(rank),
                "--log-level", str(logging.getLogger("headrace").getEffectiveLevel()),
            ]  # fmt: skip
            fds = [theirs.fileno(), *pass_fds]
            self.process = ChildProcess("headrace.executors.worker_process", arguments, fds)
        self.connection = Connection(ours.detach())

    def describe(self) -> str:
        return f"worker {self.rank} (pid {self.process.pid})"

    def lost(self) -> WorkerLostError:
        """The error that says how the process, which has ended, has done so."""
        text = f"{self.describe()} is gone: {self.process.describe_exit()}"
        return WorkerLostError(text, self.process.exit_code)


class MultiprocExecutor:
    """One process per worker; a step is encoded once and sent to all of them.

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
        parallel = config.parallel_config
        self.max_in_flight = parallel.pipeline_parallel_size
        self._config = config
        self._allows_callables = allows_callables
        self._on_death = on_death
        self._inherited = [] if lifeline is None else [lifeline]
        self._death: WorkerLostError | None = None  # why the executor is dead
        self._lock = threading.Lock()  # over `_death`
        self._outputs: deque[ModelRunnerOutput | Exception] = deque()
        self._results: dict[int, WorkerResult] = {}
        self._store = os.memfd_create("headrace-store")
        self._memories = [  # of the shards of each stage
            os.memfd_create(f"headrace-stage-{stage}")
            for stage in range(parallel.pipeline_parallel_size)
        ]
        self._workers: list[WorkerHandle] = []
        self._stopping, self._stop = os.pipe()  # wakes the watch

    def start(self, progress: Callable[[str], None]) -> WorkerInfo:
        """As `Executor.start`. All workers must be ready within `start_timeout_s`."""
        progress("workers")
        parallel = self._config.parallel_config
        for rank in range(parallel.world_size):
            memory = self._memories[rank // parallel.tensor_parallel_size]
            fds = [self._store, memory, *self._inherited]
            self._workers.append(WorkerHandle(rank, fds))
        for worker in self._workers:
            memory = self._memories[worker.rank // parallel.tensor_parallel_size]
            setup = WorkerSetup(
                rank=worker.rank,
                local_rank=worker.rank,
                local_size=parallel.world_size,
                machine_rank=parallel.local_worker(worker.rank),
                machine_size=parallel.num_local_workers,
                store=f"/proc/self/fd/{self._store}",
                shared_memory=f"/proc/self/fd/{memory}",
                answers=worker.rank == self._output_rank,
            )
            hello = WorkerHello(self._config, setup, sys.path, os.getcwd(), self._allows_callables)
            self._send(worker, encode(hello))
        try:
            self._wait_ready(progress, time.monotonic() + parallel.start_timeout_s)
        except BaseException:
            self.shutdown()
            raise
        threading.Thread(target=self._watch, name="worker-watch", daemon=True).start()
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

    def shutdown(self) -> None:
        with self._lock:
            self._death = self._death or WorkerLostError("the workers have been shut down")
        os.write(self._stop, b"x")
        for worker in self._workers:
            try:
                worker.connection.send_bytes(encode(WorkerExit()))
            except OSError:
                worker.process.kill()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for worker in self._workers:
            worker.process.stop(max(0.0, deadline - time.monotonic()))
            worker.connection.close()
        self._workers.clear()

    @property
    def _output_rank(self) -> int:
        """The first shard of the last stage samples."""
        parallel = self._config.parallel_config
        return parallel.world_size - parallel.tensor_parallel_size

    def _broadcast(self, message: ToWorker) -> None:
        encoded = encode(message)
        for worker in self._workers:
            self._send(worker, encoded)

    def _send(self, worker: WorkerHandle, encoded: bytes) -> None:
        self.check()
        try:
            worker.connection.send_bytes(encoded)
        except OSError:
            self._lose(worker)

    def _receive(self, deadline: float | None) -> bool:
        """Take what at least one worker has to say; False if `deadline` (monotonic) has passed."""
        self.check()
        by_handle: dict[object, WorkerHandle] = {}
        for worker in self._workers:
            by_handle[worker.connection] = by_handle[worker.process.sentinel] = worker
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait(list(by_handle), timeout)  # type: ignore[arg-type]
        for handle in ready:
            worker = by_handle[handle]
            if handle is not worker.connection:
                if not worker.connection.poll():  # what it had sent is taken first
                    self._lose(worker)
                continue
            try:
                message = decode_from_worker(worker.connection.recv_bytes())
            except (EOFError, OSError):
                self._lose(worker)
            self._take(worker, message)
        return bool(ready)

    def _take(self, worker: WorkerHandle, message: FromWorker) -> None:
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
                self._die(WorkerLostError(f"{worker.describe()}: {error}"), error)

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
            f"{self._config.parallel_config.start_timeout_s:g} s: {'; '.join(late)}. They meet "
            "through a file in memory and Gloo on the interface "
            f"{os.environ.get('GLOO_SOCKET_IFNAME', 'lo')}"
        )

    def _lose(self, worker: WorkerHandle) -> NoReturn:
        worker.process.kill()
        worker.process.wait()
        self._die(worker.lost())

    def _die(self, death: WorkerLostError, error: HeadraceError | None = None) -> NoReturn:
        with self._lock:
            self._death = death = self._death or death
        for worker in self._workers:
            worker.process.kill()
        raise error or death

    def _watch(self) -> None:
        """Notice the end of a worker also while nothing is asked of them."""
        sentinels = {worker.process.sentinel: worker for worker in self._workers}
        ready = wait([self._stopping, *sentinels])
        for handle in ready:
            if handle in sentinels:
                worker = sentinels[handle]  # type: ignore[index]
                worker.process.wait()
                with self._lock:
                    if self._death is not None:
                        return
                    self._death = worker.lost()
                for other in sentinels.values():
                    other.process.kill()
                self._on_death()
                return
