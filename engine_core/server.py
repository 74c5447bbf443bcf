"""The engine core as a process: a ROUTER socket served by a thread, beside the step loop.

The thread owns the socket and does all msgpack coding. It hands decoded messages to the step loop
through a queue and takes answers back through another, woken by an in-process socket.
"""

import logging
import queue
import threading
import time
from collections import deque
from functools import partial
from pathlib import Path

import zmq

from headrace.configs.errors import HeadraceError
from headrace.engine_core import control_messages as control
from headrace.engine_core.core import EngineCore
from headrace.engine_core.messages import (
    AbortRequest,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FromCore,
    Join,
    ToCore,
    UtilityCall,
)
from headrace.engine_core.wire import Codec
from headrace.executors.executor import WorkerLostError
from headrace.executors.worker_hub import DeploymentKey, bind, lock
from headrace.workers.protocol import RequestFault, WorkerCall

logger = logging.getLogger(__name__)

Identity = bytes
_WAKE = "inproc://outgoing"
IDLE_CHECK_S = 1.0  # how long the loop waits for work before it looks at the block accounting


SUPERVISOR: Identity = b""  # whose messages come beside those of clients

Supervisor = control.Channel[control.ToCore]


class WorkersLost:
    """Among the incoming messages: a worker has ended on its own."""


Incoming = tuple[Identity, ToCore | control.ToCore | WorkersLost | None]


class SocketThread:
    """Owns the ROUTER socket.

    `incoming` yields (client, message), None in place of a message when the client is gone; `send`
    may be called by one other thread.
    """

    def __init__(
        self, socket_path: Path, epoch: int, host: str = "", key: DeploymentKey | None = None
    ) -> None:
        """`key`: clients are on another machine; listen at `host` only, and only to who has it."""
        self.incoming: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._codec = Codec(epoch)
        self._outgoing: deque[tuple[Identity, FromCore] | None] = deque()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._router.setsockopt(option, 0)
        self._authenticator = None if key is None else lock(self._context, self._router, key)
        if key is None:
            self.address = f"ipc://{socket_path}"
            self._router.bind(self.address)
        else:
            self.address = bind(self._router, host)
        self._wake_in = self._context.socket(zmq.PULL)
        self._wake_in.bind(_WAKE)
        self._wake_out = self._context.socket(zmq.PUSH)
        self._wake_out.connect(_WAKE)
        self._thread = threading.Thread(target=self._run, name="engine-core-io", daemon=True)
        self._thread.start()

    def send(self, client: Identity, message: FromCore) -> None:
        self._outgoing.append((client, message))
        self._wake_out.send(b"")

    def close(self) -> None:
        """Send what is queued, then close everything."""
        self._outgoing.append(None)
        self._wake_out.send(b"")
        self._thread.join(timeout=2)
        self._wake_out.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_in, zmq.POLLIN)
        running = True
        while running:
            events = dict(poller.poll())
            if self._wake_in in events:
                self._wake_in.recv()
                running = self._flush()
            if self._router in events:
                self._receive()
        self._router.close(linger=500)
        self._wake_in.close(linger=0)

    def _receive(self) -> None:
        client, *frames = self._router.recv_multipart()
        try:
            message = self._codec.decode_to_core(frames)
        except Exception as error:  # a frame nobody can read concerns nobody else
            logger.error("unreadable message from a client: %s", type(error).__name__)
            return
        if message is not None:
            self.incoming.put((client, message))

    def _flush(self) -> bool:
        """Send one queued message; False after the closing mark."""
        entry = self._outgoing.popleft()
        if entry is None:
            return False
        client, message = entry
        try:
            self._router.send_multipart([client, *self._codec.encode(message)])
        except zmq.ZMQError as error:
            logger.debug("a client is gone: %s", error)
            self.incoming.put((client, None))
        except Exception:  # a message that cannot be written must not end the thread
            logger.exception("a %s could not be sent", type(message).__name__)
        return True


