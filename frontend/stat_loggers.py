"""The stat loggers of one engine: who they are, and records handed to all of them."""

import logging

from headrace.configs.config import EngineConfig
from headrace.engine_core.messages import EngineStats
from headrace.frontend.stats import IterationStats, StatLoggerBase, make_stats

logger = logging.getLogger(__name__)


class StatLoggers:
    """One engine's; each gets every record."""

    def __init__(self, by_name: dict[str, StatLoggerBase] | None) -> None:
        """`by_name` None: statistics are disabled."""
        self._by_name = by_name
        self._has_failed: set[str] = set()
        self._num_preemptions: dict[int, int] = {}  # by rank

    @classmethod
    def of(cls, config: EngineConfig, given: dict[str, StatLoggerBase] | None) -> "StatLoggers":
        """Those that were given, else a line in the log and the metrics for Prometheus."""
        if not config.log_stats:
            return cls(None)
        return cls(_default_loggers(config) if given is None else given)

    @property
    def by_name(self) -> dict[str, StatLoggerBase]:
        """The loggers; none when statistics are disabled."""
        return {} if self._by_name is None else self._by_name

    def add(self, name: str, stat_logger: StatLoggerBase) -> None:
        """RuntimeError if statistics are disabled, KeyError if the name is taken."""
        loggers = self._enabled()
        if name in loggers:
            raise KeyError(f"there is a stat logger {name!r} already")
        loggers[name] = stat_logger

    def remove(self, name: str) -> None:
        """RuntimeError if statistics are disabled, KeyError if there is no such logger."""
        loggers = self._enabled()
        if name not in loggers:
            raise KeyError(f"there is no stat logger {name!r}, only {', '.join(loggers) or 'none'}")
        del loggers[name]
        self._has_failed.discard(name)

    def record(self, engine: EngineStats, iteration: IterationStats, rank: int = 0) -> None:
        """Hand a record of one replica to every logger.

        One that raises is named in the log once.
        """
        if not self._by_name:
            return
        before = self._num_preemptions.get(rank, 0)
        self._num_preemptions[rank] = engine.num_preemptions
        num_new_preemptions = max(0, engine.num_preemptions - before)
        stats = make_stats(engine, iteration, num_new_preemptions, rank)
        for name, stat_logger in list(self._by_name.items()):
            try:
                stat_logger.log(stats)
            except Exception:  # whatever a logger does, requests go on
                if name not in self._has_failed:
                    self._has_failed.add(name)
                    logger.exception("stat logger %r failed; it is not reported again", name)

    def _enabled(self) -> dict[str, StatLoggerBase]:
        if self._by_name is None:
            raise RuntimeError("statistics are disabled (disable_log_stats); start without that")
        return self._by_name


def _default_loggers(config: EngineConfig) -> dict[str, StatLoggerBase]:
    from headrace.frontend.prometheus_logger import PrometheusStatLogger
    from headrace.frontend.stats_line import LoggingStatLogger

    interval_s = config.observability_config.log_stats_interval_s
    return {"logging": LoggingStatLogger(interval_s), "prometheus": PrometheusStatLogger(config)}
