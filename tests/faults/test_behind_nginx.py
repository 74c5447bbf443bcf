"""Two servers behind nginx under load: one engine core killed, one server drained and restarted."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.server_process import ServerProcess, wait_until
from tests.e2e.tiny_model import save_tiny_model
from tests.scripts.nginx_process import NginxProcess, needs_nginx

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), needs_nginx]

NUM_REQUESTS = 500
NUM_CLIENTS = 8
OPTIONS = ("--dtype", "float32", "--num-gpu-blocks-override", "64", "--max-num-seqs", "8",
           "--shutdown-timeout", "60")  # fmt: skip


class Load:
    """Requests one after the other from several clients, streams and whole answers in turn."""

    def __init__(self, url: str) -> None:
        self.num_done = 0
        self.failures: list[str] = []
        self._lock = threading.Lock()
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(base_url=url, limits=limits, timeout=60, trust_env=False)

    def send(self, number: int) -> None:
        is_stream = number % 2 == 0
        body = {"model": "m", "prompt": [1 + number % 200, 2], "max_tokens": 12, "ignore_eos": True,
                "stream": is_stream}  # fmt: skip
        try:
            answer = self._client.post("/v1/completions", json=body)
            is_right = answer.status_code == 200 and (
                answer.text.rstrip().endswith("[DONE]") and '"error"' not in answer.text
                if is_stream
                else answer.json()["usage"]["completion_tokens"] == 12
            )
            failure = None if is_right else f"{answer.status_code} {answer.text[-300:]}"
        except httpx.HTTPError as error:
            failure = repr(error)
        with self._lock:
            self.num_done += 1
            if failure is not None:
                self.failures.append(f"{number}: {failure}")

    def wait(self, num_done: int) -> None:
        wait_until(lambda: self.num_done >= num_done, 120, f"{num_done} answers")


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[ServerProcess]]:
    model = save_tiny_model(tmp_path / "model")
    servers: list[ServerProcess] = []
    try:
        for _ in range(2):
            servers.append(ServerProcess(model, tmp_path, *OPTIONS))
        yield servers
    finally:
        for server in servers:
            server.kill()


def test_no_request_fails(servers: list[ServerProcess], tmp_path: Path) -> None:
    killed, drained = servers
    folder = tmp_path / "nginx"
    folder.mkdir()
    nginx = NginxProcess(folder, [server.port for server in servers], fail_timeout="1s")
    load = Load(nginx.url)
    try:
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            for number in range(NUM_REQUESTS - 100):
                pool.submit(load.send, number)
            load.wait(NUM_REQUESTS // 5)
            killed.core.kill()
            load.wait(2 * NUM_REQUESTS // 5)
            drained.process.terminate()
            assert drained.process.wait(60) == 0
            again = ServerProcess(tmp_path / "model", tmp_path, *OPTIONS, port=drained.port)
            servers.append(again)
            for number in range(NUM_REQUESTS - 100, NUM_REQUESTS):
                pool.submit(load.send, number)
            wait_until(killed.is_ready, 60, "its next engine core is there")
        assert load.num_done == NUM_REQUESTS
        # What has been out for long enough is asked again.
        wait_until(lambda: load.send(0) or again.steps(), 30, "the new server has answered")
        assert load.failures == []
    finally:
        nginx.stop()
    assert psutil.Process(killed.process.pid).is_running()


def test_a_drained_server_is_not_asked_again_until_it_is_back(
    servers: list[ServerProcess], tmp_path: Path
) -> None:
    folder = tmp_path / "nginx"
    folder.mkdir()
    nginx = NginxProcess(folder, [server.port for server in servers], fail_timeout="1s")
    load = Load(nginx.url)
    try:
        servers[0].process.terminate()
        for number in range(20):
            load.send(number)
        servers[0].process.wait(60)
        time.sleep(1.1)  # it is asked again, and is not there
        for number in range(20):
            load.send(number)
        assert load.failures == []
    finally:
        nginx.stop()
