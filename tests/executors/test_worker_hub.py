"""Sockets between executor and workers: who has the key, who has not, and who is told what."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from headrace.configs.errors import ConfigurationError
from headrace.executors.worker_hub import DeploymentKey, HubChannel, WorkerHub, connect
from headrace.executors.worker_messages import RunStep, WorkerExit, WorkerProgress, encode
from headrace.workers.protocol import SchedulerOutput

KEY = DeploymentKey.generate()


@pytest.fixture
def hub() -> Iterator[WorkerHub]:
    hub = WorkerHub(KEY)
    yield hub
    hub.close()
    hub.close()


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


@pytest.mark.parametrize("is_local", [True, False])
def test_messages_both_ways(hub: WorkerHub, is_local: bool) -> None:
    address = hub.listen_here() if is_local else hub.listen("127.0.0.1")
    channel = HubChannel(address, b"7", KEY)
    channel.send(WorkerProgress("weights"))
    assert hub.receive(soon()) == (b"7", encode(WorkerProgress("weights")))
    step = SchedulerOutput(3, [], [], {}, [])
    for message in (RunStep(step), WorkerExit()):
        hub.send(b"7", encode(message))
    assert channel.receive() == RunStep(step)
    assert channel.receive() == WorkerExit()
    channel.close()
    with pytest.raises(ConnectionError):
        hub.send(b"8", b"")


def test_it_listens_at_that_address_only(hub: WorkerHub) -> None:
    address = hub.listen("127.0.0.1")
    assert address.startswith("tcp://127.0.0.1:")
    port = int(address.rpartition(":")[2])
    second = WorkerHub(KEY)
    with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{port}"):
        second.listen("127.0.0.1", port)
    second.close()
    listening = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    places = [line.split()[1] for line in listening.splitlines()]
    assert [place for place in places if place.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]


def test_who_has_another_key_is_not_heard(hub: WorkerHub) -> None:
    """Neither with a whole pair of another deployment, nor with the right public half alone."""
    address = hub.listen_here()
    other = DeploymentKey.generate()
    context = zmq.Context()
    wrong = connect(context, address, b"1", other)
    half = context.socket(zmq.DEALER)
    half.curve_serverkey = KEY.public.encode()
    half.curve_publickey, half.curve_secretkey = other.public.encode(), other.secret.encode()
    half.connect(address)
    plain = context.socket(zmq.DEALER)
    plain.connect(address)
    for dealer in (wrong, half, plain):
        dealer.send(b"let me in")
    assert hub.receive(soon(0.5)) is None
    for dealer in (wrong, half, plain):
        dealer.close(linger=0)
    context.term()


def test_wake(hub: WorkerHub) -> None:
    threading.Timer(0.05, hub.wake).start()
    assert hub.receive(None) is None
    assert hub.receive(soon(0.01)) is None


def test_key_files(tmp_path: Path) -> None:
    path = str(tmp_path / "key")
    KEY.write(path)
    assert DeploymentKey.read(path) == KEY
    assert KEY.secret not in repr(KEY)
    with pytest.raises(ConfigurationError, match="cannot be made"):
        KEY.write(path)
    os.chmod(path, 0o644)
    with pytest.raises(ConfigurationError, match=f"others can read .*chmod 600 {path}"):
        DeploymentKey.read(path)
    os.chmod(path, 0o600)
    other = DeploymentKey.generate()
    for text in ("", "a b", f"{KEY.public} {other.secret}", "one two three"):
        Path(path).write_text(text)
        with pytest.raises(ConfigurationError, match="is no key file"):
            DeploymentKey.read(path)
    with pytest.raises(ConfigurationError, match="doctor --make-key"):
        DeploymentKey.read(str(tmp_path / "none"))
