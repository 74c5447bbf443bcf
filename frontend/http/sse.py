"""Server-sent events: a stream whose first event is known before the status is sent.

Events are written by whoever brings their news, as soon as they are there: the task of the response
only begins and ends a stream, and sends while the client reads more slowly than events come.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

import msgspec
from fastapi import Response
from starlette.types import Message, Receive, Scope, Send

from headrace.configs.errors import HeadraceError
from headrace.frontend.http.connection import ClientConnection, ClientDisconnected
from headrace.frontend.http.errors import describe_error

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
FAREWELL_TIMEOUT_S = 1.0
# Key in the scope's "extensions" under which the server offers a `BodyWriter`. Middleware wraps
# `send` to see the headers; events that come after them need not pass through it.
BODY_WRITER = "headrace.body_writer"
_encoder = msgspec.json.Encoder()


class BodyWriter(Protocol):
    """The way to the client behind the headers of a chunked response that is not complete."""

    @property
    def is_ready(self) -> bool:
        """Whether a piece can be written now: the client is there and reads what it gets."""
        ...

    def write(self, data: bytes) -> None:
        """One piece of the body."""
        ...

    async def send(self, message: Message) -> None:
        """As `send` of ASGI: waits for a client that is behind."""
        ...


class EventSource(Protocol):
    """Where the events of a stream come from."""

    @property
    def is_over(self) -> bool:
        """Whether the last event was taken."""
        ...

    def start(self, on_news: Callable[[], None]) -> None:
        """Begin; `on_news`, which does not raise, is called when there may be events to take."""
        ...

    def take(self) -> bytes:
        """All new events, b"" if there are none.

        Raises what ended the stream, once all that came before it was taken.
        """
        ...

    def close(self) -> None:
        """Stop what brings events. Idempotent."""
        ...


def encode_event(value: object) -> bytes:
    """One event with `value` as JSON."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


class EventStreamResponse(Response):
    """Sends the events of a source; a fault becomes one error event, then [DONE].

    `open()` waits for the first event, so that an early fault gets a status of its own; nothing is
    sent before it. From then on, a comment is sent for every `keep_alive_s` without an event; 0
    sends none. The response owns `source` and `connection` and closes both.
    """

    media_type = "text/event-stream; charset=utf-8"

    def __init__(
        self, source: EventSource, connection: ClientConnection, keep_alive_s: float = 0.0
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._first = b""
        self._source = source
        self._connection = connection
        self._keep_alive_s = keep_alive_s
        self._wake = asyncio.Event()
        self._writer: BodyWriter | None = None
        self._is_task_sending = True  # events must not overtake what the task sends
        self._failure: Exception | None = None
        self._now = asyncio.get_running_loop().time
        self._last_sent = 0.0

    @classmethod
    async def open(
        cls, source: EventSource, connection: ClientConnection, keep_alive_s: float = 0.0
    ) -> "EventStreamResponse":
        """Start the source and wait for its first event. Raises what it raises before that."""
        response = cls(source, connection, keep_alive_s)
        try:
            source.start(response._take_news)
            response._first = await connection.run(response._first_events())
        except BaseException:
            source.close()
            raise
        return response

    async def _first_events(self) -> bytes:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if data := self._source.take():
                return data

    def _take_news(self) -> None:
        """Write what is new, or leave it to the task."""
        writer = self._writer
        if writer is None or self._is_task_sending or not writer.is_ready:
            self._wake.set()
            return
        try:
            if data := self._source.take():
                writer.write(data)
                self._last_sent = self._now()
            if self._source.is_over:
                self._wake.set()
        except Exception as error:  # it ends this stream, not the one who brings the news
            self._failure = error
            self._wake.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(start)
            self._writer = scope.get("extensions", {}).get(BODY_WRITER)
            if self._writer is not None:
                send = self._writer.send
            await self._connection.run(self._send_events(send))
        except ClientDisconnected:
            return
        except Exception as error:
            if not isinstance(error, HeadraceError):
                logger.error("a stream failed", exc_info=error)
            await self._say_farewell(send, encode_event(describe_error(error)) + DONE)
        finally:
            self._is_task_sending = True
            self._connection.close()
            self._source.close()

    async def _send_events(self, send: Send) -> None:
        data, source = self._first, self._source
        while True:
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                self._last_sent = self._now()
            if source.is_over:
                break
            data = source.take()
            if not (data or source.is_over):
                data = await self._next()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self) -> bytes:
        """Let events be written as they come, until the task is needed; what it has to send."""
        silence_s = self._keep_alive_s
        self._is_task_sending = False
        try:
            async with asyncio.timeout_at(self._last_sent + silence_s if silence_s else None):
                await self._wake.wait()
        except TimeoutError:
            return KEEP_ALIVE if self._now() >= self._last_sent + silence_s else b""
        finally:
            self._is_task_sending = True
            self._wake.clear()
        if self._failure is not None:
            raise self._failure
        return b""

    async def _say_farewell(self, send: Send, last: bytes) -> None:
        """The last events; a client that does not read cannot hold the server up."""
        try:
            async with asyncio.timeout(FAREWELL_TIMEOUT_S):
                await send({"type": "http.response.body", "body": last, "more_body": False})
        except TimeoutError:
            logger.info("a client did not take the last events of its stream")
