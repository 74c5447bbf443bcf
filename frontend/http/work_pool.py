"""Threads for the CPU work that big bodies need: the event loop goes on meanwhile."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from headrace.frontend.http.limits import KIB

T = TypeVar("T")

NUM_THREADS = 2
INLINE_BYTES = 64 * KIB  # up to here, handing work over costs more than it saves


class WorkPool:
    """A bounded pool; threads are started when they are first needed."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="http-work")

    async def run(self, work: Callable[[], T], num_bytes: int) -> T:
        """The result of `work`, which goes over a body of `num_bytes`."""
        if num_bytes <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def shutdown(self) -> None:
        """Take no more work; what waits is dropped, what runs is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)
