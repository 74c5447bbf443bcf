"""A real `headrace serve` in a process of its own, and what tests ask it."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

READY_TIMEOUT_S = 60.0
KV_CACHE = "512M"
GAUGES = (  # what comes back to its base line when nothing runs
    "num_free_blocks",
    "num_frontend_requests",
    "num_engine_requests",
    "num_requests_running",
    "num_requests_waiting",
)


def free_port() -> int:
    """A port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Poll `condition` until it is true; an assertion error says `what` did not come in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def run_directories(temp: Path) -> list[Path]:
    """Run directories of the processes whose TMPDIR is `temp`."""
    base = temp / f"headrace-{os.getuid()}"
    return list(base.iterdir()) if base.exists() else []


class ServerProcess:
    """A server that serves `model` under the name "m", with `temp` as its TMPDIR.

    `wait_ready` False returns while it is still loading. `port`: by default a free one.
    """

    def __init__(
        self,
        model: Path,
        temp: Path,
        *options: str,
        wait_ready: bool = True,
        port: int | None = None,
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.temp = temp
        self.log = temp / f"server-{self.port}.log"
        self.everyone: list[psutil.Process] = []
        # One client for all calls, because making one is slow; a connection for each call, because
        # the server may close an idle one at any moment.
        limits = httpx.Limits(max_keepalive_connections=0)
        self.client = httpx.Client(base_url=self.url, limits=limits, timeout=60, trust_env=False)
        command = [
            sys.executable, "-m", "headrace", "serve", str(model), "--served-model-name", "m",
            "--port", str(self.port), "--kv-cache-memory", KV_CACHE, *options,
        ]  # fmt: skip
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env={**os.environ, "TMPDIR": str(temp)}, stderr=log
            )
        if wait_ready:
            try:
                self.wait_ready()
            except BaseException:
                self.kill()
                raise

    def wait_ready(self) -> None:
        """Wait until requests are taken; `children` and `core` are known then."""
        wait_until(self.is_ready, READY_TIMEOUT_S, "the server is ready")
        own = psutil.Process(self.process.pid)
        self.children = own.children(recursive=True)
        self.core = next(c for c in self.children if "headrace.engine_core" in c.cmdline())
        self.everyone = [own, *self.children]

    def is_ready(self) -> bool:
        assert self.process.poll() is None, f"the server ended: {self.log.read_text()[-2000:]}"
        with suppress(httpx.TransportError):
            return self.get("/health/ready", timeout=1).status_code == 200
        return False

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(path, **options)

    def complete(self, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        """A greedy completion, unless `fields` say otherwise."""
        body = {"model": "m", "temperature": 0, **fields}
        return self.client.post("/v1/completions", json=body, headers=headers)

    def chat(self, **fields: Any) -> httpx.Response:
        """A greedy chat completion, unless `fields` say otherwise."""
        body = {"model": "m", "temperature": 0, **fields}
        return self.client.post("/v1/chat/completions", json=body)

    def steps(self) -> int:
        return int(self.get("/health/progress").json()["step"])

    def metrics(self) -> dict[str, float]:
        """Values by name; the label of the finish reason is kept behind a colon."""
        found = {}
        for line in self.get("/metrics").text.splitlines():
            if line.startswith("#"):
                continue
            series, value = line.rsplit(" ", 1)
            name, _, labels = series.removeprefix("headrace:").partition("{")
            reason = labels.partition('finished_reason="')[2].partition('"')[0]
            found[f"{name}:{reason}" if reason else name] = float(value)
        return found

    def gauges(self) -> dict[str, float]:
        """Free blocks and table sizes."""
        metrics = self.metrics()
        return {name: metrics[name] for name in GAUGES}

    def kill(self) -> None:
        """End everything at once."""
        alive = self.process.poll() is None
        started = psutil.Process(self.process.pid).children(recursive=True) if alive else []
        for process in [*self.everyone, *started]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.wait()
        self.client.close()
