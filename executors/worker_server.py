"""A worker's side of a remote executor: takes messages, runs them in order, answers."""

import gc
import logging
import os
import sys
from typing import Protocol

from headrace.configs.errors import HeadraceError
from headrace.configs.garbage import settle_garbage_collector
from headrace.executors.worker_host import WorkerHost
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
)
from headrace.workers.protocol import RequestFault, WorkerCall

logger = logging.getLogger(__name__)


class WorkerChannel(Protocol):
    """The way to the executor. Sending to it never waits for the worker to take the message."""

    def receive(self) -> ToWorker:
        """The next message; waits for it."""

    def send(self, message: FromWorker) -> None:
        """Answer."""


class WorkerServer:
    """Serves one executor."""

    def __init__(self, channel: WorkerChannel) -> None:
        self._channel = channel

    def run(self, hello: WorkerHello) -> int:
        """Until told to exit; the process's exit code."""
        sys.path[:] = hello.sys_path
        os.chdir(hello.cwd)
        host = self._start(hello)
        if host is None:
            return 1
        settle_garbage_collector()
        gc.enable()
        answers = hello.setup.answers
        while True:
            message = self._channel.receive()
            match message:
                case RunStep():
                    self._step(host, message, answers)
                case WorkerCall():
                    self._channel.send(CallDone(host.call(message)))
                case WorkerExit():
                    host.shutdown()
                    return 0

    def _start(self, hello: WorkerHello) -> WorkerHost | None:
        send = self._channel.send
        try:
            host = WorkerHost(hello.config, hello.setup, hello.allows_callables)
            send(WorkerReady(host.start(lambda phase: send(WorkerProgress(phase)))))
        except Exception as error:
            if not isinstance(error, HeadraceError):
                logger.exception("the worker could not start")
            send(WorkerFailed(_fault(error)))
            return None
        return host

    def _step(self, host: WorkerHost, message: RunStep, answers: bool) -> None:
        try:
            output = host.execute_model(message.step)
        except Exception as error:
            logger.exception("step %d failed", message.step.step)
            self._channel.send(WorkerFailed(_fault(error)))
        else:
            if answers:
                self._channel.send(StepDone(output))


def _fault(error: Exception) -> RequestFault:
    if isinstance(error, HeadraceError):
        return RequestFault(error.code, str(error))
    return RequestFault("engine_dead", f"{type(error).__name__}: {error}")
