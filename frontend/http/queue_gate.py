"""`--max-num-queued-reqs` and `--max-num-queued-tokens`: a full queue turns requests away.

How many wait is what the engine core said after its last step, plus what was submitted since and
finds no free sequence. The tokens that wait are those of the youngest requests, since the queue is
first come, first served; with priorities that is an estimate.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence

from headrace.engine_core.messages import EngineStats
from headrace.frontend.http.engine import ServingEngine
from headrace.frontend.http.errors import RequestRefused
from headrace.frontend.http.metrics import ServerMetrics


class QueueGate:
    """Admits the requests of one API server while the queue has room."""

    def __init__(self, engine: ServingEngine, metrics: ServerMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._numbers = itertools.count()
        self._prompt_tokens: dict[int, int] = {}  # of what was admitted and has not ended
        self._seen: EngineStats | None = None
        self._num_since = 0

    @contextlib.contextmanager
    def admitted(self, num_prompt_tokens: Sequence[int]) -> Iterator[None]:
        """For the life of a request with prompts of these lengths. Raises RequestRefused (503)."""
        self._check(num_prompt_tokens)
        numbers = [next(self._numbers) for _ in num_prompt_tokens]
        self._prompt_tokens.update(zip(numbers, num_prompt_tokens, strict=True))
        self._num_since += len(numbers)
        try:
            yield
        finally:
            for number in numbers:
                del self._prompt_tokens[number]

    def _check(self, num_prompt_tokens: Sequence[int]) -> None:
        limits = self._engine.config.scheduler_config
        max_reqs, max_tokens = limits.max_num_queued_reqs, limits.max_num_queued_tokens
        if max_reqs is None and max_tokens is None:
            return
        num_replicas = self._engine.config.parallel_config.data_parallel_size_local
        waiting, free = self._num_waiting(num_replicas * limits.max_num_seqs)
        num_queued = waiting + max(0, len(num_prompt_tokens) - free)
        if max_reqs is not None and num_queued > max_reqs:
            self._refuse("max_num_queued_reqs", f"{waiting} requests wait", max_reqs)
        if max_tokens is not None and num_queued > 0:
            youngest = itertools.islice(reversed(self._prompt_tokens.values()), waiting)
            tokens = sum(youngest)
            if tokens + sum(num_prompt_tokens) > max_tokens:
                self._refuse("max_num_queued_tokens", f"{tokens} prompt tokens wait", max_tokens)

    def _num_waiting(self, max_num_seqs: int) -> tuple[int, int]:
        """How many requests wait, and how many more could run at once."""
        stats = self._engine.stats()
        if stats is not self._seen:
            self._seen, self._num_since = stats, 0
        waiting, running = (stats.num_waiting, stats.num_running) if stats else (0, 0)
        free = 0 if waiting else max(0, max_num_seqs - running)
        return waiting + max(0, self._num_since - free), max(0, free - self._num_since)

    def _refuse(self, reason: str, found: str, limit: int) -> None:
        self._metrics.count_rejection(reason)
        flag = "--" + reason.replace("_", "-")
        raise RequestRefused(
            503, "Service Unavailable", f"the queue is full: {found}, {flag} is {limit}; try later"
        )
