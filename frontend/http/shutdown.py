"""How a server ends: it refuses what is new, waits for what runs, and at last ends that, too."""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from headrace.configs.errors import EngineNotReadyError

T = TypeVar("T")


class Interrupted(Exception):
    """What was waited for did not end in time."""


class Shutdown:
    """The end of one API server. `begun` comes first, then `cut`; neither is ever unset.

    begun: new requests are refused. cut: the requests that still run end with an error.
    """

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.cut = asyncio.Event()
        self.num_running = 0
        self.num_at_begin = 0
        self._over = asyncio.Event()  # begun, and nothing runs or nothing is waited for

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """For the life of a request, to the last byte of its response."""
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
            self._note_idle()

    def begin(self) -> None:
        """Refuse new requests from now on. Idempotent."""
        if not self.begun.is_set():
            self.num_at_begin = self.num_running
        self.begun.set()
        self._note_idle()

    def end(self) -> None:
        """Cut what runs."""
        self.begin()
        self.cut.set()
        self._over.set()

    async def drain(self, timeout_s: float) -> int:
        """Wait until nothing runs, but no longer than that or until `end()`; the number cut."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._over.wait()
        num_cut = self.num_running
        self.end()
        return num_cut

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises EngineNotReadyError, with `work` cancelled, when cut."""
        cut = asyncio.create_task(self.cut.wait())
        try:
            return await run_until(work, cut)
        except Interrupted:
            raise going_down() from None
        finally:
            cut.cancel()

    def _note_idle(self) -> None:
        if self.begun.is_set() and not self.num_running:
            self._over.set()


def going_down() -> EngineNotReadyError:
    """The answer to everything that comes, or still runs, when a server ends."""
    return EngineNotReadyError("the server is shutting down; try again on another one")


async def run_until(work: Coroutine[Any, Any, T], *ends: "asyncio.Task[Any]") -> T:
    """The result of `work`; Interrupted if one of `ends` is done first.

    `work` is cancelled, and has ended, when this raises.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    raise Interrupted
