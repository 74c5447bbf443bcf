"""A client's connection to one engine core, for one epoch: a DEALER socket with a name."""

import threading
import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from headrace.engine_core.control_messages import EngineUp, Unreachable
from headrace.engine_core.messages import FromCore, Join, ToCore
from headrace.engine_core.wire import Codec
from headrace.executors.worker_hub import DeploymentKey, connect, milliseconds_to

CONNECT_TIMEOUT_S = 10.0  # to an engine core on another machine, which listens already
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED


class Connection:
    """Made when the engine core is up, closed when it is lost: no frame of one meets another."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        event: EngineUp,
        name: str,
        on_loss: Callable[[Unreachable], object],
    ) -> None:
        """`on_loss` is called, in any thread, when the way to another machine is lost.

        ZMQ would connect again, but what was under way then is lost.
        """
        self._codec = Codec(event.epoch)
        self._watch: threading.Thread | None = None
        if event.key is None:
            self.socket = context.socket(zmq.DEALER)
            for option in (zmq.SNDHWM, zmq.RCVHWM):
                self.socket.setsockopt(option, 0)
            self.socket.setsockopt(zmq.IDENTITY, name.encode())
            self.socket.connect(event.address)
        else:
            key = DeploymentKey(*event.key)
            self.socket = connect(context, event.address, name.encode(), key)
            monitor = self.socket.get_monitor_socket(_WATCHED)
            self._watch = threading.Thread(
                target=_watch, args=(monitor, event, on_loss), name="connection-watch", daemon=True
            )
            self._watch.start()
        self.socket.setsockopt(zmq.LINGER, 0)
        self.send(Join())

    def send(self, message: ToCore) -> None:
        """Queue a message; without a high-water mark this never waits."""
        self.socket.send_multipart(self._codec.encode(message))

    def receive(self) -> list[bytes] | None:
        """The frames of a message; None if there is none."""
        try:
            return self.socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return None

    def decode(self, frames: list[bytes]) -> FromCore | None:
        """The message, None if it is of another epoch."""
        return self._codec.decode_from_core(frames)

    def option(self, name: int) -> int:
        """A socket option that is a number."""
        return int(self.socket.getsockopt(name))

    def close(self) -> None:
        if self._watch is not None:
            self.socket.disable_monitor()  # which ends the watch
            self._watch.join()
        self.socket.close(linger=0)


def _watch(
    monitor: "zmq.Socket[bytes]", event: EngineUp, on_loss: Callable[[Unreachable], object]
) -> None:
    """Until the monitor stops: tell once that the connection is lost, or never comes about."""
    deadline: float | None = time.monotonic() + CONNECT_TIMEOUT_S
    reason = f"this machine cannot connect to it at {event.address}; is that open to it?"
    while True:
        if not monitor.poll(None if deadline is None else milliseconds_to(deadline)):
            deadline = None
        else:
            number = recv_monitor_message(monitor)["event"]
            if number == zmq.EVENT_MONITOR_STOPPED:
                break
            if number == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                deadline = None
                continue
            reason = f"the connection to it at {event.address} was lost"
        if reason:
            on_loss(Unreachable(event.rank, event.epoch, reason))
            reason = ""
    monitor.close(linger=0)
