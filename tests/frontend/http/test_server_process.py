"""The server process with a scripted engine: start-up order, signals, exit codes."""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import asyncio, logging, os, runpy, sys, threading
from headrace.configs.errors import EngineDeadError, HeadraceError, ModelFileError
from headrace.frontend.http.listener import ServerOptions, bind_socket
from headrace.frontend.http.server import serve

logging.basicConfig(level=logging.INFO)
engine = runpy.run_path(sys.argv[1])["ScriptedEngine"](delay_s=0.05)
engine.start_gate = asyncio.Event()
mode = sys.argv[2]
if mode == "fails":
    engine.start_failure = ModelFileError("no such model")
engine.failure = EngineDeadError("planted death")

async def started(real=engine.start):
    loop = asyncio.get_running_loop()
    threading.Thread(target=steer, args=(loop,), daemon=True).start()
    await real()

def steer(loop):
    for line in sys.stdin:
        event = {"go": engine.start_gate, "die": engine.died}[line.strip()]
        loop.call_soon_threadsafe(event.set)

engine.start = started
options = ServerOptions(port=0, shutdown_timeout=float(sys.argv[3]))
listener = bind_socket(options)
print(listener.getsockname()[1], flush=True)
try:
    code = serve(engine, options, listener)
except HeadraceError as error:
    print("error:", error, flush=True)
    code = 1
print("stopped" if engine.is_stopped else "left running", flush=True)
sys.exit(code)
"""


class Server:
    def __init__(self, process):
        self.process = process
        self.port = int(process.stdout.readline())

    def get(self, path):
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        with contextlib.closing(client):
            client.request("GET", path)
            return client.getresponse().status

    def say(self, word):
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def until_ready(self):
        deadline = time.monotonic() + 10
        while self.get("/health/ready") != 200:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def stream(self, num_tokens):
        """A connection on which the first bytes of a stream have come."""
        body = b'{"prompt": "a", "max_tokens": %d, "ignore_eos": true, "stream": true}' % num_tokens
        head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        client = socket.create_connection(("127.0.0.1", self.port))
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + head.encode() + body)
        client.recv(10)
        return client

    def signal(self, number):
        os.kill(self.process.pid, number)

    def end(self):
        """Exit code and the rest of what it printed."""
        output, self.log = self.process.communicate(timeout=10)
        return self.process.returncode, output


@pytest.fixture
def start_server():
    with contextlib.ExitStack() as stack:

        def start(mode="works", shutdown_timeout=0):
            engine = str(Path(__file__).with_name("conftest.py"))
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, engine, mode, str(shutdown_timeout)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            stack.enter_context(process)
            stack.callback(process.kill)
            return Server(process)

        yield start


def test_answers_before_it_is_ready(start_server):
    server = start_server()
    assert server.get("/health/live") == 200
    assert server.get("/health/ready") == server.get("/health") == server.get("/v1/models") == 503
    server.say("go")
    server.until_ready()
    assert server.get("/v1/models") == 200


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("phase", ["starting", "idle", "streaming"])
def test_signals_end_with_code_0(start_server, number, phase):
    server = start_server()
    assert server.get("/health/live") == 200
    stream = None
    if phase != "starting":
        server.say("go")
        server.until_ready()
    if phase == "streaming":
        stream = server.stream(60)
    began = time.monotonic()
    server.signal(number)
    assert server.end() == (0, "stopped\n")
    assert time.monotonic() - began < 3
    if stream is not None:
        rest = rest_of(stream)
        assert b"shutting down" in rest and b"data: [DONE]\n\n" in rest


def rest_of(stream):
    with contextlib.closing(stream):
        return b"".join(iter(lambda: stream.recv(65536), b""))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_running_requests_may_finish(start_server, number):
    """PP10; the second stream would take longer than there is time."""
    server = start_server(shutdown_timeout=1)
    server.say("go")
    server.until_ready()
    streams = [server.stream(12), server.stream(60)]
    server.signal(number)
    while server.get("/health") == 200:
        time.sleep(0.01)
    assert server.get("/health/live") == 200 and server.get("/v1/models") == 503
    assert server.end() == (0, "stopped\n")
    finished, cut = map(rest_of, streams)
    assert b"shutting down" not in finished and b"data: [DONE]\n\n" in finished
    assert b"shutting down" in cut and b"data: [DONE]\n\n" in cut
    assert f"{number.name}: shutting down with 2 running requests" in server.log
    assert "1 requests finished, 1 cut" in server.log


def test_no_connection_is_dropped(start_server):
    """Each is answered or refused at the end; none is left without a word, its fate unknown."""
    server = start_server()
    server.say("go")
    server.until_ready()

    def statuses():
        found = []
        with contextlib.suppress(ConnectionRefusedError):
            while True:
                found.append(server.get("/v1/models"))  # on a connection of its own
        return found

    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(statuses) for _ in range(8)]
        time.sleep(0.1)
        server.signal(signal.SIGTERM)
        assert server.end() == (0, "stopped\n")
        found = [client.result(10) for client in clients]
    for client in found:
        assert set(client) <= {200, 503} and client == sorted(client)


@pytest.mark.parametrize("phase", ["idle", "streaming"])
def test_nobody_is_waited_for_in_vain(start_server, phase):
    """An idle server ends at once, another one on a second signal."""
    server = start_server(shutdown_timeout=60)
    server.say("go")
    server.until_ready()
    if phase == "streaming":
        stream = server.stream(60)
        server.signal(signal.SIGTERM)
        while server.get("/health") == 200:
            time.sleep(0.01)
    server.signal(signal.SIGTERM)
    began = time.monotonic()
    assert server.end() == (0, "stopped\n")
    assert time.monotonic() - began < 2
    if phase == "streaming":
        rest = rest_of(stream)
        assert b"shutting down" in rest and b"data: [DONE]\n\n" in rest
        assert "0 requests finished, 1 cut" in server.log


def test_failed_start_is_told(start_server):
    server = start_server("fails")
    server.say("go")
    assert server.end() == (1, "error: no such model\nstopped\n")


def test_death_of_the_engine_ends_the_server(start_server):
    server = start_server()
    assert server.get("/health/live") == 200
    server.say("go")
    server.until_ready()
    server.say("die")
    assert server.end() == (1, "error: planted death\nstopped\n")
