"""Server-sent events: a stream whose first event is known before the status is sent."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

from headrace.configs.errors import HeadraceError
from headrace.frontend.http.connection import ClientConnection, ClientDisconnected
from headrace.frontend.http.errors import describe_error

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
FAREWELL_TIMEOUT_S = 1.0
# Key in the scope's "extensions" under which the server offers its own `send`, as {"send": send}.
# Middleware wraps `send` to see the headers; events that come after them need not pass through it.
DIRECT_SEND = "headrace.direct_send"
_encoder = msgspec.json.Encoder()


def encode_event(value: object) -> bytes:
    """One event with `value` as JSON."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


class EventStreamResponse(Response):
    """Sends `first` and then what `events` yields; a fault becomes one error event, then [DONE].

    `open()` waits for the first event, so that an early fault gets a status of its own; nothing is
    sent before it. From then on, a comment is sent for every `keep_alive_s` without an event; 0
    sends none. The response owns `events` and `connection` and closes both.
    """

    media_type = "text/event-stream; charset=utf-8"

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        connection: ClientConnection,
        keep_alive_s: float = 0.0,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._connection = connection
        self._keep_alive_s = keep_alive_s

    @classmethod
    async def open(
        cls,
        events: AsyncGenerator[bytes, None],
        connection: ClientConnection,
        keep_alive_s: float = 0.0,
    ) -> "EventStreamResponse":
        """Wait for the first event. Raises what `events` raises before it."""

        async def first_event() -> bytes:
            return await anext(events)

        return cls(await connection.run(first_event()), events, connection, keep_alive_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(start)
            send = scope.get("extensions", {}).get(DIRECT_SEND, {}).get("send", send)
            await self._connection.run(self._send_events(send))
        except ClientDisconnected:
            return
        except Exception as error:
            if not isinstance(error, HeadraceError):
                logger.exception("a stream failed")
            await self._say_farewell(send, encode_event(describe_error(error)) + DONE)
        finally:
            self._connection.close()
            await self._events.aclose()

    async def _send_events(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        events = self._events
        if self._keep_alive_s > 0:
            events = with_keep_alive(events, self._keep_alive_s)
        async with contextlib.aclosing(events):
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _say_farewell(self, send: Send, last: bytes) -> None:
        """The last events; a client that does not read cannot hold the server up."""
        try:
            async with asyncio.timeout(FAREWELL_TIMEOUT_S):
                await send({"type": "http.response.body", "body": last, "more_body": False})
        except TimeoutError:
            logger.info("a client did not take the last events of its stream")


async def with_keep_alive(
    events: AsyncGenerator[bytes, None], interval_s: float
) -> AsyncGenerator[bytes, None]:
    """`events`, and a comment whenever none came for `interval_s` seconds."""
    while True:
        event = asyncio.ensure_future(anext(events, None))
        try:
            while not (await asyncio.wait({event}, timeout=interval_s))[0]:
                yield KEEP_ALIVE
        finally:
            if not event.done():
                event.cancel()
                await asyncio.wait({event})
        if (data := event.result()) is None:
            return
        yield data
