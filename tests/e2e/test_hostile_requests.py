"""Hostile requests beside good ones (PP05): nothing breaks, and the good ones do not notice."""

import json
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.e2e.hostile_corpus import Hostile, corpus
from tests.e2e.server_process import ServerProcess, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ALLOWED = {200, 307, 400, 401, 404, 405, 411, 413, 414, 422, 431}
NUM_CLIENTS = 8
GOOD = [  # bodies of streams that run beside the corpus
    {"prompt": "The three primary colours are", "max_tokens": 24, "temperature": 0},
    {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0.8, "seed": 7, "n": 2},
]


class GoodClient(threading.Thread):
    """Streams the good requests over and over until told to stop; keeps every text it got."""

    def __init__(self, server: ServerProcess) -> None:
        super().__init__()
        self._server = server
        self.stopping = threading.Event()
        self.texts: list[list[str]] = []

    def run(self) -> None:
        while not self.stopping.is_set():
            self.texts.append(self.once())

    def once(self) -> list[str]:
        """The texts of all choices of all good requests."""
        return [text for body in GOOD for text in self._stream(body)]

    def _stream(self, body: dict[str, object]) -> list[str]:
        texts = [""] * int(str(body.get("n", 1)))
        answer = self._server.complete(stream=True, ignore_eos=True, **body)
        assert answer.status_code == 200
        data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert data[-1] == "[DONE]"
        for item in data[:-1]:
            choice = json.loads(item)["choices"][0]
            texts[choice["index"]] += choice["text"]
        return texts


def send(server: ServerProcess, hostile: Hostile) -> tuple[Hostile, int, str]:
    request = server.client.build_request(
        hostile.method, hostile.path, content=hostile.content, headers=hostile.headers
    )
    answer = server.client.send(request)
    return hostile, answer.status_code, answer.text


def assert_unharmed(server: ServerProcess, base: dict[str, float]) -> None:
    """The same processes as before, ready, with nothing left over and no traceback in the log."""
    assert server.process.poll() is None and server.core.is_running()
    assert server.core.status() != psutil.STATUS_ZOMBIE
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert {child.pid for child in children} == {child.pid for child in server.children}
    assert server.get("/health/ready").status_code == 200
    wait_until(lambda: server.gauges() == base, 5, f"the base line {base}")
    metrics = server.metrics()
    assert metrics["accounting_errors_total"] == metrics["corrupted_requests_total"] == 0
    log = server.log.read_text()
    assert "Traceback" not in log and " ERROR " not in log, log[-3000:]


def test_corpus_beside_good_requests(server: ServerProcess) -> None:
    requests = corpus()
    assert len(requests) >= 200
    base = server.gauges()
    good = GoodClient(server)
    expected = good.once()
    good.start()
    try:
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            answers = list(pool.map(lambda hostile: send(server, hostile), requests))
    finally:
        good.stopping.set()
        good.join()
    bad = [
        (hostile.name, hostile.path, status, text[:300])
        for hostile, status, text in answers
        if status not in ALLOWED
    ]
    assert not bad, bad
    assert Counter(status for _, status, _ in answers)[400] > len(requests) / 2
    for hostile, status, text in answers:
        if status == 400 and hostile.path.startswith("/v1/") and hostile.method == "POST":
            assert json.loads(text)["error"]["message"], hostile.name
    assert len(good.texts) >= 2
    assert all(texts == expected for texts in good.texts)
    assert_unharmed(server, base)


NOT_HTTP = [
    b"\x00" * 100,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    b"GET /\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nContent-Length: 8\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    b"Content-Type: application/json\r\n\r\nffffffffffffffffff\r\n",
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: y\r\n" % k for k in range(5000)) + b"\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET http://example.org/ HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"prompt": ',  # cut
]


def test_what_is_not_http(server: ServerProcess) -> None:
    base = server.gauges()
    for data in NOT_HTTP:
        with socket.create_connection(("127.0.0.1", server.port), timeout=0.3) as client:
            try:
                client.sendall(data)
                client.shutdown(socket.SHUT_WR)
                answer = client.recv(65536)
            except OSError:  # refused by closing, or still waiting for the rest
                continue
        assert not answer.startswith(b"HTTP/1.1 5"), (data[:80], answer[:200])
    assert isinstance(server.complete(prompt="a", max_tokens=1), httpx.Response)
    assert_unharmed(server, base)
