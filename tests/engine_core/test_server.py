"""The engine core's routing of outputs, over a core and sockets that only record."""

from pathlib import Path
from typing import Any, cast

import pytest

from headrace.configs.sampling_params import SamplingParams
from headrace.engine_core.control_messages import ClientGone
from headrace.engine_core.core import EngineCore
from headrace.engine_core.messages import (
    ChoiceState,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineStats,
    Join,
)
from headrace.engine_core.server import SUPERVISOR, EngineCoreServer, SocketThread, Supervisor


class RecordingCore:
    """Refuses every request for which `refuses` holds."""

    weight_version = "default"

    def __init__(self) -> None:
        self.added: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.refuses = False

    def add_request(self, request: EngineCoreRequest) -> list[EngineCoreOutput]:
        self.added.append(request)
        if not self.refuses:
            return []
        return [
            EngineCoreOutput(request.request_id, choice.index, 0, [], finish_reason="error")
            for choice in request.choices
        ]

    def abort(self, request_id: str, index: int | None) -> list[EngineCoreOutput]:
        self.aborted.append(request_id)
        return []

    def stats(self) -> EngineStats:
        return EngineStats()

    def advance(self) -> None:
        pass


class RecordingSockets:
    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Any]] = []

    def send(self, client: bytes, message: Any) -> None:
        self.sent.append((client, message))


def make_request(name: str, *indexes: int) -> EngineCoreRequest:
    choices = [ChoiceState(index) for index in indexes]
    return EngineCoreRequest(name, [1], SamplingParams(), None, 0.0, choices)


def make_server() -> tuple[EngineCoreServer, RecordingCore, RecordingSockets]:
    core, sockets = RecordingCore(), RecordingSockets()
    server = EngineCoreServer(
        cast(EngineCore, core), cast(SocketThread, sockets), cast(Supervisor, None)
    )
    server._handle(b"first", Join())
    return server, core, sockets


def test_outputs_go_to_the_client_that_asked() -> None:
    server, core, sockets = make_server()
    server._handle(b"first", make_request("a", 0))
    core.refuses = True
    server._handle(b"second", make_request("b", 0, 1))
    ((client, message),) = sockets.sent
    assert client == b"second" and isinstance(message, EngineCoreOutputs)
    assert [(output.request_id, output.index) for output in message.outputs] == [("b", 0), ("b", 1)]


def test_an_id_in_use_does_not_touch_the_request_that_runs() -> None:
    server, core, sockets = make_server()
    server._handle(b"first", make_request("a", 0))
    server._handle(b"second", make_request("a", 0))
    server._handle(b"second", make_request("none"))
    assert len(core.added) == 1 and not sockets.sent
    server._route([EngineCoreOutput("a", 0, 0, [5], finish_reason="stop")])
    assert [client for client, _ in sockets.sent] == [b"first"]
    server._handle(b"second", make_request("a", 0))  # the id is free again
    assert len(core.added) == 2


def test_a_choice_named_twice_is_answered_once() -> None:
    server, core, sockets = make_server()
    core.refuses = True
    server._handle(b"first", make_request("a", 0, 0))
    ((_, message),) = sockets.sent
    assert len(message.outputs) == 1


@pytest.mark.parametrize("by", ["socket", "supervisor"])
def test_a_client_that_is_gone_is_forgotten_and_its_requests_end(by: str) -> None:
    server, core, sockets = make_server()
    server._handle(b"first", make_request("a", 0))
    server._handle(b"second", make_request("b", 0, 1))
    if by == "supervisor":
        server._handle(SUPERVISOR, ClientGone("second"))
    server._handle(b"second", None)
    server._handle(b"second", None)  # for each message that could not be sent
    assert core.aborted == ["b"] and server._clients == {b"first"}
    server._route([EngineCoreOutput("b", 0, 0, [5])], stats_to_all=True)
    assert [client for client, _ in sockets.sent] == [b"first"]
    server._handle(b"first", make_request("b", 0))  # the id is free again
    assert len(core.added) == 3


def test_the_socket_tells_when_a_client_is_gone(tmp_path: Path) -> None:
    sockets = SocketThread(tmp_path / "s", 0)
    try:
        sockets.send(b"nobody", EngineCoreOutputs([], EngineStats()))
        assert sockets.incoming.get(timeout=5) == (b"nobody", None)
    finally:
        sockets.close()
