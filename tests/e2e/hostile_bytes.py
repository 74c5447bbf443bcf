"""What goes wrong below HTTP: bytes, sizes, garbage, and clients that leave or say nothing."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

Ending = Literal["wait", "half-close", "close", "reset"]


@dataclass(frozen=True)
class HostileBytes:
    """Bytes on a connection of their own, and how the client leaves it; `pause_s` between parts."""

    name: str
    parts: tuple[bytes, ...]
    ending: Ending = "half-close"
    pause_s: float = 0.0


def raw_post(content: bytes = b"", *headers: bytes, length: bool = True) -> bytes:
    lines = [b"POST /v1/completions HTTP/1.1", b"Host: x", b"Content-Type: application/json"]
    lines += headers
    if length:
        lines.append(b"Content-Length: %d" % len(content))
    return b"\r\n".join(lines) + b"\r\n\r\n" + content


RUNS_LONG = b'{"model": "m", "prompt": "a", "max_tokens": 200, "ignore_eos": true, "stream": true}'
CHUNKED = raw_post(b"", b"Transfer-Encoding: chunked", length=False)
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
NOT_HTTP = [
    b"", b"\r\n" * 500, b"\x00" * 100, b"\xff" * 100,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET", b"GET /\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/0.1\r\n\r\n", b"get / http/1.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET http://example.org/ HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /%00%ff%zz HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET \\\\x HTTP/1.1\r\nHost: x\r\n\r\n", b"GET ?x HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET //x:99999 HTTP/1.1\r\nHost: x\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n", b"EHLO x\r\n",
    b"*1\r\n$4\r\nPING\r\n", b"PROXY TCP4 1.1.1.1 2.2.2.2 1 2\r\n",
    GET + b"Upgrade: websocket\r\nConnection: upgrade\r\nSec-WebSocket-Version: 13\r\n\r\n",
    GET + b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMA\r\n\r\n",
    raw_post(RUNS_LONG, b"Upgrade: x", b"Connection: upgrade"), raw_post(),
]  # fmt: skip
BAD_HEADERS = [
    b"X", b": y", b" X: y", b"X : y", b"X\x00: y", b"X: \x00", b"X: a\rb", b"X: a\n b", b"\xff: y",
    b"X: \xff", b"X:", b"Host: a\r\nHost: b", b"Host: " + b"h" * 9999, b"Expect: 100-continue",
    b"Expect: magic", b"Connection: " + b"close, " * 999, b"Content-Encoding: gzip",
    b"Content-Type: " + b"a/" * 999, b"Authorization: " + b"B" * 9999, b"X-Request-Id: a\x7fb",
    b"X-Request-Id: " + b"i" * 9999, b"Cookie: " + b"c=d; " * 2000, b"Transfer-Encoding: gzip",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: x", b"Transfer-Encoding:\x0bchunked",
    b"Transfer-Encoding: xchunked", b"Traceparent: 00-x",
]  # fmt: skip
LENGTHS_OF_BODIES = [
    b"", b"-1", b"+1", b"0x10", b"1e3", b"1.0", b"1,1", b"1 1", b"\xb2", b"9" * 20, b"9" * 400,
    b"18446744073709551616", b"16777217", b"2000000000", b"1\r\nContent-Length: 2",
    b"1\r\nTransfer-Encoding: chunked",
]  # fmt: skip
CHUNKS = [
    b"", b"\r\n", b"ZZ\r\n", b"-1\r\n", b"0x1\r\na\r\n", b" 1\r\na\r\n", b"1\r\nab\r\n0\r\n\r\n",
    b"1\r\n", b"f" * 17 + b"\r\n", b"ffffffffffffffff\r\n", b"1;" + b"e" * 70_000,
    b"1;a=b\r\nx\r\n", b"1\na\n0\n\n", b"0\r\n\r\n", b"0\r\nT: y\r\n\r\n",
    b"0\r\n" + b"T: y\r\n" * 300, b"0\r\nT: " + b"y" * 70_000, b"1\r\n{\r\n" * 3000,
    b"1000001\r\n" + b" " * 200_000, b"5\r\n{}",
]  # fmt: skip


def raw_corpus() -> Iterator[HostileBytes]:
    """What goes wrong below HTTP: bytes, sizes, garbage, and clients that leave or say nothing."""
    for k, data in enumerate(NOT_HTTP):
        yield HostileBytes(f"not HTTP {k}", (data,))
    for header in BAD_HEADERS:
        yield HostileBytes(f"header {header[:20]!r}", (GET + header + b"\r\n\r\n",))
        yield HostileBytes(
            f"posted header {header[:20]!r}", (raw_post(RUNS_LONG, header),), "close"
        )
    for length in LENGTHS_OF_BODIES:
        head = raw_post(b"", b"Content-Length: " + length, length=False)
        yield HostileBytes(f"length {length[:20]!r}", (head + RUNS_LONG,))
    for k, chunk in enumerate(CHUNKS):
        for ending in get_args(Ending)[1:]:
            yield HostileBytes(f"chunk {k} {ending}", (CHUNKED + chunk,), ending)
    for count in (1, 100, 255, 256, 257, 5000):
        flood = b"".join(b"X-%d: y\r\n" % k for k in range(count))
        yield HostileBytes(f"{count} headers", (GET + flood + b"\r\n",))
    for size in (1000, 60_000, 65_536, 70_000, 1_000_000):
        yield HostileBytes(f"header of {size}", (GET + b"X: " + b"y" * size + b"\r\n\r\n",))
        yield HostileBytes(f"endless header of {size}", (GET + b"X: " + b"y" * size,))
        path = b"GET /" + b"a" * size + b" HTTP/1.1\r\nHost: x\r\n\r\n"
        yield HostileBytes(f"path of {size}", (path,))
    whole = raw_post(RUNS_LONG)
    for k in range(0, len(whole) + 1, 9):
        for ending in get_args(Ending)[1:]:
            yield HostileBytes(f"{k} bytes, {ending}", (whole[:k],), ending)
    for ending in get_args(Ending):
        yield HostileBytes(f"slow {ending}", tuple(whole[k : k + 8] for k in range(0, 200, 8)),
                           ending, pause_s=0.02)  # fmt: skip
        yield HostileBytes(f"a silent client, {ending}", (), ending)
        for follow in (whole, GET + b"\r\n", b"\x00" * 10, CHUNKED + b"ZZ\r\n", b"POST"):
            ahead = (whole + follow * 20,)
            yield HostileBytes(f"ahead {follow[:8]!r} {ending}", ahead, ending)
