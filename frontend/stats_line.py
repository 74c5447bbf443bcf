"""The periodic statistics line of the log."""

import logging
import time

from headrace.engine_core.messages import EngineCoreOutput, EngineStats

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


class StatsLine:
    """Logs throughput and load every ten seconds while there is work."""

    def __init__(self) -> None:
        self._since = self._last_step = time.monotonic()
        self._num_tokens = 0

    def update(self, stats: EngineStats, outputs: list[EngineCoreOutput]) -> None:
        """Count a step's tokens and log when the interval is over."""
        now = time.monotonic()
        if now - self._last_step > INTERVAL_S:  # do not average over a pause
            self._since, self._num_tokens = now, 0
        self._last_step = now
        self._num_tokens += sum(len(output.new_token_ids) for output in outputs)
        if now - self._since < INTERVAL_S:
            return
        used = stats.num_blocks - stats.num_free_blocks
        hits = stats.prefix_cache_hits / max(1, stats.prefix_cache_queries)
        logger.info(
            "%.1f output tokens/s, %d running, %d waiting, KV cache %.1f %%, prefix hits %.1f %%",
            self._num_tokens / (now - self._since),
            stats.num_running,
            stats.num_waiting,
            100 * used / max(1, stats.num_blocks),
            100 * hits,
        )
        self._since, self._num_tokens = now, 0
