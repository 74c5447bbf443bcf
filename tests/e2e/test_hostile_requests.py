"""Hostile requests beside good ones (PP05): nothing breaks, and the good ones do not notice."""

import json
import re
import socket
import struct
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.e2e.hostile_bytes import HostileBytes, raw_corpus
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
        if status == 400 and hostile.method == "POST":
            assert json.loads(text)["error"]["message"], hostile.name
    assert len(good.texts) >= 2
    assert all(texts == expected for texts in good.texts)
    assert_unharmed(server, base)


def send_bytes(server: ServerProcess, hostile: HostileBytes) -> bytes:
    """What the server says within a moment."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=0.3) as client:
        try:
            for part in hostile.parts:
                client.sendall(part)
                time.sleep(hostile.pause_s)
            if hostile.ending == "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if hostile.ending in ("reset", "close"):
                return b""
            if hostile.ending == "half-close":
                client.shutdown(socket.SHUT_WR)
            return client.recv(65536)
        except OSError:  # refused by closing, or still waiting for the rest
            return b""


def test_bytes_beside_good_requests(server: ServerProcess) -> None:
    hostile = list(raw_corpus())
    assert len(hostile) >= 200
    base = server.gauges()
    good = GoodClient(server)
    expected = good.once()
    good.start()
    try:
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            answers = list(pool.map(lambda item: send_bytes(server, item), hostile))
    finally:
        good.stopping.set()
        good.join()
    for item, answer in zip(hostile, answers, strict=True):
        statuses = re.findall(rb"HTTP/1\.1 (\d+)", answer)
        assert all(status[:1] in b"1234" for status in statuses), (item.name, answer[:300])
    seen = Counter(answer[9:12] for answer in answers)
    assert {b"200", b"400", b"413", b"414", b"431"} <= set(seen), seen
    assert len(good.texts) >= 1 and all(texts == expected for texts in good.texts)
    assert_unharmed(server, base)
