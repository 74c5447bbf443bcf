"""The server process with a scripted engine: start-up order, signals, exit codes."""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
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
options = ServerOptions(port=0)
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

    def end(self):
        """Exit code and the rest of what it printed."""
        output, _ = self.process.communicate(timeout=10)
        return self.process.returncode, output


@pytest.fixture
def start_server():
    with contextlib.ExitStack() as stack:

        def start(mode="works"):
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(Path(__file__).with_name("conftest.py")), mode],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
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
        stream = socket.create_connection(("127.0.0.1", server.port))
        body = b'{"prompt": "a", "max_tokens": 60, "ignore_eos": true, "stream": true}'
        head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        stream.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + head.encode() + body)
        stream.recv(10)
    began = time.monotonic()
    os.kill(server.process.pid, number)
    assert server.end() == (0, "stopped\n")
    assert time.monotonic() - began < 3
    if stream is not None:
        with contextlib.closing(stream):
            rest = b"".join(iter(lambda: stream.recv(65536), b""))
        assert b"shutting down" in rest and b"data: [DONE]\n\n" in rest


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
