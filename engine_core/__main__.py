"""`python -P -m headrace.engine_core`: one engine-core process, started by the supervisor.

The configuration comes in the first message. A closed parent pipe means that the parent is gone:
clean up, exit.
"""

import argparse
import gc
import logging
import os
import select
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

PROCESS_ENTRY = time.time()  # before the imports below, which take most of a second
PARENT_POLL_S = 0.5


def _watch_parent(pipe: int, parent: int, run_directory: Path) -> None:
    """Exit when the parent does; nothing of ours may survive it, so the run directory goes too.

    A process that the parent forked can hold the pipe open, hence the second look at the parent's
    pid.
    """
    while os.getppid() == parent:
        if select.select([pipe], [], [], PARENT_POLL_S)[0] and not os.read(pipe, 1):
            break
    shutil.rmtree(run_directory, ignore_errors=True)
    os._exit(1)


def main(argv: list[str]) -> int:
    """Serve one engine core; the exit code is 0 only after a Shutdown message."""
    parser = argparse.ArgumentParser(prog="headrace.engine_core")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--parent-pipe", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--log-level", type=int, default=logging.INFO)
    args = parser.parse_args(argv)
    watch = (args.parent_pipe, args.parent_pid, args.socket.parent)
    threading.Thread(target=_watch_parent, args=watch, name="parent-watch", daemon=True).start()
    # A graceful end is asked for by a message. A signal ends the process at once: a handler in
    # Python would wait for the native code of the step in progress. Nothing here outlives the
    # process: the front end sees it end, and tells every request.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)
    logging.basicConfig(
        level=args.log_level, format="%(levelname)s engine core: %(message)s", stream=sys.stderr
    )

    # Imports make some 300,000 objects that stay: looking for garbage among them is a tenth of
    # the time they take, and holds steps up later.
    gc.disable()
    from headrace.engine_core.server import SocketThread

    sockets = SocketThread(args.socket, args.epoch)
    try:
        from headrace.configs.garbage import settle_garbage_collector
        from headrace.engine_core.startup import start_server
        from headrace.executors.uniproc import preload

        preload()
        server = start_server(sockets, PROCESS_ENTRY, imported=time.time())
        if server is None:
            return 1
        settle_garbage_collector()
        gc.enable()
        server.run()
    finally:
        sockets.close()
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)  # torch's and ZMQ's threads have nothing left to do
