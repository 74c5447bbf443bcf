"""A supervisor and engine cores of the test's own, on real sockets."""

import dataclasses
import socket
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from headrace.configs.config import EngineConfig, ModelConfig, ParallelConfig
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


def config_of(num_replicas: int) -> EngineConfig:
    """A configuration with that many replicas, all of them here."""
    parallel = ParallelConfig(
        data_parallel_size=num_replicas, data_parallel_size_local=num_replicas
    )
    return dataclasses.replace(CONFIG, parallel_config=parallel)


def make_request(name: str = "a", n: int = 1) -> EngineCoreRequest:
    choices = [ChoiceState(index) for index in range(n)]
    return EngineCoreRequest(name, [1], SamplingParams(n=n), None, 0.0, choices)


def outputs_of(*numbers: int, name: str = "a", index: int = 0) -> EngineCoreOutputs:
    """A step that gave a choice the tokens `numbers`, each of which is its own position."""
    output = EngineCoreOutput(name, index, numbers[0], list(numbers))
    return EngineCoreOutputs([output], EngineStats(step=numbers[-1]), 1.0)


class _Replica:
    """The engine core of one rank: its sockets while it is up, and who has joined."""

    def __init__(self) -> None:
        self.epoch = 0
        self.sockets: SocketThread | None = None
        self.client = b""


class ScriptedCore:
    """Stands for all: the client gets `link`, the test says what the others do."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        ours, theirs = socket.socketpair()
        self.link = SupervisorLink("me", Connection(theirs.detach()), 0.0)
        self.channel: control.Channel[control.FromClient] = control.Channel(
            Connection(ours.detach()), control.FromClient
        )
        self._replicas: dict[int, _Replica] = {}

    def come_up(self, ready: Ready = READY, rank: int = 0) -> None:
        """The next engine core of a replica takes requests."""
        replica = self._replicas.setdefault(rank, _Replica())
        replica.epoch += 1
        path = self._directory / f"core-{rank}-{replica.epoch}.sock"
        replica.sockets = SocketThread(path, replica.epoch)
        self.channel.send(control.EngineUp(rank, replica.epoch, replica.sockets.address, ready))

    def take(self, rank: int = 0) -> Any:
        """The next message of the client that is no Join."""
        while True:
            message = self._receive(rank)
            if not isinstance(message, Join):
                return message

    def send(self, message: Any, rank: int = 0) -> None:
        replica = self._replicas[rank]
        assert replica.sockets is not None
        if not replica.client:
            assert isinstance(self._receive(rank), Join)
        replica.sockets.send(replica.client, message)

    def die(
        self,
        suspects: Sequence[Suspect] = (),
        blamed: str | None = None,
        was_modified: bool = False,
        rank: int = 0,
    ) -> None:
        """An engine core is lost; what it had sent is on its way."""
        replica = self._replicas[rank]
        assert replica.sockets is not None
        replica.sockets.close()
        replica.sockets, replica.client = None, b""
        down = control.EngineDown(
            rank, replica.epoch, "killed", list(suspects), blamed, was_modified
        )
        self.channel.send(down)

    def give_up(self, code: str = "engine_dead", text: str = "it was killed") -> None:
        self.channel.send(control.GaveUp(RequestFault(code, text)))

    def close(self) -> None:
        for replica in self._replicas.values():
            if replica.sockets is not None:
                replica.sockets.close()
        self.channel.close()

    def _receive(self, rank: int) -> Any:
        replica = self._replicas[rank]
        assert replica.sockets is not None
        replica.client, message = replica.sockets.incoming.get(timeout=5)
        assert replica.client == b"me"
        return message
