"""uvicorn's httptools protocol with limits: that parser has none of its own.

Sizes are counted as the bytes arrive, slow senders are timed out, and what is refused gets an
answer in the API's envelope before the connection closes. A client that closes its sending side
counts as gone, and one that reads nothing for `SLOW_READER_S` is cut off. While a request runs, at
most `MAX_HELD_BYTES` of following (pipelined) requests are kept unparsed, and reading goes on: so a
disconnect is noticed whatever was sent ahead.
"""

import asyncio
import contextlib
import fcntl
import logging
import sys
import termios
import uuid
from typing import Any, NoReturn

import httptools
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from headrace.frontend.http.errors import RequestRefused, describe_error
from headrace.frontend.http.limits import RequestLimits
from headrace.frontend.http.request_ids import valid_label
from headrace.frontend.http.sse import BODY_WRITER

logger = logging.getLogger(__name__)

MAX_HELD_BYTES = 64 * 2**10
MAX_PIPELINED = 32
SLOW_READER_S = 60.0  # in which a client that is behind reads nothing, before it is cut off
LINGER_S = 2.0  # how long what a refused client still sends is thrown away
SLACK_BYTES = 4  # of a header line beside name and value: ": " and the line end

HEADERS_TOO_LARGE = "Request Header Fields Too Large"