class EngineCoreServer:
    """The step loop: takes messages, steps while there is work, routes outputs to their client."""

    def __init__(self, core: EngineCore, sockets: SocketThread, supervisor: Supervisor) -> None:
        self._core = core
        self._sockets = sockets
        self._supervisor = supervisor
        self._clients: set[Identity] = set()
        self._num_received: dict[Identity, int] = {}  # requests of each client
        self._owners: dict[str, Identity] = {}
        self._open_choices: dict[str, set[int]] = {}
        self._stopping = False
        self._told_version = core.weight_version

    def run(self) -> None:
        """Until a Shutdown message. An exception is told to the supervisor, and raised."""
        try:
            while not self._stopping:
                self._take_messages()
                if not self._stopping and self._core.has_work():
                    self._route(self._core.step(), stats_to_all=True)
                    self._core.advance()
                    self._tell_weight_version()
        except Exception as error:
            fault = RequestFault("engine_dead", f"the engine core failed: {_describe(error)}")
            exit_code = error.exit_code if isinstance(error, WorkerLostError) else None
            self._supervisor.send(control.EngineDied(fault, exit_code))
            raise
        finally:
            self._core.close()

    def _take_messages(self) -> None:
        """Handle all queued messages; wait for one if there is nothing to step."""
        incoming = self._sockets.incoming
        while not self._stopping:
            self._core.beat()
            idle = not self._core.has_work()
            try:
                client, message = incoming.get(block=idle, timeout=IDLE_CHECK_S)
            except queue.Empty:
                if not idle:
                    return
                self._core.idle_check()
                continue
            self._handle(client, message)

    def _handle(
        self, client: Identity, message: ToCore | control.ToCore | WorkersLost | None
    ) -> None:
        match message:
            case None:
                self._forget(client)
            case WorkersLost():
                self._core.check()
            case control.ClientGone():
                self._forget(message.client_id.encode())
            case control.Shutdown():
                self._stopping = True
            case control.Hello():
                logger.warning("a second Hello was ignored")
            case _:
                self._clients.add(client)
                self._serve(client, message)
        self._core.advance()
        self._tell_weight_version()

    def _tell_weight_version(self) -> None:
        """Clients know which weights their next tokens come from before these come."""
        if self._core.weight_version != self._told_version:
            self._told_version = self._core.weight_version
            self._route([], stats_to_all=True)

    def _serve(self, client: Identity, message: ToCore) -> None:
        match message:
            case Join():
                pass
            case EngineCoreRequest():
                self._add_request(client, message)
            case AbortRequest():
                outputs = self._core.abort(message.request_id, message.index)
                self._route(outputs, stats_to_all=bool(outputs))
            case UtilityCall():
                self._core.call(message, partial(self._sockets.send, client))
            case WorkerCall():
                self._sockets.send(client, self._core.call_workers(message))

    def _forget(self, client: Identity) -> None:
        """Nobody takes what is sent to this client: its requests end, too."""
        self._clients.discard(client)
        self._num_received.pop(client, None)
        for request_id in [name for name, owner in self._owners.items() if owner == client]:
            del self._owners[request_id], self._open_choices[request_id]
            self._core.abort(request_id, None)

    def _add_request(self, client: Identity, request: EngineCoreRequest) -> None:
        self._num_received[client] = self._num_received.get(client, 0) + 1
        indexes = {choice.index for choice in request.choices}
        if not indexes or request.request_id in self._owners:
            # No front end of ours sends these; an answer would end the request that runs.
            logger.error("ignored request %s: no choices, or its id is in use", request.request_id)
            return
        self._owners[request.request_id] = client
        self._open_choices[request.request_id] = indexes
        self._route(self._core.add_request(request))

    def _route(self, outputs: list[EngineCoreOutput], stats_to_all: bool = False) -> None:
        by_client: dict[Identity, list[EngineCoreOutput]] = {}
        for output in outputs:
            owner = self._owners.get(output.request_id)
            if owner is None:  # it named a choice twice and was refused for that
                continue
            by_client.setdefault(owner, []).append(output)
            if output.finish_reason is not None:
                self._close_choice(output.request_id, output.index)
        stats, now, version = self._core.stats(), time.time(), self._core.weight_version
        for client in self._clients if stats_to_all else by_client:
            num_received = self._num_received.get(client, 0)
            mine = by_client.get(client, [])
            message = EngineCoreOutputs(
                mine, stats, now, num_received=num_received, weight_version=version
            )
            self._sockets.send(client, message)

    def _close_choice(self, request_id: str, index: int) -> None:
        choices = self._open_choices[request_id]
        choices.discard(index)
        if not choices:
            del self._open_choices[request_id], self._owners[request_id]


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"
