"""A server with known timings, to check a benchmark against. Run it as a module: it prints its
port, and ends when its standard input is closed.

It has a thread per connection and sleeps to absolute times, so that its events leave within a
fraction of a millisecond of their script. The script of an answer is the field `mock` of the
request's body; see `Script`.
"""

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MODEL = "mock"
BACKLOG = 1024
CLOCKS = {"ttft": "time_to_first_token_seconds", "e2el": "e2e_request_latency_seconds"}
HEAD = (
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    "Connection: close\r\n\r\n"
)


@dataclass(frozen=True)
class Script:
    """Event i leaves `ttft_ms + i * itl_ms` after the request was read.

    `num_events` None: as many as max_tokens; fewer hold several tokens each. `fail`: "status"
    answers 429, "error" sends an error event after the first token, "cut" closes the connection
    there, "garbage" sends text that is not JSON, "silent" ends without any token.
    """

    ttft_ms: float = 0.0
    itl_ms: float = 0.0
    num_events: int | None = None
    fail: str | None = None


class MockServer:
    """Serves on a loopback port of its own until the process ends."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._sums = dict.fromkeys(CLOCKS, 0.0)
        self._num_answers = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            path, body, read_at = _read_request(connection)
            if path == "/v1/models":
                _answer(connection, "200 OK", json.dumps({"data": [{"id": MODEL}]}))
            elif path == "/metrics":
                _answer(connection, "200 OK", self._exposition())
            elif path.startswith("/v1/"):
                self._generate(connection, json.loads(body), "chat" in path, read_at)
            else:
                _answer(connection, "404 Not Found", json.dumps({"error": {"message": "no route"}}))

    def _generate(
        self, connection: socket.socket, body: dict[str, Any], is_chat: bool, read_at: float
    ) -> None:
        script = Script(**body.get("mock", {}))
        if script.fail == "status":
            _answer(connection, "429 Too Many", json.dumps({"error": {"message": "slow down"}}))
            return
        connection.sendall(HEAD.encode())
        for at, data in _events(body, script, is_chat):
            delay = read_at + at - time.perf_counter()
            if delay > 0:
                time.sleep(delay)
            connection.sendall(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        if script.fail == "cut":
            return
        connection.sendall(b"0\r\n\r\n")
        with self._lock:
            self._num_answers += 1
            self._sums["ttft"] += script.ttft_ms / 1e3
            self._sums["e2el"] += time.perf_counter() - read_at

    def _exposition(self) -> str:
        lines = []
        with self._lock:
            for name, histogram in CLOCKS.items():
                lines += [
                    f"# TYPE mock:{histogram} histogram",
                    f'mock:{histogram}_bucket{{le="+Inf"}} {self._num_answers}',
                    f"mock:{histogram}_count {self._num_answers}",
                    f"mock:{histogram}_sum {self._sums[name]}",
                ]
        return "\n".join(lines) + "\n"


def _events(body: dict[str, Any], script: Script, is_chat: bool) -> Iterator[tuple[float, bytes]]:
    """(seconds after the request, data) of each write."""
    if is_chat:  # the role comes before any token, and is none
        yield 0.0, _event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
    if script.fail == "silent":
        yield 0.0, b"data: [DONE]\n\n"
        return
    count = body["max_tokens"] if script.num_events is None else script.num_events
    for i in range(count):
        choice: dict[str, Any] = {"index": 0, "finish_reason": None}
        choice |= {"delta": {"content": " a"}} if is_chat else {"text": " a"}
        if i == count - 1:
            choice["finish_reason"] = "length"
        yield (script.ttft_ms + i * script.itl_ms) / 1e3, _event({"choices": [choice]})
        if script.fail == "error":
            yield 0.0, _event({"error": {"message": "it broke", "type": "server_error"}})
        if script.fail == "garbage":
            yield 0.0, b"data: {nonsense\n\n"
        if script.fail:
            return
    prompt = body.get("prompt", "")
    usage = {
        "prompt_tokens": len(prompt) if isinstance(prompt, list) else len(str(prompt).split()),
        "completion_tokens": body["max_tokens"],
    }
    yield 0.0, _event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _read_request(connection: socket.socket) -> tuple[str, bytes, float]:
    """Path, body, and when the last byte of the request was there."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += _receive(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    while len(body) < int(headers.get("content-length", 0)):
        body += _receive(connection)
    return lines[0].split(" ")[1], body, time.perf_counter()


def _receive(connection: socket.socket) -> bytes:
    data = connection.recv(1 << 16)
    if not data:
        raise ConnectionResetError("the client has gone")
    return data


def _answer(connection: socket.socket, status: str, text: str) -> None:
    data = text.encode()
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    connection.sendall(head.encode() + data)


if __name__ == "__main__":
    print(MockServer().port, flush=True)
    sys.stdin.read()
