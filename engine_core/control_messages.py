"""What the supervisor says to engine cores and clients, and they to it: over socketpairs, msgpack.

The same whether the supervisor is a thread of a library or the first process of `serve`.
"""

import threading
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

import msgspec

from headrace.configs.config import EngineConfig
from headrace.engine_core.core_state import CoreState
from headrace.engine_core.fence import Suspect
from headrace.engine_core.messages import Ready
from headrace.workers.protocol import RequestFault

# -- supervisor to engine core --------------------------------------------------------------------


class Hello(msgspec.Struct, tag="hello", array_like=True):
    """First message to a fresh engine core: what to run, and where the parent was started.

    `allows_callables`: whether a `WorkerCall` may carry cloudpickle. True only for a library's own
    engine core, never for a server's. `state`: what the one before had become, None for the first.
    """

    config: EngineConfig
    sys_path: list[str]
    cwd: str
    allows_callables: bool = False
    state: CoreState | None = None


class ClientGone(msgspec.Struct, tag="client_gone", array_like=True):
    """A client has died: its requests end, and what they hold is free."""

    client_id: str


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True):
    """Abort what runs and exit with code 0."""


# -- engine core to supervisor --------------------------------------------------------------------


class StartupProgress(msgspec.Struct, tag="progress", array_like=True):
    """The engine core has entered a start-up phase. Passed on to clients."""

    phase: str


class CoreReady(msgspec.Struct, tag="ready", array_like=True):
    """The engine core takes requests, at this ZMQ address.

    `key`: who connects there needs it, public and secret; None for a Unix socket.
    """

    ready: Ready
    address: str = ""
    key: tuple[str, str] | None = None


class StartupFailed(msgspec.Struct, tag="failed", array_like=True):
    """The engine core could not start; it exits with a code other than 0 after this."""

    fault: RequestFault


class StateChanged(msgspec.Struct, tag="state", array_like=True):
    """What the next engine core is to be brought to, if this one dies."""

    state: CoreState


class EngineDied(msgspec.Struct, tag="died", array_like=True):
    """The step loop failed; the engine core exits with a code other than 0 after this.

    `exit_code`: of the worker that was lost, negative for a signal; None if none was.
    """

    fault: RequestFault
    exit_code: int | None = None


# -- the agent of an engine core on a node of Ray, to the process that stands in for it ------------


class FenceChanged(msgspec.Struct, tag="fence", array_like=True):
    """Pieces of the engine core's fence, and where in it they are."""

    pieces: list[tuple[int, bytes]]


class CoreEnded(msgspec.Struct, tag="ended", array_like=True):
    """The engine core has ended: its exit code as for `EngineDied`, and why if it did not say so.

    The fence came before.
    """

    exit_code: int | None
    reason: str


# -- supervisor to client -------------------------------------------------------------------------


class Configured(msgspec.Struct, tag="configured", array_like=True):
    """The configuration that engine cores run with."""

    config: EngineConfig


class EngineUp(msgspec.Struct, tag="up", array_like=True):
    """The engine core of a replica takes requests at this ZMQ address; `key` as in `CoreReady`."""

    rank: int
    epoch: int
    address: str
    ready: Ready
    key: tuple[str, str] | None = None


class EngineDown(msgspec.Struct, tag="down", array_like=True):
    """The engine core of a replica has died, and another one will come.

    A client that joins meanwhile is told, too.

    `suspects`: the choices in its steps. `blamed`: the request that must have done it, which is not
    to run again. `was_modified`: its worker was perhaps not what a fresh one will be.
    """

    rank: int
    epoch: int
    reason: str
    suspects: list[Suspect] = []
    blamed: str | None = None
    was_modified: bool = False


class GaveUp(msgspec.Struct, tag="gave_up", array_like=True):
    """No engine core will come any more, for this reason: the first root cause."""

    fault: RequestFault


# -- client to supervisor -------------------------------------------------------------------------


class Configure(msgspec.Struct, tag="configure", array_like=True):
    """What engine cores are to run; the first one counts."""

    hello: Hello


class Stop(msgspec.Struct, tag="stop", array_like=True):
    """End every engine core."""


class Unreachable(msgspec.Struct, tag="unreachable", array_like=True):
    """The connection to an engine core on another node is lost, and what was on it."""

    rank: int
    epoch: int
    reason: str


class ClientFailed(msgspec.Struct, tag="client_failed", array_like=True):
    """An API server ends with this error; so does everything."""

    fault: RequestFault


ToCore = Hello | ClientGone | Shutdown
FromCore = StartupProgress | CoreReady | StartupFailed | StateChanged | EngineDied
FromAgent = FromCore | FenceChanged | CoreEnded
ToClient = StartupProgress | Configured | EngineUp | EngineDown | GaveUp
FromClient = Configure | Stop | Unreachable | ClientFailed

Incoming = TypeVar("Incoming")


class Channel(Generic[Incoming]):
    """One end of a socketpair. Any thread may send; one receives."""

    def __init__(self, connection: Connection, incoming: object) -> None:
        """`incoming`: the union of what the other end sends."""
        self._connection = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(incoming)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def closed(self) -> bool:
        return self._connection.closed

    def send(self, message: msgspec.Struct) -> bool:
        """False if nobody is at the other end any more."""
        with self._lock:
            try:
                self._connection.send_bytes(self._encoder.encode(message))
            except OSError:
                return False
        return True

    def has_news(self) -> bool:
        """Whether `receive` would return at once."""
        try:
            return self._connection.poll()
        except OSError:
            return True

    def receive(self) -> Incoming | None:
        """The next message, waiting for it; None when the other end is closed."""
        try:
            return self._decoder.decode(self._connection.recv_bytes())
        except (EOFError, OSError):
            return None

    def close(self) -> None:
        """Idempotent."""
        self._connection.close()
