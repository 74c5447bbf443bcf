"""S19: every limit at its value and one above it, over raw sockets where HTTP itself is limited."""

import contextlib
import dataclasses
import json
import random
import socket
import time
from pathlib import Path

import pytest

from headrace.frontend.http import json_shape
from headrace.frontend.http.limits import RequestLimits, limits_table
from headrace.frontend.http.listener import ServerOptions
from tests.frontend.http.conftest import wait_until

BODY = b'{"prompt": "a", "max_tokens": 1}'
SMALL = RequestLimits(
    max_header_count=8,
    max_header_bytes=400,
    max_url_bytes=100,
    max_body_bytes=1000,
    header_timeout_s=0.3,
    body_timeout_s=0.3,
    body_total_timeout_s=0.6,
)


@pytest.fixture(scope="module")
def shared_server(live_server, scripted):
    engine = scripted()
    engine.options = ServerOptions(limits=SMALL)
    return live_server(engine)


@pytest.fixture
def server(shared_server, until):
    engine = shared_server.engine
    until(lambda: engine.num_requests == 0)
    engine.delay_s, engine.num_aborted = 0.0, 0
    return shared_server


@pytest.fixture
def connect(server):
    """`connect()`: a new connection, closed at the end."""
    with contextlib.ExitStack() as stack:

        def start():
            client = socket.create_connection(("127.0.0.1", server.port), timeout=5)
            return stack.enter_context(client)

        yield start


