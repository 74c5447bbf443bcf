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

from headrace.executors.child_process import die_with_parent, watch_parent
from headrace.executors.worker_host import preload
from headrace.executors.worker_messages import (
    FromWorker,
    ToWorker,
    WorkerHello,
    decode_to_worker,
    encode,
)
from headrace.executors.worker_server import WorkerServer

logger = logging.getLogger(__name__)


class PipeChannel:
    """A `WorkerChannel` over a connection, which a thread reads."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._incoming: queue.SimpleQueue[ToWorker] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="worker-reader", daemon=True).start()

    def receive(self) -> ToWorker:
        return self._incoming.get()

    def send(self, message: FromWorker) -> None:
        self._connection.send_bytes(encode(message))

    def _read(self) -> None:
        while True:
            try:
                message = self._connection.recv_bytes()
            except (EOFError, OSError):
                os._exit(1)
            try:
                self._incoming.put(decode_to_worker(message))
            except Exception:  # the executor waits for an answer, and sees the end
                logger.exception("a message from the engine core cannot be read")
                os._exit(1)


def main(argv: list[str]) -> int:
    """Run a worker; the exit code is 0 only if it was told to exit."""
    parser = argparse.ArgumentParser(prog="headrace.executors.worker_process")
    parser.add_argument("--connection", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--worker-cls", required=True)
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
    channel = PipeChannel(Connection(args.connection))
    preload(args.worker_cls)
    hello = channel.receive()
    return WorkerServer(channel).run(hello) if isinstance(hello, WorkerHello) else 1


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)  # torch's threads have nothing left to do
