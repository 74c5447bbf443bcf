"""The response of a stream: every event once and in order, whoever writes it."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.configs.errors import RequestFailedError
from headrace.frontend.http.connection import ClientConnection
from headrace.frontend.http.shutdown import Shutdown
from headrace.frontend.http.sse import BODY_WRITER, KEEP_ALIVE, EventStreamResponse


class Source:
    """Events as bytes; `put(None)` ends them."""

    def __init__(self) -> None:
        self.is_over = False
        self.is_closed = False
        self.failure: Exception | None = None
        self._data = b""
        self._ends = False

    def start(self, on_news: Callable[[], None]) -> None:
        self._on_news = on_news

    def put(self, data: bytes | None) -> None:
        self._ends = self._ends or data is None
        self._data += data or b""
        self._on_news()

    def fail(self, failure: Exception) -> None:
        self.failure = failure
        self._on_news()

    def take(self) -> bytes:
        assert not self.is_over
        data, self._data = self._data, b""
        if not data and self.failure is not None:
            raise self.failure
        self.is_over = self._ends
        return data

    def close(self) -> None:
        self.is_closed = True


class Client:
    """Both ways to it, as a server has them: `send` waits while the client is behind."""

    def __init__(self) -> None:
        self.received = b""
        self.num_direct = 0
        self.is_complete = False
        self.reads = asyncio.Event()
        self.reads.set()

    @property
    def is_ready(self) -> bool:
        return self.reads.is_set()

    def write(self, data: bytes) -> None:
        assert self.is_ready and not self.is_complete
        self.num_direct += 1
        self.received += data

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        assert not self.is_complete
        self.received += message.get("body", b"")
        self.is_complete = message.get("more_body") is False

    async def receive(self) -> Any:
        await asyncio.Event().wait()


async def begin(
    source: Source, client: Client, keep_alive_s: float = 0.0, direct: bool = True
) -> "asyncio.Task[None]":
    """The response as a task, once its first event was sent."""
    connection = ClientConnection(client.receive, Shutdown())
    opening = asyncio.create_task(EventStreamResponse.open(source, connection, keep_alive_s))
    await asyncio.sleep(0)
    source.put(b"first ")
    response = await opening
    scope = {"type": "http", "extensions": {BODY_WRITER: client} if direct else {}}
    task = asyncio.create_task(response(scope, client.receive, client.send))
    await settle()
    return task


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(["put", "nothing", "pause", "read", "turn", "turn"]), max_size=40),
    st.sampled_from(["end", "fail"]),
    st.booleans(),
)
def test_every_event_once_and_in_order(acts: list[str], end: str, direct: bool) -> None:
    async def go() -> None:
        source, client = Source(), Client()
        task = await begin(source, client, direct=direct)
        expected = b"first "
        for number, act in enumerate(acts):
            if act == "put":
                expected += b"%d " % number
                source.put(b"%d " % number)
            elif act == "nothing":  # text that is held back
                source.put(b"")
            elif act == "pause":
                client.reads.clear()
            elif act == "read":
                client.reads.set()
            else:
                await asyncio.sleep(0)
        if end == "end":
            source.put(None)
        else:
            source.fail(RequestFailedError("planted"))
        client.reads.set()
        await asyncio.wait_for(task, 5)
        assert client.is_complete and source.is_closed
        if end == "fail":
            received, error = client.received.split(b"data: ", 1)
            assert received == expected and b"planted" in error and error.endswith(b"[DONE]\n\n")
        else:
            assert client.received == expected

    asyncio.run(go())


def test_a_client_that_keeps_up_costs_no_turn_of_the_task() -> None:
    async def go() -> None:
        source, client = Source(), Client()
        task = await begin(source, client)
        for _ in range(5):
            source.put(b"x")
        assert client.received == b"first xxxxx" and client.num_direct == 5
        source.put(None)
        await task

    asyncio.run(go())


def test_a_fault_before_the_first_event_is_raised() -> None:
    async def go() -> None:
        source, client = Source(), Client()
        connection = ClientConnection(client.receive, Shutdown())
        opening = asyncio.create_task(EventStreamResponse.open(source, connection))
        await asyncio.sleep(0)
        source.fail(RequestFailedError("planted"))
        with pytest.raises(RequestFailedError, match="planted"):
            await opening
        assert source.is_closed
        connection.close()

    asyncio.run(go())


def test_the_end_of_the_task_is_the_end_of_writing() -> None:
    async def go() -> None:
        source, client = Source(), Client()
        task = await begin(source, client)
        task.cancel()
        await asyncio.wait({task})
        source.put(b"late")
        assert source.is_closed and b"late" not in client.received

    asyncio.run(go())


@pytest.mark.parametrize("direct", [True, False])
def test_comments_come_only_in_silence(direct: bool) -> None:
    async def go() -> None:
        source, client = Source(), Client()
        task = await begin(source, client, keep_alive_s=0.1, direct=direct)
        for _ in range(10):
            await asyncio.sleep(0.02)
            source.put(b"x")
        assert KEEP_ALIVE not in client.received
        await asyncio.sleep(0.35)
        assert 2 <= client.received.count(KEEP_ALIVE) <= 3
        source.put(b"y")
        source.put(None)
        await task
        assert client.received.replace(KEEP_ALIVE, b"") == b"first xxxxxxxxxxy"

    asyncio.run(go())
