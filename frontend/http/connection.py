"""A client's connection: work is given up when the client, or the server, goes."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from headrace.frontend.http.shutdown import Interrupted, Shutdown, going_down, run_until

T = TypeVar("T")


class ClientDisconnected(Exception):
    """The client closed its connection; nobody reads the answer."""


class ClientConnection:
    """Watches one connection, from the end of the request's body to the end of the response."""

    def __init__(self, receive: Receive, shutdown: Shutdown) -> None:
        self._receive = receive
        self._gone = asyncio.create_task(self._until_gone())
        self._cut = asyncio.create_task(shutdown.cut.wait())

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; it is cancelled, and has ended, when this raises.

        Raises ClientDisconnected, or EngineNotReadyError when the server cuts what runs.
        """
        try:
            return await run_until(work, self._gone, self._cut)
        except Interrupted:
            raise ClientDisconnected if self._gone.done() else going_down() from None

    def close(self) -> None:
        """Stop watching."""
        self._gone.cancel()
        self._cut.cancel()

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
