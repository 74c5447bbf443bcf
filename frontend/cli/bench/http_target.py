"""A small HTTP/1.1 client that notes when each piece of an answer arrived.

Each exchange has a connection of its own, opened before its clock starts: users keep theirs open,
and a kept one may be closed by the server at the moment of use, which would count as a failure.
"""

import asyncio
import ssl
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import httptools

from headrace.configs.errors import ConfigurationError

OnBody = Callable[[bytes, float], None]
DEFAULT_PORTS = {"http": 80, "https": 443}


class AnswerError(Exception):
    """An exchange that failed; `kind` is a short, stable name to count by."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class Answer:
    """What came back. `on_body` of the exchange got the pieces if `status` is 200."""

    sent_at: float = 0.0  # time.perf_counter() when the request was written
    status: int = 0
    body: bytearray = field(default_factory=bytearray)  # of answers other than 200
    is_complete: bool = False


@dataclass(frozen=True)
class Target:
    """A server: where it is, and what every request to it carries."""

    scheme: str
    host: str
    port: int
    prefix: str
    headers: Mapping[str, str]
    insecure: bool = False

    @classmethod
    def from_url(cls, url: str, headers: Mapping[str, str], insecure: bool = False) -> "Target":
        """Raises ConfigurationError if `url` is not http(s)://HOST[:PORT][/PREFIX]."""
        parts = urllib.parse.urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in DEFAULT_PORTS or not parts.hostname or port == -1:
            raise ConfigurationError(f"the server must look like http://HOST:PORT, got {url}")
        for name, value in headers.items():
            if not name.isascii() or any(c in f"{name}{value}" for c in "\r\n\0"):
                raise ConfigurationError(f"header {name!r} cannot be sent")
        return cls(
            parts.scheme,
            parts.hostname,
            port or DEFAULT_PORTS[parts.scheme],
            parts.path.rstrip("/"),
            dict(headers),
            insecure,
        )

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.prefix}"

    def head(self, method: str, path: str, length: int, extra: Mapping[str, str]) -> bytes:
        """The head of a request, up to the empty line."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        fields = {
            "Host": f"{host}:{self.port}",
            "Content-Type": "application/json",
            "Content-Length": str(length),
            "Connection": "close",
            **self.headers,
            **extra,
        }
        lines = [f"{method} {self.prefix}{path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        return "\r\n".join([*lines, "", ""]).encode()

    def ssl_context(self) -> ssl.SSLContext | None:
        if self.scheme == "http":
            return None
        context = ssl.create_default_context()
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


async def exchange(
    target: Target,
    method: str,
    path: str,
    body: bytes,
    on_body: OnBody,
    headers: Mapping[str, str] | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> Answer:
    """Send one request and read its answer to the end.

    `on_body` gets each piece of a 200 answer with the time it arrived. A connection that closes
    early is an error unless `is_over()`. Raises AnswerError.
    """
    loop = asyncio.get_running_loop()
    data = target.head(method, path, len(body), headers or {}) + body
    protocol = _Exchange(loop.create_future(), on_body, is_over)
    try:
        transport, _ = await loop.create_connection(
            lambda: protocol, target.host, target.port, ssl=target.ssl_context()
        )
    except OSError as error:
        raise AnswerError("no connection", f"{target.url}: {error}") from error
    try:
        protocol.answer.sent_at = time.perf_counter()
        transport.write(data)
        await protocol.done
    finally:
        transport.close()
    return protocol.answer


async def fetch(target: Target, method: str, path: str, body: bytes = b"") -> bytes:
    """The body of a 200 answer; raises AnswerError for any other."""
    pieces: list[bytes] = []
    answer = await exchange(target, method, path, body, lambda data, now: pieces.append(data))
    check_status(answer)
    return b"".join(pieces)


def check_status(answer: Answer) -> None:
    """Raise AnswerError unless the status is 200."""
    if answer.status != 200:
        text = bytes(answer.body[:300]).decode("utf-8", "replace")
        raise AnswerError(f"HTTP {answer.status}", f"the server answered {answer.status}: {text}")


class _Exchange(asyncio.Protocol):
    """Reads one answer; the time is taken before anything else is done with a piece."""

    def __init__(
        self, done: "asyncio.Future[None]", on_body: OnBody, is_over: Callable[[], bool]
    ) -> None:
        self.done = done
        self.answer = Answer()
        self._on_body = on_body
        self._is_over = is_over
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(AnswerError("not HTTP", f"the answer cannot be read: {error}"))

    def on_headers_complete(self) -> None:
        self.answer.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self.answer.status != 200:
            self.answer.body += data
            return
        try:
            self._on_body(data, self._now)
        except AnswerError as error:
            self._fail(error)

    def on_message_complete(self) -> None:
        self.answer.is_complete = True
        if not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_over() and not self.done.done():
            self.done.set_result(None)
        self._fail(AnswerError("connection closed", "the server closed before the answer's end"))

    def _fail(self, error: AnswerError) -> None:
        if not self.done.done():
            self.done.set_exception(error)