class LimitedProtocol(HttpToolsProtocol):
    """One connection. Give uvicorn `functools.partial(LimitedProtocol, limits=limits)`."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: RequestLimits,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._running: RequestResponseCycle | None = None
        self._held = bytearray()
        self._refusal: RequestRefused | None = None
        self._is_over = False  # refused or upgraded: what still arrives is thrown away
        self._in_head = False
        self._in_body = False
        self._head_bytes = 0
        self._body_bytes = 0
        self._silent_bytes = 0  # fed since the parser last told of something
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._num_unread = 0  # when last looked at
        self._body_began = 0.0
        self._last_body_time = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._socket = transport.get_extra_info("socket")
        self._arm(self._limits.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._stop_watching()
        self._held.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._is_over:
            return
        if self.pipeline:
            self._held += data
            if len(self._held) > MAX_HELD_BYTES:
                self.transport.abort()
            return
        if self._timer is None:
            self._arm(self._limits.header_timeout_s)
        self._feed(data)

    def _feed(self, data: bytes) -> None:
        self._silent_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # answered as a plain request, and the last one
            self._is_over = True
            self._disarm()
            if self.cycle is not None:
                self.cycle.keep_alive = self.cycle.more_body = False
                self.cycle.message_event.set()
        except httptools.HttpParserError as error:
            logger.debug("not HTTP: %s", error)
            if len(self.pipeline) >= MAX_PIPELINED:
                self.transport.abort()
                return
            self._refuse(self._refusal or RequestRefused(400, "Bad Request", "this is not HTTP/1"))
        else:
            too_many = self._head_bytes + self._silent_bytes
            if too_many > self._limits.max_header_bytes + SLACK_BYTES:
                self._refuse(self._too_large("headers are", self._limits.max_header_bytes))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._in_body = True, False
        self._head_bytes = self._body_bytes = self._silent_bytes = 0
        self._arm(self._limits.header_timeout_s)

    def on_url(self, url: bytes) -> None:
        self._silent_bytes = 0
        super().on_url(url)
        if len(self.url) > self._limits.max_url_bytes:
            self._stop(414, "URI Too Long", f"the path is longer than {self._limits.max_url_bytes}")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._silent_bytes = 0
        self._head_bytes += len(name) + len(value)
        super().on_header(name, value)
        limits = self._limits
        if len(self.headers) > limits.max_header_count:
            refusal = f"there are more than {limits.max_header_count} headers"
            self._stop(431, HEADERS_TOO_LARGE, refusal)
        if self._head_bytes > limits.max_header_bytes:
            raise self._remember(self._too_large("headers are", limits.max_header_bytes))

    def on_headers_complete(self) -> None:
        self._silent_bytes = 0
        self._check_announced_length()
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop(400, "Bad Request", "too many requests were sent ahead")
        self._in_head, self._in_body = False, True
        super().on_headers_complete()
        self.flow.resume_reading()  # following requests are held, so reading can go on
        self._body_began = self._last_body_time = self.loop.time()
        self._arm(self._limits.body_timeout_s)

    def on_body(self, body: bytes) -> None:
        self._silent_bytes = 0
        self._last_body_time = self.loop.time()
        self._body_bytes += len(body)
        if self._body_bytes > self._limits.max_body_bytes:
            raise self._remember(self._body_too_large())
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._silent_bytes = 0
        self._in_body = False
        self._disarm()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_reader()
        if self._is_over:
            self.transport.close()
        elif self._held and not self.pipeline:
            self.loop.call_soon(self._feed_held)

    def _feed_held(self) -> None:
        if self._held and not self.pipeline and not self.transport.is_closing():
            held, self._held = bytes(self._held), bytearray()
            self.data_received(held)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        extensions: dict[str, Any] = {BODY_WRITER: ChunkWriter(cycle)}
        cycle.scope["extensions"] = extensions
        super()._start_asgi_task(cycle, app)

    def _check_announced_length(self) -> None:
        for name, value in self.headers:
            if name != b"content-length" or not value.isdigit():  # the parser refuses others
                continue
            if len(value) > 20 or int(value) > self._limits.max_body_bytes:
                raise self._remember(self._body_too_large())

    def _body_too_large(self) -> RequestRefused:
        return RequestRefused(
            413, "Content Too Large", f"the body is longer than {self._limits.max_body_bytes} bytes"
        )

    def _too_large(self, what: str, limit: int) -> RequestRefused:
        return RequestRefused(431, HEADERS_TOO_LARGE, f"the {what} longer than {limit} bytes")

    def _stop(self, status: int, kind: str, message: str) -> NoReturn:
        """End parsing from within one of the parser's calls."""
        raise self._remember(RequestRefused(status, kind, message))

    def _remember(self, refusal: RequestRefused) -> RequestRefused:
        self._refusal = refusal
        return refusal

    # Time limits

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._time_is_up)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_is_up(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self._in_body:
            self._check_body_time()
        elif self._is_responding():  # a request sent ahead may be late
            self._arm(self._limits.header_timeout_s)
        elif self._in_head:
            seconds = self._limits.header_timeout_s
            self._refuse(_timeout(f"the headers did not arrive within {seconds:g} s"))
        else:
            self.transport.close()

    def _check_body_time(self) -> None:
        limits, now = self._limits, self.loop.time()
        if self.flow.read_paused or self.pipeline:  # it is we who do not read
            self._body_began = self._last_body_time = now
        silent_until = self._last_body_time + limits.body_timeout_s
        last = self._body_began + limits.body_total_timeout_s
        if now < min(silent_until, last):
            self._arm(min(silent_until, last) - now)
        elif now >= last:
            seconds = limits.body_total_timeout_s
            self._refuse(_timeout(f"the body did not arrive within {seconds:g} s"))
        else:
            self._refuse(_timeout(f"no byte of the body came for {limits.body_timeout_s:g} s"))

    def _is_responding(self) -> bool:
        return self._running is not None and not self._running.response_complete

    # A client that does not read

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()
        if not self._is_responding():
            self._watch_reader()

    def _stop_watching(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _watch_reader(self) -> None:
        """Close the connection when nothing is read for a time, while nothing is written."""
        if self._write_timer is None and self.transport.get_write_buffer_size():
            self._num_unread = self._count_unread()
            self._write_timer = self.loop.call_later(SLOW_READER_S, self._check_reader)

    def _count_unread(self) -> int:
        """Bytes that the client has still to read, those that the system holds included."""
        waiting = self.transport.get_write_buffer_size()
        with contextlib.suppress(OSError):
            number = fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4))
            waiting += int.from_bytes(number, sys.byteorder)
        return waiting

    def _check_reader(self) -> None:
        self._write_timer = None
        if self.transport.get_write_buffer_size() and self._count_unread() >= self._num_unread:
            logger.info("a client did not read its answer for %g s", SLOW_READER_S)
            self.transport.abort()
        else:
            self._watch_reader()

    # Refusing

    def _refuse(self, refusal: RequestRefused) -> None:
        """Answer, unless another answer is on its way, and close the connection."""
        self._disarm()
        self._is_over = True
        running = self._running
        if running is not None and not running.response_complete:
            if running is not self.cycle or not self._in_body:  # an earlier request goes on
                running.keep_alive = False
                self.pipeline.clear()
                return
            running.disconnected = True
            running.message_event.set()
            if running.response_started:
                self.transport.close()
                return
        self._answer(refusal)

    def _answer(self, refusal: RequestRefused) -> None:
        body = msgspec.json.encode(describe_error(refusal))
        given = dict(self.headers or ()).get(b"x-request-id", b"").decode("latin-1")
        request_id = valid_label(given) or uuid.uuid4().hex
        head = (
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"x-request-id: {request_id}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(STATUS_LINE[refusal.status] + head.encode("latin-1") + body)
        self._linger()

    def _linger(self) -> None:
        """Let the client read the answer: closing on unread bytes would take it away from it."""
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        with contextlib.suppress(OSError):
            self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(LINGER_S, self.transport.close)


class ChunkWriter:
    """The `BodyWriter` of a request: HTTP chunks straight to the transport."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self.send = cycle.send

    @property
    def is_ready(self) -> bool:
        cycle = self._cycle
        return bool(
            cycle.chunked_encoding
            and not (cycle.disconnected or cycle.response_complete or cycle.flow.write_paused)
        )

    def write(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def _timeout(message: str) -> RequestRefused:
    return RequestRefused(408, "Request Timeout", message)