def read_all(client):
    """Everything until the server closes."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while chunk := client.recv(65536):
            data += chunk
    return data


def read_answer(client):
    """Status, headers and body of one response with a Content-Length."""
    data = b""
    while b"\r\n\r\n" not in data:
        chunk = client.recv(65536)
        assert chunk, f"the connection closed after {data!r}"
        data += chunk
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    while len(body) < int(headers["content-length"]):
        chunk = client.recv(65536)
        assert chunk
        body += chunk
    return int(lines[0].split()[1]), headers, body


def post(body=b"", *headers, length=True):
    lines = [b"POST /v1/completions HTTP/1.1", b"Content-Type: application/json", *headers]
    if length:
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def chunked(*parts):
    head = post(b"", b"Transfer-Encoding: chunked", length=False)
    return head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


def assert_refused(client, status, words=""):
    """The envelope, our headers, and the end of the connection."""
    found, headers, body = read_answer(client)
    error = json.loads(body)["error"]
    assert (found, error["code"]) == (status, status), error
    assert words in error["message"] and error["type"] and error["param"] is None
    assert headers["connection"] == "close" and headers["x-request-id"]
    assert read_all(client) == b""


def test_header_count(connect):
    client = connect()
    client.sendall(post(BODY, *(b"X%d: y" % k for k in range(6))))
    assert read_answer(client)[0] == 200
    client.sendall(post(BODY, *(b"X%d: y" % k for k in range(7))))
    assert_refused(client, 431, "8 headers")


def test_header_bytes(connect):
    client = connect()
    fixed = len("Content-Type") + len("application/json") + len("Content-Length") + len("32")
    room = SMALL.max_header_bytes - fixed
    client.sendall(post(BODY, b"X: " + b"y" * (room - 1)))
    assert read_answer(client)[0] == 200
    client.sendall(post(BODY, b"X: " + b"y" * room))
    assert_refused(client, 431, "400 bytes")


def test_a_header_that_never_ends(connect):
    client = connect()
    client.sendall(b"GET /health HTTP/1.1\r\nX: ")
    with contextlib.suppress(OSError):
        for _ in range(50):
            client.sendall(b"y" * 100)
            time.sleep(0.001)
    assert_refused(client, 431)


def test_url_bytes(connect):
    client = connect()
    path = b"/health?" + b"a" * (SMALL.max_url_bytes - len("/health?"))
    client.sendall(b"GET " + path + b" HTTP/1.1\r\n\r\n")
    assert read_answer(client)[0] == 200
    client.sendall(b"GET " + path + b"a HTTP/1.1\r\n\r\n")
    assert_refused(client, 414, "100")


def padded(size):
    return BODY[:-1] + b" " * (size - len(BODY)) + b"}"


def test_body_bytes(connect):
    client = connect()
    client.sendall(post(padded(SMALL.max_body_bytes)))
    assert read_answer(client)[0] == 200
    client.sendall(post(padded(SMALL.max_body_bytes + 1)))
    assert_refused(client, 413, "1000 bytes")


def test_an_announced_body_is_refused_before_it_comes(connect):
    for length in (b"1001", b"9" * 19, b"9" * 30):
        client = connect()
        client.sendall(post(b"", b"Content-Length: " + length, length=False))
        found, _, _ = read_answer(client)
        assert found in (413, 400)  # a length that is no number of 64 bits is not HTTP


def test_chunked_bodies_are_counted_as_they_arrive(connect):
    client = connect()
    body = padded(SMALL.max_body_bytes)
    client.sendall(chunked(body[:500], body[500:], b""))
    assert read_answer(client)[0] == 200
    client.sendall(chunked(body[:500], body[500:] + b" "))
    assert_refused(client, 413, "1000 bytes")


def test_a_huge_body_does_not_hide_the_answer(connect):
    """The client may be busy sending when it is refused: what it sends is thrown away."""
    client = connect()
    with contextlib.suppress(ConnectionError):
        client.sendall(chunked(*[b"x" * 10_000] * 100))
    assert_refused(client, 413)


def test_trailers_and_chunk_extensions_are_headers_too(connect):
    client = connect()
    client.sendall(chunked(BODY) + b"0\r\n" + b"".join(b"T%d: y\r\n" % k for k in range(9)))
    assert_refused(client, 431)
    client = connect()
    with contextlib.suppress(OSError):
        client.sendall(post(b"", b"Transfer-Encoding: chunked", length=False) + b"1;")
        for _ in range(100):
            client.sendall(b"e" * 100)
            time.sleep(0.001)
    assert_refused(client, 431)


@pytest.mark.parametrize(
    "start", [b"", b"G", b"GET /health HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\nX: y\r\n"]
)
def test_slow_headers(connect, start):
    client = connect()
    client.sendall(start)
    if start:
        assert_refused(client, 408, "0.3 s")
    else:
        assert read_all(client) == b""


def test_headers_byte_by_byte(connect):
    """A byte now and then does not prolong the time."""
    client = connect()
    began = time.monotonic()
    with contextlib.suppress(OSError):
        for byte in b"GET /health HTTP/1.1\r\n" * 2:
            client.sendall(bytes([byte]))
            time.sleep(0.05)
            if time.monotonic() - began > 0.6:
                break
    assert b" 408 " in read_all(client)


def test_slow_body(connect):
    client = connect()
    client.sendall(post(BODY)[:-5])
    assert_refused(client, 408, "no byte of the body")


def test_body_byte_by_byte(connect):
    client = connect()
    client.sendall(post(padded(900))[:-800])
    with contextlib.suppress(OSError):
        for _ in range(18):
            client.sendall(b" ")
            time.sleep(0.05)
    assert b" 408 " in read_all(client)


def test_a_keep_alive_connection_may_be_slow_between_requests(connect):
    client = connect()
    for _ in range(2):
        client.sendall(post(BODY))
        assert read_answer(client)[0] == 200
        time.sleep(0.4)


def test_empty_lines_keep_nothing_open(connect):
    client = connect()
    client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
    assert read_answer(client)[0] == 200
    began = time.monotonic()
    with contextlib.suppress(OSError):
        while time.monotonic() - began < 2:
            client.sendall(b"\r\n")
            time.sleep(0.05)
    assert time.monotonic() - began < 2
    assert read_all(client) == b""


def test_a_running_request_outlives_the_header_time(connect, server):
    server.engine.delay_s = 0.1
    client = connect()
    body = b'{"prompt": "a", "max_tokens": 6, "ignore_eos": true}'
    client.sendall(post(body) + b"GET /he")  # the next request is slow, the first is not to blame
    assert read_answer(client)[0] == 200


def test_pipelining(connect, server):
    server.engine.delay_s = 0.02
    client = connect()
    client.sendall(post(BODY) * 3 + b"GET /health HTTP/1.1\r\n\r\n")
    received = b""
    while received.count(b"HTTP/1.1 200") < 4:
        chunk = client.recv(65536)
        assert chunk, received
        received += chunk


def test_what_is_sent_ahead_is_limited(connect, server, until):
    server.engine.delay_s = 0.1
    client = connect()
    body = b'{"prompt": "a", "max_tokens": 50, "ignore_eos": true}'
    client.sendall(post(body))
    until(lambda: server.engine.num_requests == 1)
    with contextlib.suppress(ConnectionError):
        for _ in range(200):
            client.sendall(post(BODY) * 10)
        read_all(client)
    until(lambda: server.engine.num_requests == 0)


def test_a_disconnect_is_noticed_behind_pipelined_requests(connect, server, until):
    server.engine.delay_s = 0.1
    client = connect()
    body = b'{"prompt": "a", "max_tokens": 50, "ignore_eos": true}'
    client.sendall(post(body) + post(BODY))
    until(lambda: server.engine.num_requests == 1)
    client.close()
    until(lambda: server.engine.num_requests == 0)
    assert server.engine.num_aborted == 1


def test_half_closed_connections_are_gone(connect, server, until):
    server.engine.delay_s = 0.1
    client = connect()
    body = b'{"prompt": "a", "max_tokens": 50, "ignore_eos": true, "stream": true}'
    client.sendall(post(body))
    until(lambda: server.engine.num_requests == 1)
    client.shutdown(socket.SHUT_WR)
    until(lambda: server.engine.num_requests == 0)


def test_upgrades_are_plain_requests(connect):
    for protocol in (b"websocket", b"h2c", b"x"):
        client = connect()
        head = b"Connection: Upgrade\r\nUpgrade: " + protocol
        client.sendall(b"GET /health HTTP/1.1\r\n" + head + b"\r\n\r\nmore\x00bytes")
        assert read_answer(client)[0] == 200
        assert read_all(client) == b""


NOT_HTTP = [
    b"\x00" * 50, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 
    b"GET / HTTP/9.9\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"get / http/1.1\r\n\r\n",
    b"G\xc3\x84T / HTTP/1.1\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n",
    b"CONNECT example.org:443 HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nA B: c\r\n\r\n",
    b"GET / HTTP/1.1\r\n: c\r\n\r\n", b"GET / HTTP/1.1\r\nA: b\x00c\r\n\r\n",
    post(b"", b"Content-Length: -1", length=False), post(b"", b"Content-Length: 1e3", length=False),
    post(b"{}", b"Content-Length: 9"), post(b"{}", b"Transfer-Encoding: chunked"),
    chunked()[:-2] + b"\r\nZZ\r\n", post(b"", b"Transfer-Encoding: chunked, identity"),
    chunked() + b"ffffffffffffffffff\r\n", chunked() + b"-1\r\n", chunked(BODY)[:-2] + b"xx0\r\n",
]  # fmt: skip


@pytest.mark.parametrize("data", NOT_HTTP)
def test_what_is_not_http(connect, data):
    client = connect()
    client.sendall(data)
    assert_refused(client, 400)


def test_random_bytes_never_give_a_5xx(connect, server):
    generator = random.Random(0)
    good = post(BODY)
    for _ in range(150):
        data = bytearray(good)
        for _ in range(generator.randrange(1, 6)):
            place = generator.randrange(len(data))
            data[place : place + generator.randrange(3)] = generator.randbytes(
                generator.randrange(4)
            )
        client = connect()
        client.sendall(bytes(data) + b"\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        answer = read_all(client)
        assert not answer or answer[9:10] in b"1234", (bytes(data), answer[:100])
        client.close()
    wait_until(lambda: server.engine.num_requests == 0)


def shape_of(item):
    """Depth; arrays, objects and names; commas: counted on the decoded value."""
    if not isinstance(item, dict | list):
        return 0, 0, 0
    shapes = [shape_of(part) for part in (item.values() if isinstance(item, dict) else item)]
    num_names = len(item) if isinstance(item, dict) else 0
    return (
        1 + max((shape[0] for shape in shapes), default=0),
        1 + num_names + sum(shape[1] for shape in shapes),
        max(0, len(item) - 1) + sum(shape[2] for shape in shapes),
    )


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 7, 64, 2**16])
def test_json_is_counted_as_a_decoder_would(monkeypatch, piece_bytes):
    monkeypatch.setattr(json_shape, "PIECE_BYTES", piece_bytes)
    generator = random.Random(piece_bytes)
    texts = [1, 'a"[{\\', "]}\n\\", '\\\\"', "\\" * 5, '":,\\"']

    def value(depth):
        kind = generator.randrange(8 if depth < 12 else 6)
        if kind < 6:
            return texts[kind]
        if kind == 6:
            return [value(depth + 1) for _ in range(generator.randrange(4))]
        return {f'k"{{{k}\\': value(depth + 1) for k in range(generator.randrange(4))}

    names = ("max_json_depth", "max_json_items", "max_json_commas")
    for _ in range(200):
        item = [value(0) for _ in range(3)]
        exact = RequestLimits(**dict(zip(names, shape_of(item), strict=True)))
        for indent in (None, 1):
            data = json.dumps(item, indent=indent).encode()
            assert json_shape.find_excess(data, exact) is None
            for name in names:
                less = dataclasses.replace(exact, **{name: getattr(exact, name) - 1})
                assert json_shape.find_excess(data, less) is not None


@pytest.mark.parametrize("pair", ["[]", "{}"])
def test_json_depth(call, pair):
    limit = RequestLimits().max_json_depth
    opening = {"[]": "[", "{}": '{"a":'}[pair]
    for depth in (limit, limit + 1):
        nested = opening * (depth - 1) + "1" + pair[1] * (depth - 1)
        body = f'{{"prompt": "a", "max_tokens": 1, "user": {nested}}}'
        assert (json_shape.find_excess(body.encode(), RequestLimits()) is not None) == (
            depth > limit
        )
        answer = call(
            "POST", "/v1/completions", content=body, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == (200 if depth == limit else 400), answer.text
    assert "deep" in answer.text


@pytest.mark.parametrize("field", ["max_json_items", "max_json_commas"])
def test_json_size(call, engine, field):
    engine.options = ServerOptions(limits=RequestLimits(**{field: 7}))
    for num, expected in ((7, 200), (8, 400)):
        if field == "max_json_items":  # the body itself, its three names, and one array for each
            user = "[" + ",".join(["[]"] * (num - 5)) + "]"
        else:
            user = "[" + ",".join("1" * (num - 1)) + "]"
        body = f'{{"prompt": "a,:[]{{}}", "max_tokens": 1, "user": {user}}}'
        answer = call(
            "POST", "/v1/completions", content=body, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == expected, answer.text
    assert "at most 7" in answer.text


def test_the_table_in_the_docs():
    page = Path(__file__).parents[3] / "docs" / "limits.md"
    assert limits_table() in page.read_text()
    for field in dataclasses.fields(RequestLimits):
        assert field.metadata["what"] and 400 <= field.metadata["status"] < 500
