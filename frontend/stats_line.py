"""The periodic statistics line of the log."""

import logging
import time

from headrace.frontend.stats import StatLoggerBase, Stats

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


class LoggingStatLogger(StatLoggerBase):
    """Logs throughput and load every `interval_s` seconds while there is work."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._since = self._last_step = time.monotonic()
        self._num_prompt_tokens = 0
        self._num_tokens = 0

    def log(self, stats: Stats) -> None:
        """Count a step's tokens and log when the interval is over."""
        now = time.monotonic()
        if now - self._last_step > self._interval_s:  # do not average over a pause
            self._since, self._num_prompt_tokens, self._num_tokens = now, 0, 0
        self._last_step = now
        self._num_prompt_tokens += stats.iteration.num_prompt_tokens
        self._num_tokens += stats.iteration.num_generation_tokens
        elapsed = now - self._since
        if elapsed < self._interval_s or elapsed <= 0:
            return
        logger.info(
            "%.1f prompt tokens/s, %.1f output tokens/s, %d running, %d waiting, "
            "KV cache %.1f %%, prefix hits %.1f %%",
            self._num_prompt_tokens / elapsed,
            self._num_tokens / elapsed,
            stats.num_running_sys,
            stats.num_waiting_sys,
            100 * stats.gpu_cache_usage_sys,
            100 * stats.gpu_prefix_cache_hit_rate,
        )
        self._since, self._num_prompt_tokens, self._num_tokens = now, 0, 0
