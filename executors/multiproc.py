"""Workers as processes on this machine, each with its part of the model."""

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import NoReturn

from headrace.configs.config import EngineConfig
from headrace.executors.child_process import ChildProcess
from headrace.executors.executor import WorkerLostError
from headrace.executors.remote_executor import RemoteExecutor
from headrace.executors.worker_messages import (
    WorkerExit,
    WorkerHello,
    decode_from_worker,
    encode,
)
from headrace.workers.protocol import WorkerInfo, WorkerSetup

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 1.0  # from the exit message to SIGKILL


class WorkerHandle:
    """A worker process, its connection and what it last said."""

    def __init__(self, rank: int, worker_cls: str, pass_fds: list[int]) -> None:
        self.rank = rank
        self.phase = "start of the process"  # of the start-up
        self.info: WorkerInfo | None = None
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = [
                "--connection", str(theirs.fileno()), "--rank", str(rank),
                "--worker-cls", worker_cls,
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


class MultiprocExecutor(RemoteExecutor):
    """One process per worker."""

    def __init__(
        self,
        config: EngineConfig,
        allows_callables: bool,
        on_death: Callable[[], None],
        lifeline: int | None = None,
    ) -> None:
        super().__init__(config, allows_callables, on_death, lifeline)
        self._store = os.memfd_create("headrace-store")
        self._memories = [  # of the shards of each stage
            os.memfd_create(f"headrace-stage-{stage}")
            for stage in range(config.parallel_config.pipeline_parallel_size)
        ]
        self._local: list[WorkerHandle] = []
        self._more_handles: dict[int, Callable[[], None]] = {}  # to wait for, and what to do then
        self._stopping, self._stop = os.pipe()  # wakes the watch

    def start(self, progress: Callable[[str], None]) -> WorkerInfo:
        info = super().start(progress)
        threading.Thread(target=self._watch, name="worker-watch", daemon=True).start()
        return info

    def shutdown(self) -> None:
        with self._lock:
            self._death = self._death or WorkerLostError("the workers have been shut down")
        os.write(self._stop, b"x")
        for worker in self._local:
            try:
                worker.connection.send_bytes(encode(WorkerExit()))
            except OSError:
                worker.process.kill()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for worker in self._local:
            worker.process.stop(max(0.0, deadline - time.monotonic()))
            worker.connection.close()
        self._local.clear()
        self._workers = []

    def _launch(self, deadline: float) -> None:
        parallel = self._config.parallel_config
        inherited = [] if self._lifeline is None else [self._lifeline]
        for rank in range(parallel.world_size):
            memory = self._memories[rank // parallel.tensor_parallel_size]
            fds = [self._store, memory, *inherited]
            self._local.append(WorkerHandle(rank, parallel.worker_cls, fds))
        self._workers = self._local
        for worker in self._local:
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

    def _send_all(self, encoded: bytes) -> None:
        for worker in self._local:
            self._send(worker, encoded)

    def _send(self, worker: WorkerHandle, encoded: bytes) -> None:
        try:
            worker.connection.send_bytes(encoded)
        except OSError:
            self._lose(worker)

    def _receive(self, deadline: float | None) -> bool:
        RemoteExecutor.check(self)
        by_handle: dict[object, WorkerHandle] = {}
        for worker in self._local:
            by_handle[worker.connection] = by_handle[worker.process.sentinel] = worker
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait([*by_handle, *self._more_handles], timeout)  # type: ignore[list-item]
        for handle in ready:
            if handle in self._more_handles:
                self._more_handles[handle]()
                continue
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

    def _kill_all(self) -> None:
        for worker in self._local:
            worker.process.kill()

    def _meeting_place(self) -> str:
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        return f"They meet through a file in memory and Gloo on the interface {interface}"

    def _lose(self, worker: WorkerHandle) -> NoReturn:
        worker.process.kill()
        worker.process.wait()
        self._die(worker.lost())

    def _watch(self) -> None:
        """Notice the end of a worker also while nothing is asked of them."""
        sentinels = {worker.process.sentinel: worker for worker in self._local}
        ready = wait([self._stopping, *sentinels])
        for handle in ready:
            if handle in sentinels:
                worker = sentinels[handle]
                worker.process.wait()
                with self._lock:
                    if self._death is not None:
                        return
                    self._death = worker.lost()
                for other in sentinels.values():
                    other.process.kill()
                self._on_death()
                return
