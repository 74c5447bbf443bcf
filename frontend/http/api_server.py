"""`python -P -m headrace.frontend.http.api_server`: one API server, a child of `serve`'s first.

The supervisor owns the listening socket and the engine cores. SIGTERM and SIGINT drain this one; an
error that keeps it from starting is told to the supervisor, which says it last.
"""

import argparse
import logging
import os
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.configs.errors import HeadraceError
from headrace.engine_core.control_messages import ClientFailed, Configure, Hello
from headrace.engine_core.supervisor import SupervisorLink
from headrace.executors.child_process import watch_parent
from headrace.frontend.http.listener import ServerOptions
from headrace.workers.protocol import RequestFault

if TYPE_CHECKING:
    from headrace.frontend.startup_report import StartupReport

logger = logging.getLogger(__name__)


class ApiServerSetup(msgspec.Struct):
    """What an API server has to know; the supervisor writes it into a memfd.

    `engine_args`: fields of `AsyncEngineArgs`; None: the supervisor has the configuration already,
    or will get it from another API server. Times in seconds since the epoch.
    """

    client_id: str
    options: ServerOptions
    engine_args: dict[str, Any] | None
    began: float  # the start-up that this one is a part of
    core_started: float
    sys_path: list[str]
    log_level: int
    http_log_level: int
    access_log_level: int
    has_others: bool = False  # other API servers


def main(argv: list[str]) -> int:
    """Serve until a signal, or the end of the engine; 0 unless an error ended it."""
    parser = argparse.ArgumentParser(prog="headrace.frontend.http.api_server")
    for name in ("supervisor", "listener", "setup", "parent-pipe", "parent-pid"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args(argv)
    watch = (args.parent_pipe, args.parent_pid)
    threading.Thread(target=watch_parent, args=watch, name="parent-watch", daemon=True).start()
    setup = read_setup(args.setup)
    sys.path[:] = setup.sys_path
    _set_log(setup)
    return _serve(setup, Connection(args.supervisor), socket.socket(fileno=args.listener))


def write_setup(setup: ApiServerSetup) -> int:
    """The descriptor of a memfd with `setup`."""
    fd = os.memfd_create("headrace-api-server", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(msgspec.msgpack.encode(setup))
    return fd


def read_setup(fd: int) -> ApiServerSetup:
    """What `write_setup` has written there; closes the descriptor."""
    with open(fd, "rb") as file:
        file.seek(0)
        return msgspec.msgpack.decode(file.read(), type=ApiServerSetup)


def _set_log(setup: ApiServerSetup) -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("headrace").setLevel(setup.log_level)
    logging.getLogger("uvicorn").setLevel(setup.http_log_level)
    logging.getLogger("uvicorn.access").setLevel(setup.access_log_level)


def _serve(setup: ApiServerSetup, connection: Connection, listener: socket.socket) -> int:
    from headrace.frontend.startup_report import StartupReport

    link = _Link(setup.client_id, connection, setup.core_started, setup.has_others)
    report = StartupReport(setup.began, starts_core=setup.engine_args is not None)
    if setup.engine_args is not None:  # beside the imports below
        resolving = (link, setup.engine_args, report)
        threading.Thread(target=_configure, args=resolving, name="resolve", daemon=True).start()
    from headrace.frontend.async_engine import AsyncEngine
    from headrace.frontend.http.server import serve

    engine = AsyncEngine(None, report, link, log_requests=setup.options.enable_log_requests)
    try:
        return serve(engine, setup.options, listener, setup.has_others)
    except HeadraceError as error:
        link.fail(error.code, str(error))
        return 1


class _Link(SupervisorLink):
    """The process's way to the supervisor. It ends with the process, which is how the supervisor
    knows that this API server has gone.
    """

    def close(self) -> None:
        """The engine has been stopped; the rest of the process goes on for a moment."""

    def fail(self, code: str, message: str) -> None:
        """Everything is to end with this error."""
        self.channel.send(ClientFailed(RequestFault(code, message)))


def _configure(link: _Link, engine_args: dict[str, Any], report: "StartupReport") -> None:
    """Run in a thread: find out what the arguments mean, and tell the supervisor."""
    from headrace.configs.engine_args import AsyncEngineArgs, UsageContext

    began = time.time()
    try:
        config = AsyncEngineArgs(**engine_args).create_engine_config(UsageContext.API_SERVER)
    except HeadraceError as error:
        link.fail(error.code, str(error))
    except Exception as error:
        logger.exception("the configuration could not be made")
        link.fail("engine_dead", f"the configuration failed: {type(error).__name__}: {error}")
    else:
        report.add_overlapped("resolve model", began)
        link.channel.send(Configure(Hello(config, sys.path, os.getcwd())))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)
