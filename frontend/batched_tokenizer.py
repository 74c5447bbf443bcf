"""A tokenizer for coroutines: what they ask for at the same time is one job of the thread pool."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, Protocol

MAX_BATCH_SIZE = 32  # items
MAX_WAIT_S = 0.002

_Job = tuple[Callable[[], Any], asyncio.Future[Any]]


class SyncTokenizer(Protocol):
    """What is made asynchronous."""

    def encode(
        self, text: str, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class BatchedTokenizer:
    """`encode` and `decode` with the results of the tokenizer it wraps.

    Requests are collected while a batch runs, up to 32 of them or 2 ms; an idle one starts at once.
    A request that fails raises in its own waiter, and one whose waiter has gone is left out. It
    belongs to the event loop that uses it; nothing of it runs between requests.
    """

    def __init__(self, tokenizer: SyncTokenizer, executor: Executor) -> None:
        self._tokenizer = tokenizer
        self._executor = executor
        self._loop: asyncio.AbstractEventLoop | None = None
        self._jobs: list[_Job] = []
        self._timer: asyncio.Handle | None = None
        self._num_running = 0

    async def encode(
        self, text: str, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of `text`; see `Tokenizer.encode`."""
        work = partial(self._tokenizer.encode, text, add_special_tokens, parse_special)
        ids: list[int] = await self._submit(work)
        return ids

    async def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; see `Tokenizer.decode`."""
        work = partial(self._tokenizer.decode, ids, skip_special_tokens)
        text: str = await self._submit(work)
        return text

    def _submit(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # another asyncio.run(): nobody waits on the old one's jobs
            self._loop, self._jobs, self._timer, self._num_running = loop, [], None, 0
        future: asyncio.Future[Any] = loop.create_future()
        self._jobs.append((work, future))
        if len(self._jobs) >= MAX_BATCH_SIZE:
            self._start()
        elif self._timer is None:
            # Whoever is ready to run in this turn of an idle loop still gets into the first batch.
            wait = MAX_WAIT_S if self._num_running else 0.0
            self._timer = loop.call_later(wait, self._start)
        return future

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch = [job for job in self._jobs if not job[1].done()]
        self._jobs = []
        if not batch or self._loop is None:
            return
        self._num_running += 1
        try:
            done = self._loop.run_in_executor(self._executor, _run, batch)
        except RuntimeError as error:  # the pool was shut down
            self._num_running -= 1
            for _, future in batch:
                future.set_exception(error)
            return
        done.add_done_callback(partial(self._finish, self._loop, batch))

    def _finish(
        self,
        loop: asyncio.AbstractEventLoop,
        batch: list[_Job],
        done: asyncio.Future[list[tuple[Any, Exception | None]]],
    ) -> None:
        if loop is self._loop:
            self._num_running -= 1
        if done.cancelled():  # the pool was shut down before the batch began
            for _, future in batch:
                future.cancel()
            return
        for (_, future), (value, error) in zip(batch, done.result(), strict=True):
            if future.done():
                continue
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)


def _run(batch: list[_Job]) -> list[tuple[Any, Exception | None]]:
    results: list[tuple[Any, Exception | None]] = []
    for work, future in batch:
        if future.cancelled():
            results.append((None, None))
            continue
        try:
            results.append((work(), None))
        except Exception as error:
            results.append((None, error))
    return results
