"""Sends benchmark requests at their times and waits for all answers."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.frontend.cli.bench.http_target import Target
from headrace.frontend.cli.bench.load_client import LoadRequest, Record, send


@dataclass(frozen=True)
class LoadRun:
    """Records in the order of the requests, and when the run began and ended (perf_counter)."""

    records: list[Record]
    started_at: float
    ended_at: float

    @property
    def duration(self) -> float:
        return self.ended_at - self.started_at


async def run_load(
    target: Target,
    requests: Sequence[LoadRequest],
    times: Sequence[float],
    *,
    max_concurrency: int | None = None,
    timeout_s: float,
    on_done: Callable[[Record], None] = lambda record: None,
) -> LoadRun:
    """Send request i `times[i]` seconds after the start, or when a slot is free again.

    The clock of a request starts when it is sent, not when it would have been due; how late it was
    is in its record.
    """
    slots = asyncio.Semaphore(max_concurrency or len(requests) or 1)
    start = time.perf_counter()
    records = [
        Record(request, scheduled_at=start + at)
        for request, at in zip(requests, times, strict=True)
    ]

    async def one(record: Record) -> None:
        try:
            await send(target, record, timeout_s)
        finally:
            slots.release()
        on_done(record)

    async with asyncio.TaskGroup() as tasks:
        for record in records:
            delay = record.scheduled_at - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            await slots.acquire()
            tasks.create_task(one(record))
    return LoadRun(records, start, time.perf_counter())
