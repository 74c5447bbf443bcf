"""The connection of a client to its engine-core process: a socket, and the end of the process."""

import os
import sys
import time
from contextlib import suppress

import zmq

from headrace.configs.config import EngineConfig
from headrace.configs.errors import EngineDeadError
from headrace.engine_core.messages import EngineDied, FromCore, Hello, Ready, Shutdown, ToCore
from headrace.engine_core.supervisor import EngineCoreProcess
from headrace.engine_core.wire import Codec


class Connection:
    """A DEALER socket to an engine-core process, which it ends in the client's `close()`."""

    def __init__(self, process: EngineCoreProcess) -> None:
        self.process = process
        self.closed = False
        self.ready: Ready | None = None
        self._codec = Codec(process.epoch)
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self.socket.setsockopt(option, 0)
        # ms: the engine core binds a moment after we connect
        self.socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self.socket.connect(f"ipc://{process.socket_path}")

    def hello(self, config: EngineConfig, allows_callables: bool) -> None:
        """Let the engine core begin to load."""
        self.send(Hello(config, sys.path, os.getcwd(), allows_callables))

    def send(self, message: ToCore) -> None:
        """Queue a message; without a high-water mark this never waits."""
        self.check_alive()
        self.socket.send_multipart(self._codec.encode(message))

    def receive(self) -> list[bytes] | None:
        """The frames of a message; None if there is none."""
        try:
            return self.socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return None

    def decode(self, frames: list[bytes]) -> FromCore | None:
        """The message, None if it is of another epoch; raises EngineDeadError if it says so."""
        message = self._codec.decode_from_core(frames)
        if isinstance(message, EngineDied):
            raise EngineDeadError(message.fault.message)
        return message

    def option(self, name: int) -> int:
        """A socket option that is a number."""
        return int(self.socket.getsockopt(name))

    def say_goodbye(self) -> None:
        """Ask the engine core to end; one that is still loading is killed, it has no work."""
        if self.ready is None:
            self.process.kill()
        else:
            with suppress(zmq.ZMQError):
                self.socket.send_multipart(self._codec.encode(Shutdown()), zmq.DONTWAIT)

    def close(self) -> None:
        """Wait for the end of the process, which `say_goodbye` has asked for, and clean up."""
        self.process.stop()
        self.socket.close(linger=0)
        self._context.term()

    def check_alive(self) -> None:
        """Raise EngineDeadError if the engine core is gone."""
        if self.closed or self.process.exit_code is not None:
            raise EngineDeadError(self.death())

    def death(self) -> str:
        """How the engine core ended, for a message."""
        if self.closed:
            return "the engine has been closed; make a new one"
        # The socket can close a moment before the process can be waited for.
        deadline = time.monotonic() + 0.5
        while self.process.exit_code is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return (
            f"the engine core (pid {self.process.pid}) is gone: {self.process.describe_exit()}. "
            "Its log above says why; start the engine again"
        )
