"""`python -P -m headrace.engine_core`: one engine-core process, started by the supervisor.

The configuration comes in the supervisor's first message. A closed parent pipe means that the
parent is gone: clean up, exit.
"""

import argparse
import gc
import logging
import os
import shutil
import signal
import sys
import threading
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

PROCESS_ENTRY = time.time()  # before the imports below, which take most of a second


def main(argv: list[str]) -> int:
    """Serve one engine core; the exit code is 0 only after a Shutdown message."""
    parser = argparse.ArgumentParser(prog="headrace.engine_core")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--host", default="")
    parser.add_argument("--key", type=int, help="descriptor to read it from")
    parser.add_argument("--supervisor", type=int, required=True)
    parser.add_argument("--fence", type=int, required=True)
    parser.add_argument("--parent-pipe", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--log-level", type=int, default=logging.INFO)
    parser.add_argument("--preload-worker", action="store_true")
    args = parser.parse_args(argv)
    from headrace.executors.child_process import watch_parent

    # Nothing of ours may survive the parent, so the run directory goes too.
    clean_up = partial(shutil.rmtree, args.socket.parent, ignore_errors=True)
    watch = (args.parent_pipe, args.parent_pid, clean_up)
    threading.Thread(target=watch_parent, args=watch, name="parent-watch", daemon=True).start()
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
    from headrace.executors.worker_hub import DeploymentKey

    key = None if args.key is None else DeploymentKey.from_pipe(args.key)
    sockets = SocketThread(args.socket, args.epoch, args.host, key)
    try:
        from headrace.configs.garbage import settle_garbage_collector
        from headrace.engine_core import control_messages as control
        from headrace.engine_core.startup import receive_from, start_server, wait_for_hello

        supervisor: control.Channel[control.ToCore] = control.Channel(
            Connection(args.supervisor), control.ToCore
        )
        receive = (supervisor, sockets)
        threading.Thread(target=receive_from, args=receive, name="supervisor", daemon=True).start()
        if args.preload_worker:
            from headrace.executors.worker_host import preload

            preload()
        imported = time.time()
        hello = wait_for_hello(sockets)
        if hello is None:
            return 1
        if hello.config.parallel_config.data_parallel_backend == "ray":
            from headrace.engine_core.ray_core import RayCore

            return RayCore(hello, args.epoch, sockets, supervisor, args.fence, args.socket).run()
        server = start_server(
            hello, sockets, supervisor, PROCESS_ENTRY, imported, args.fence, args.parent_pipe
        )
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
