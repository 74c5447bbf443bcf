"""PP10 with a real model: what is running on SIGTERM finishes as if nothing had happened."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server_process import ServerProcess, run_directories, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

StartServer = Callable[[float], ServerProcess]


@pytest.fixture
def start_server(smollm2_gguf: Path, tmp_path: Path) -> Iterator[StartServer]:
    """Starts a server with that shutdown timeout."""
    servers: list[ServerProcess] = []

    def start(shutdown_timeout: float) -> ServerProcess:
        option = ("--shutdown-timeout", str(shutdown_timeout))
        servers.append(ServerProcess(smollm2_gguf, tmp_path, *option))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def body(max_tokens: int, stream: bool = True) -> dict[str, Any]:
    return {"prompt": "Once upon a time", "max_tokens": max_tokens, "ignore_eos": True,
            "seed": 7, "temperature": 0.8, "stream": stream}  # fmt: skip


def begin(
    server: ServerProcess, pool: ThreadPoolExecutor, *bodies: dict[str, Any]
) -> list[Future[httpx.Response]]:
    """The answers to come, once the engine has worked on all of them for a while."""
    answers = [pool.submit(server.complete, **fields) for fields in bodies]
    running = len(bodies)
    wait_until(lambda: server.gauges()["num_requests_running"] == running, 30, "all run")
    before = server.steps()
    wait_until(lambda: server.steps() >= before + 4, 30, "some steps")
    return answers


def refuses(server: ServerProcess) -> bool:
    """Whether it answers every new request with a 503, which it must before its end."""
    answer = server.get("/health/ready")
    if answer.status_code == 200:
        return False
    for refused in (answer, server.get("/health"), server.complete(prompt="a")):
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "ServiceUnavailableError"
        assert refused.headers["x-request-id"]
    assert server.get("/health/live").status_code == 200
    return True


def events(answer: httpx.Response) -> list[Any]:
    """What the events of a stream say, without ids and times."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line).get("choices", line) for line in lines]


def text_of(answer: httpx.Response) -> str:
    return "".join(choice["text"] for choices in events(answer) for choice in choices)


def test_streams_finish_as_if_nothing_had_happened(
    start_server: StartServer, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    server = start_server(60)
    undisturbed = server.complete(**body(120))
    answers = begin(server, pool, body(120), body(120, stream=False))
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: refuses(server), 2, "new requests are refused")
    stream, whole = (answer.result(60) for answer in answers)
    assert server.process.wait(5) == 0
    assert text_of(stream) == text_of(undisturbed) == whole.json()["choices"][0]["text"]
    assert events(stream)[-1][0]["finish_reason"] == "length"
    assert whole.json()["usage"]["completion_tokens"] == 120
    log = server.log.read_text()
    assert "SIGTERM: shutting down with 2 running requests" in log
    assert "2 requests finished, 0 cut" in log
    assert run_directories(tmp_path) == []


@pytest.mark.parametrize("way", ["time", "signal"])
def test_what_takes_longer_is_cut(
    start_server: StartServer, pool: ThreadPoolExecutor, tmp_path: Path, way: str
) -> None:
    server = start_server(1 if way == "time" else 60)
    answers = begin(server, pool, body(6000), body(6000, stream=False))
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: refuses(server), 2, "new requests are refused")
    if way == "signal":
        server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(5) == 0
    stream, whole = (answer.result(5) for answer in answers)
    assert stream.status_code == 200 and "shutting down" in events(stream)[-1]
    assert whole.status_code == 503 and "shutting down" in whole.text
    assert int(whole.headers["retry-after"]) >= 1
    assert "0 requests finished, 2 cut" in server.log.read_text()
    wait_until(lambda: not run_directories(tmp_path), 5, "the run directory is gone")
    assert all(not child.is_running() for child in server.children)


def test_an_idle_server_ends_at_once(start_server: StartServer) -> None:
    server = start_server(60)
    server.complete(prompt="a", max_tokens=2)
    server.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert server.process.wait(5) == 0
    assert time.monotonic() - began < 5
    assert "shutting down with 0 running requests" in server.log.read_text()
