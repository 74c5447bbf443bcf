"""Start-up of an engine-core process: wait for the configuration, load, report phases or faults."""

import logging
import os
import sys
import time

from headrace.configs.errors import HeadraceError
from headrace.configs.process_times import process_creation_time
from headrace.engine_core.control_messages import (
    CoreReady,
    Hello,
    Shutdown,
    StartupFailed,
    StartupProgress,
    StateChanged,
)
from headrace.engine_core.core import EngineCore
from headrace.engine_core.server import (
    SUPERVISOR,
    EngineCoreServer,
    SocketThread,
    Supervisor,
    WorkersLost,
)
from headrace.workers.protocol import RequestFault

logger = logging.getLogger(__name__)


def start_server(
    hello: Hello,
    sockets: SocketThread,
    supervisor: Supervisor,
    entry: float,
    imported: float,
    fence: int | None = None,
    lifeline: int | None = None,
) -> EngineCoreServer | None:
    """The loaded server, or None if it could not start; the parent has been told.

    `entry` and `imported`: when the process began to run our code, and when it had torch.
    `fence` and `lifeline` as for `EngineCore`.
    """
    sys.path[:] = hello.sys_path
    os.chdir(hello.cwd)
    phases = {
        "start engine process": entry - process_creation_time(os.getpid()),
        "import torch": imported - entry,
        "wait for configuration": time.time() - imported,
    }
    start = time.time()
    try:
        core = EngineCore(
            hello.config,
            os.getpid(),
            progress=lambda phase: _tell(supervisor, StartupProgress(phase)),
            allows_callables=hello.allows_callables,
            on_worker_death=lambda: sockets.incoming.put((SUPERVISOR, WorkersLost())),
            fence=fence,
            lifeline=lifeline,
            state=hello.state,
            on_change=lambda state: _tell(supervisor, StateChanged(state)),
        )
    except Exception as error:
        fault = RequestFault(
            "engine_dead", f"the engine could not start: {type(error).__name__}: {error}"
        )
        if isinstance(error, HeadraceError):
            fault = RequestFault(error.code, str(error))
        else:
            logger.exception("the engine could not start")
        supervisor.send(StartupFailed(fault))
        return None
    known = sum(core.ready.phases.values())
    phases |= core.ready.phases
    phases["set up scheduler"] = max(0.0, time.time() - start - known)
    core.ready.phases = phases
    supervisor.send(CoreReady(core.ready, sockets.address))
    return EngineCoreServer(core, sockets, supervisor)


def receive_from(supervisor: Supervisor, sockets: SocketThread) -> None:
    """Run in a thread: what the supervisor says comes beside the messages of clients."""
    while (message := supervisor.receive()) is not None:
        sockets.incoming.put((SUPERVISOR, message))


def _tell(supervisor: Supervisor, message: StartupProgress | StateChanged) -> None:
    supervisor.send(message)


def wait_for_hello(sockets: SocketThread) -> Hello | None:
    """What the engine core is to be; None if it is to end."""
    while True:
        _, message = sockets.incoming.get()
        if isinstance(message, Hello):
            return message
        if isinstance(message, Shutdown):
            return None
        logger.warning("a message before Hello was ignored")
