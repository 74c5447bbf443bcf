"""A supervisor and an engine core of the test's own, on real sockets."""

import socket
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from headrace.configs.config import EngineConfig, ModelConfig
from headrace.configs.sampling_params import SamplingParams
from headrace.engine_core import control_messages as control
from headrace.engine_core.fence import Suspect
from headrace.engine_core.messages import (
    ChoiceState,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineStats,
    Join,
    Ready,
)
from headrace.engine_core.server import SocketThread
from headrace.engine_core.supervisor import SupervisorLink
from headrace.workers.protocol import RequestFault

CONFIG = EngineConfig(
    ModelConfig("m", "p", "p", ("m",), "LlamaForCausalLM", {}, "float32", 64, 32, 1)
)
READY = Ready(8, 16, 128, "contract", {}, {}, 1, 1)


def make_request(name: str = "a", n: int = 1) -> EngineCoreRequest:
    choices = [ChoiceState(index) for index in range(n)]
    return EngineCoreRequest(name, [1], SamplingParams(n=n), None, 0.0, choices)


def outputs_of(*numbers: int, name: str = "a", index: int = 0) -> EngineCoreOutputs:
    """A step that gave a choice the tokens `numbers`, each of which is its own position."""
    output = EngineCoreOutput(name, index, numbers[0], list(numbers))
    return EngineCoreOutputs([output], EngineStats(step=numbers[-1]), 1.0)


class ScriptedCore:
    """Stands for both: the client gets `link`, the test says what the others do."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._epoch = 0
        ours, theirs = socket.socketpair()
        self.link = SupervisorLink("me", Connection(theirs.detach()), 0.0)
        self.channel: control.Channel[control.FromClient] = control.Channel(
            Connection(ours.detach()), control.FromClient
        )
        self.sockets: SocketThread | None = None
        self._client = b""

    def come_up(self, ready: Ready = READY) -> None:
        """The next engine core takes requests."""
        self._epoch += 1
        path = self._directory / f"core-{self._epoch}.sock"
        self.sockets = SocketThread(path, self._epoch)
        self.channel.send(control.EngineUp(0, self._epoch, str(path), ready))

    def take(self) -> Any:
        """The next message of the client that is no Join."""
        assert self.sockets is not None
        while True:
            self._client, message = self.sockets.incoming.get(timeout=5)
            assert self._client == b"me"
            if not isinstance(message, Join):
                return message

    def send(self, message: Any) -> None:
        assert self.sockets is not None
        if not self._client:
            self._client, message_ = self.sockets.incoming.get(timeout=5)
            assert isinstance(message_, Join)
        self.sockets.send(self._client, message)

    def die(
        self,
        suspects: Sequence[Suspect] = (),
        blamed: str | None = None,
        was_modified: bool = False,
    ) -> None:
        """The engine core is lost; what it had sent is on its way."""
        assert self.sockets is not None
        self.sockets.close()
        self.sockets, self._client = None, b""
        down = control.EngineDown(0, self._epoch, "killed", list(suspects), blamed, was_modified)
        self.channel.send(down)

    def give_up(self, code: str = "engine_dead", text: str = "it was killed") -> None:
        self.channel.send(control.GaveUp(RequestFault(code, text)))

    def close(self) -> None:
        if self.sockets is not None:
            self.sockets.close()
        self.channel.close()
