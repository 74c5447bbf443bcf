"""Clients that do not read: what waits for them is bounded, and they are cut off at last."""

import json
import socket
import time

import pytest

from headrace.frontend.http import http_protocol
from tests.frontend.http.conftest import wait_until

NUM_CHOICES = 1000  # of 50 tokens, some 250 bytes each: more than any socket's buffers take


@pytest.fixture
def stream(live_server, engine, monkeypatch):
    """A function that begins a big stream, and the engine that answers it."""
    monkeypatch.setattr(http_protocol, "SLOW_READER_S", 0.4)
    server = live_server(engine)
    clients = []

    def begin(close=False):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)
        client.settimeout(10)
        client.connect(("127.0.0.1", server.port))
        clients.append(client)
        body = {
            "prompt": "a", "n": NUM_CHOICES, "max_tokens": 50, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        data, connection = json.dumps(body).encode(), b"close" if close else b"keep-alive"
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\nConnection: %b\r\n\r\n%b" % (len(data), connection, data)
        )
        return client

    yield begin
    for client in clients:
        client.close()


def test_who_reads_nothing_is_cut_off(stream, engine):
    client = stream()
    wait_until(lambda: engine.num_requests == 1)
    wait_until(lambda: engine.num_aborted == 1 and engine.num_requests == 0)
    assert not read_to_end(client).endswith(b"0\r\n\r\n")


def test_who_reads_slowly_gets_everything(stream, engine):
    client = stream(close=True)
    began, pieces = time.monotonic(), []
    while time.monotonic() - began < 1.5:  # longer than SLOW_READER_S
        time.sleep(0.1)
        pieces.append(client.recv(1 << 18))
    received = b"".join(pieces) + read_to_end(client)
    assert b"data: [DONE]" in received and received.endswith(b"0\r\n\r\n")
    assert received.count(b'"finish_reason":"length"') == NUM_CHOICES
    assert engine.num_aborted == 0


def read_to_end(client):
    pieces = []
    while data := client.recv(1 << 18):
        pieces.append(data)
    return b"".join(pieces)
