"""One data-parallel replica as a client sees it: its connection while it is up, its statistics."""

import time
from collections.abc import Callable

import msgspec
import zmq

from headrace.engine_core.connection import Connection
from headrace.engine_core.control_messages import EngineDown, EngineUp, Unreachable
from headrace.engine_core.messages import EngineStats, Ready

# Of EngineStats: what a fresh engine core counts from 0 again.
_COUNTERS = (
    "step", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "accounting_errors",
    "num_corrupted", "num_computed_prompt_tokens",
)  # fmt: skip


class ReplicaView:
    """Lives as long as its client; engine cores come and go."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.connection: Connection | None = None
        self.ready: Ready | None = None  # of the last engine core
        self.down: EngineDown | None = None  # how it was lost, until the next one is up
        self.stats = EngineStats()  # the last ones, with those of engine cores before
        self._down_since = 0.0  # monotonic seconds
        self._before = EngineStats()  # of engine cores before

    def connect(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        event: EngineUp,
        client_id: str,
        on_loss: Callable[[Unreachable], object],
    ) -> Connection:
        """An engine core is up. `down` says until `recovered` how the last one was lost.

        `on_loss` is called, in any thread, when the connection to another node is lost.
        """
        self.disconnect()
        self.ready = event.ready
        self.connection = Connection(context, event, client_id, on_loss)
        return self.connection

    def disconnect(self) -> None:
        """Idempotent."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def lose(self, event: EngineDown) -> None:
        """The engine core is gone, and what it had sent was taken."""
        self.disconnect()
        was_modified = event.was_modified
        if self.down is None:
            self._down_since = time.monotonic()
        else:
            was_modified |= self.down.was_modified
        self.down = msgspec.structs.replace(event, was_modified=was_modified)
        self._before = msgspec.structs.replace(self.stats)

    def recovered(self, num_replayed: int) -> float:
        """What the loss has led to is done: the seconds that it took."""
        pause = time.monotonic() - self._down_since
        self.down = None
        self._before.num_restarts += 1
        self._before.num_replayed_requests += num_replayed
        self._before.recovery_s += pause
        self._count_losses(msgspec.structs.replace(self.stats))
        return pause

    def count_replayed(self, num_replayed: int) -> None:
        """Requests that another replica has taken over."""
        self._before.num_replayed_requests += num_replayed
        self._count_losses(msgspec.structs.replace(self.stats))

    def total(self, stats: EngineStats) -> EngineStats:
        """Counters since the start of this client; changes `stats`."""
        before = self._before
        if before.num_restarts or self.down is not None:
            for name in _COUNTERS:
                setattr(stats, name, getattr(stats, name) + getattr(before, name))
        self._count_losses(stats)
        return stats

    def _count_losses(self, stats: EngineStats) -> None:
        """In the statistics of now; those that somebody may have been given stay as they are."""
        stats.num_restarts = self._before.num_restarts
        stats.num_replayed_requests = self._before.num_replayed_requests
        stats.recovery_s = self._before.recovery_s
        self.stats = stats

    def idle(self, num_waiting: int) -> EngineStats:
        """The statistics of an engine core that runs nothing."""
        num_blocks = self.stats.num_blocks
        stats = self.total(EngineStats(num_free_blocks=num_blocks, num_blocks=num_blocks))
        stats.num_waiting = num_waiting
        return stats
