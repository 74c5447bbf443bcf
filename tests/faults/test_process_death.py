"""Signals and kills in every phase: nothing of ours survives five seconds, the rest does."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.server_process import ServerProcess, run_directories, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

DEADLINE_S = 5.0
PHASES = ("idle", "prefill", "stream")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)

SCRIPT = """
import subprocess, sys, threading
from headrace import LLM, SamplingParams
foreign = subprocess.Popen(["sleep", "60"])
llm = LLM(sys.argv[1], kv_cache_memory_bytes=512 << 20)
print("ready", foreign.pid, flush=True)
phase = sys.argv[2]
if phase == "idle":
    threading.Event().wait(60)
elif phase == "prefill":
    llm.generate([[100] * 8000], SamplingParams(max_tokens=4), use_tqdm=False)
else:
    llm.generate([[100] * 8], SamplingParams(max_tokens=4000, ignore_eos=True), use_tqdm=False)
"""


def shared_memory() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir()}


class Server(ServerProcess):
    """A server that can be brought into a phase, and what its clients saw."""

    def __init__(self, model: Path, temp: Path, *options: str) -> None:
        super().__init__(model, temp, *options)
        self.events: list[str] = []

    def enter(self, phase: str) -> threading.Thread | None:
        """Bring the server into a phase; the thread reads the stream until it ends."""
        if phase == "idle":
            return None
        prompt = [100] * (8000 if phase == "prefill" else 8)
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": 150 if phase == "prefill" else 4000,  # more than a drain waits for
            "stream": True,
            "ignore_eos": True,
        }
        reader = threading.Thread(target=self._read, args=(body,))
        before = self.steps()
        reader.start()
        wanted = 1 if phase == "prefill" else 4
        wait_until(lambda: self.steps() >= before + wanted, 30, f"phase {phase}")
        return reader

    def _read(self, body: dict[str, object]) -> None:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                self.events += [line.decode().strip() for line in response if line.strip()]
        except urllib.error.HTTPError as error:
            self.events.append(f"{error.code} {error.read().decode()}")
        except OSError as error:
            self.events.append(repr(error))


StartServer = Callable[..., Server]


@pytest.fixture
def start_server(smollm2_gguf: Path, tmp_path: Path) -> Iterator[StartServer]:
    """Starts servers on the real model; kills what a failed test leaves."""
    servers: list[Server] = []

    def start(*options: str) -> Server:
        servers.append(Server(smollm2_gguf, tmp_path, *options))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@contextmanager
def foreign_child() -> Iterator[psutil.Process]:
    """A process that is not ours, in our process group."""
    with subprocess.Popen(["sleep", "60"]) as child:
        yield psutil.Process(child.pid)
        child.kill()


def assert_all_gone(
    main: "subprocess.Popen[Any]", children: list[psutil.Process], temp: Path, shm: set[str]
) -> int:
    """Everything has ended within the deadline and left nothing; the exit code of `main`."""
    began = time.monotonic()
    code = main.wait(DEADLINE_S)  # by its parent: psutil would take the exit code away
    _, alive = psutil.wait_procs(children, timeout=began + DEADLINE_S - time.monotonic())
    assert not alive, f"still alive after {DEADLINE_S} s: {alive}"
    wait_until(lambda: not run_directories(temp), DEADLINE_S, "the run directory is gone")
    assert shared_memory() <= shm
    return code


CASES = list(itertools.product(SIGNALS, PHASES))
IDS = [f"{s.name}-{p}" for s, p in CASES]


@pytest.mark.parametrize(("number", "phase"), CASES, ids=IDS)
def test_server(
    start_server: StartServer, tmp_path: Path, number: signal.Signals, phase: str
) -> None:
    shm = shared_memory()
    with foreign_child() as foreign:
        server = start_server()
        reader = server.enter(phase)
        server.process.send_signal(number)
        code = assert_all_gone(server.process, server.children, tmp_path, shm)
        assert code == (-9 if number == signal.SIGKILL else 0)
        assert foreign.is_running() and foreign.status() != psutil.STATUS_ZOMBIE
        if reader is not None:
            reader.join(5)
            assert not reader.is_alive()
        if phase == "stream" and number != signal.SIGKILL:
            assert server.events[-1] == "data: [DONE]"
            assert "error" in json.loads(server.events[-2].removeprefix("data: "))


@pytest.mark.parametrize(("number", "phase"), CASES, ids=IDS)
def test_engine_core_that_is_not_restarted(
    start_server: StartServer, tmp_path: Path, number: signal.Signals, phase: str
) -> None:
    shm = shared_memory()
    server = start_server("--max-restarts", "0")
    reader = server.enter(phase)
    server.core.send_signal(number)
    assert assert_all_gone(server.process, server.children, tmp_path, shm) == 1
    last_line = server.log.read_text().strip().splitlines()[-1]
    assert "engine core" in last_line
    if reader is None:
        return
    reader.join(5)
    if phase == "stream":
        assert server.events[-1] == "data: [DONE]"
        assert json.loads(server.events[-2].removeprefix("data: "))["error"]["code"] in (500, 503)
    else:
        assert server.events[-1].startswith(("500", "503"))


@pytest.mark.parametrize(("number", "phase"), CASES, ids=IDS)
def test_script(smollm2_gguf: Path, tmp_path: Path, number: signal.Signals, phase: str) -> None:
    shm = shared_memory()
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(smollm2_gguf), phase],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert script.stdout is not None
    word, foreign_pid = script.stdout.readline().split()
    assert word == "ready"
    foreign = psutil.Process(int(foreign_pid))
    children = psutil.Process(script.pid).children(recursive=True)
    ours = [child for child in children if child != foreign]
    assert ours
    time.sleep(0 if phase == "idle" else 0.7)
    script.send_signal(number)
    assert_all_gone(script, ours, tmp_path, shm)
    assert foreign.is_running()
    foreign.kill()
    script.stdout.close()


def test_all_killed_at_once(start_server: StartServer, tmp_path: Path) -> None:
    first = start_server()
    assert len(run_directories(tmp_path)) == 1
    for process in first.everyone:
        process.suspend()  # nobody may clean up for another
    for process in first.everyone:
        process.kill()
    first.process.wait(DEADLINE_S)
    assert not psutil.wait_procs(first.children, timeout=DEADLINE_S)[1]
    left = run_directories(tmp_path)
    assert len(left) == 1
    second = start_server()
    assert left[0] not in run_directories(tmp_path)
    second.process.send_signal(signal.SIGTERM)
    assert second.process.wait(DEADLINE_S) == 0
    assert run_directories(tmp_path) == []


def test_two_servers_do_not_meet(start_server: StartServer, tmp_path: Path) -> None:
    first, second = (start_server() for _ in range(2))
    assert len(run_directories(tmp_path)) == 2
    first.process.send_signal(signal.SIGKILL)
    first.process.wait(DEADLINE_S)
    assert not psutil.wait_procs(first.children, timeout=DEADLINE_S)[1]
    assert second.is_ready()
    second.process.send_signal(signal.SIGTERM)
    assert second.process.wait(DEADLINE_S) == 0
