"""The periodic statistics line of the log."""

import logging
import time
from statistics import fmean

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
        self._replicas: dict[int, Stats] = {}  # the last record of each

    def log(self, stats: Stats) -> None:
        """Count a step's tokens and log when the interval is over.

        Of several replicas, rates and counts are the sums, shares the means; a list of each one's
        follows.
        """
        now = time.monotonic()
        if now - self._last_step > self._interval_s:  # do not average over a pause
            self._since, self._num_prompt_tokens, self._num_tokens = now, 0, 0
        self._last_step = now
        self._replicas[stats.engine_rank] = stats
        self._num_prompt_tokens += stats.iteration.num_prompt_tokens
        self._num_tokens += stats.iteration.num_generation_tokens
        elapsed = now - self._since
        if elapsed < self._interval_s or elapsed <= 0:
            return
        replicas = list(self._replicas.values())
        logger.info(
            "%.1f prompt tokens/s, %.1f output tokens/s, %d running, %d waiting, "
            "KV cache %.1f %%, prefix hits %.1f %%%s",
            self._num_prompt_tokens / elapsed,
            self._num_tokens / elapsed,
            sum(replica.num_running_sys for replica in replicas),
            sum(replica.num_waiting_sys for replica in replicas),
            100 * fmean(replica.gpu_cache_usage_sys for replica in replicas),
            100 * fmean(replica.gpu_prefix_cache_hit_rate for replica in replicas),
            self._by_replica(),
        )
        self._since, self._num_prompt_tokens, self._num_tokens = now, 0, 0

    def _by_replica(self) -> str:
        """Running, waiting and outstanding tokens of each replica, if there are several."""
        if len(self._replicas) < 2:
            return ""
        parts = (
            f"{rank}: {stats.num_running_sys}+{stats.num_waiting_sys} "
            f"({stats.engine.num_outstanding_tokens} tokens)"
            for rank, stats in sorted(self._replicas.items())
        )
        return "; running+waiting by replica " + ", ".join(parts)
