"""A client's connection to an engine core on another machine: encrypted, and its loss is told."""

import queue
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from headrace.engine_core.connection import Connection
from headrace.engine_core.control_messages import EngineUp, Unreachable
from headrace.engine_core.messages import AbortRequest, Join, UtilityResult
from headrace.engine_core.server import SocketThread
from headrace.executors.worker_hub import DeploymentKey
from tests.engine_core.scripted_core import READY

KEY = DeploymentKey.generate()
HERE = "127.0.0.1"


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[SocketThread]:
    sockets = SocketThread(tmp_path / "unused", 1, HERE, KEY)
    yield sockets
    sockets.close()
    assert not list(tmp_path.iterdir())


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    with zmq.Context() as context:
        yield context


def up(address: str, key: DeploymentKey = KEY) -> EngineUp:
    return EngineUp(3, 1, address, READY, (key.public, key.secret))


def receive(connection: Connection) -> object:
    assert connection.socket.poll(5000)
    frames = connection.receive()
    assert frames is not None
    return connection.decode(frames)


def test_messages_go_both_ways(
    sockets: SocketThread, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    assert sockets.address.startswith(f"tcp://{HERE}:")
    losses: list[Unreachable] = []
    connection = Connection(context, up(sockets.address), "me", losses.append)
    try:
        connection.send(AbortRequest("a"))
        received = [sockets.incoming.get(timeout=5) for _ in range(2)]
        assert received == [(b"me", Join()), (b"me", AbortRequest("a"))]
        sockets.send(b"me", UtilityResult(1, "x"))
        assert receive(connection) == UtilityResult(1, "x")
    finally:
        connection.close()
    assert not losses


def test_a_loss_is_told_once(tmp_path: Path, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    sockets = SocketThread(tmp_path / "unused", 1, HERE, KEY)
    losses: queue.SimpleQueue[Unreachable] = queue.SimpleQueue()
    connection = Connection(context, up(sockets.address), "me", losses.put)
    try:
        sockets.incoming.get(timeout=5)
        sockets.close()
        loss = losses.get(timeout=5)
        assert (loss.rank, loss.epoch) == (3, 1) and "was lost" in loss.reason
    finally:
        connection.close()
    assert losses.empty()


def test_nobody_without_the_key_is_heard(
    sockets: SocketThread, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    public, secret = (part.decode() for part in zmq.curve_keypair())
    dealer = context.socket(zmq.DEALER)
    dealer.curve_serverkey = KEY.public.encode()
    dealer.curve_publickey, dealer.curve_secretkey = public.encode(), secret.encode()
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(sockets.address)
    connection = Connection(context, up(sockets.address), "me", lambda loss: None)
    try:
        for _ in range(10):
            with suppress(zmq.Again):  # its connection has been refused
                dealer.send_multipart([b"a", b"b"], zmq.DONTWAIT)
            time.sleep(0.01)
        assert sockets.incoming.get(timeout=5) == (b"me", Join())
        assert sockets.incoming.empty()
    finally:
        dealer.close()
        connection.close()


def test_one_that_cannot_be_reached(
    context: "zmq.Context[zmq.Socket[bytes]]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.engine_core.connection.CONNECT_TIMEOUT_S", 0.1)
    losses: queue.SimpleQueue[Unreachable] = queue.SimpleQueue()
    connection = Connection(context, up(f"tcp://{HERE}:1"), "me", losses.put)
    try:
        assert "cannot connect to it at tcp://127.0.0.1:1" in losses.get(timeout=5).reason
    finally:
        connection.close()
