"""`python -P -m headrace.executors.worker_process`: one worker, started by a `MultiprocExecutor`.

A closed connection means that the engine core is gone: exit.
"""

import argparse
import gc
import logging
import os
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection

from headrace.configs.errors import HeadraceError
from headrace.configs.garbage import settle_garbage_collector
from headrace.executors.child_process import die_with_parent, watch_parent
from headrace.executors.worker_host import WorkerHost, preload
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
    decode_to_worker,
    encode,
)
from headrace.workers.protocol import RequestFault, WorkerCall

logger = logging.getLogger(__name__)


class WorkerServer:
    """Serves one executor over `connection`.

    A thread reads, so that an executor that sends never waits for a step to end.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._incoming: queue.SimpleQueue[ToWorker] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="worker-reader", daemon=True).start()

    def run(self) -> int:
        """Until told to exit; the process's exit code."""
        hello = self._incoming.get()
        if not isinstance(hello, WorkerHello):
            return 1
        sys.path[:] = hello.sys_path
        os.chdir(hello.cwd)
        host = self._start(hello)
        if host is None:
            return 1
        settle_garbage_collector()
        gc.enable()
        answers = hello.setup.answers
        while True:
            message = self._incoming.get()
            match message:
                case RunStep():
                    self._step(host, message, answers)
                case WorkerCall():
                    self._send(CallDone(host.call(message)))
                case WorkerExit():
                    host.shutdown()
                    return 0

    def _start(self, hello: WorkerHello) -> WorkerHost | None:
        try:
            host = WorkerHost(hello.config, hello.setup, hello.allows_callables)
            self._send(WorkerReady(host.start(lambda phase: self._send(WorkerProgress(phase)))))
        except Exception as error:
            if not isinstance(error, HeadraceError):
                logger.exception("the worker could not start")
            self._send(WorkerFailed(_fault(error)))
            return None
        return host

    def _step(self, host: WorkerHost, message: RunStep, answers: bool) -> None:
        try:
            output = host.execute_model(message.step)
        except Exception as error:
            logger.exception("step %d failed", message.step.step)
            self._send(WorkerFailed(_fault(error)))
        else:
            if answers:
                self._send(StepDone(output))

    def _send(self, message: FromWorker) -> None:
        self._connection.send_bytes(encode(message))

    def _read(self) -> None:
        while True:
            try:
                message = self._connection.recv_bytes()
            except (EOFError, OSError):
                os._exit(1)
            self._incoming.put(decode_to_worker(message))


def _fault(error: Exception) -> RequestFault:
    if isinstance(error, HeadraceError):
        return RequestFault(error.code, str(error))
    return RequestFault("engine_dead", f"{type(error).__name__}: {error}")


def main(argv: list[str]) -> int:
    """Run a worker; the exit code is 0 only if it was told to exit."""
    parser = argparse.ArgumentParser(prog="headrace.executors.worker_process")
    parser.add_argument("--connection", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--worker-class", required=True)
    parser.add_argument("--parent-pipe", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--log-level", type=int, default=logging.INFO)
    args = parser.parse_args(argv)
    die_with_parent()  # it is the step loop's thread that started us; then look at its pid
    watch = (args.parent_pipe, args.parent_pid)
    threading.Thread(target=watch_parent, args=watch, name="parent-watch", daemon=True).start()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)
    logging.basicConfig(
        level=args.log_level,
        format=f"%(levelname)s worker {args.rank}: %(message)s",
        stream=sys.stderr,
    )
    gc.disable()  # until the imports are done
    server = WorkerServer(Connection(args.connection))
    preload(args.worker_class)
    return server.run()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)  # torch's threads have nothing left to do
