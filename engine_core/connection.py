"""A client's connection to one engine core, for one epoch: a DEALER socket with a name."""

import zmq

from headrace.engine_core.messages import FromCore, Join, ToCore
from headrace.engine_core.wire import Codec


class Connection:
    """Made when the engine core is up, closed when it is lost: no frame of one meets another."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", socket_path: str, epoch: int, name: str
    ) -> None:
        self.epoch = epoch
        self._codec = Codec(epoch)
        self.socket = context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self.socket.setsockopt(option, 0)
        self.socket.setsockopt(zmq.IDENTITY, name.encode())
        self.socket.connect(f"ipc://{socket_path}")
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
        self.socket.close(linger=0)
