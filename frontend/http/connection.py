"""A client's connection: work is given up when the client, or the server, goes."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from headrace.configs.errors import EngineNotReadyError

T = TypeVar("T")


class ClientDisconnected(Exception):
    """The client closed its connection; nobody reads the answer."""


class ClientConnection:
    """Watches one connection, from the end of the request's body to the end of the response."""

    def __init__(self, receive: Receive, stopping: asyncio.Event) -> None:
        self._receive = receive
        self._gone = asyncio.create_task(self._until_gone())
        self._stopping = asyncio.create_task(stopping.wait())

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; it is cancelled, and has ended, when this raises.

        Raises ClientDisconnected, or EngineNotReadyError when the server goes down.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait(
                {task, self._gone, self._stopping}, return_when=asyncio.FIRST_COMPLETED
            )
            if task.done():
                return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        if self._gone.done():
            raise ClientDisconnected
        raise EngineNotReadyError("the server is shutting down; try again on another one")

    def close(self) -> None:
        """Stop watching."""
        self._gone.cancel()
        self._stopping.cancel()

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
