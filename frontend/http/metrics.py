"""Prometheus metrics: gauges and counters of the engine core, counters of this front end.

Nothing here can raise into serving: a fault while counting is logged once and dropped.
"""

import logging
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from headrace.engine_core.messages import EngineStats
from headrace.frontend.http.engine import ServingEngine

logger = logging.getLogger(__name__)

LABELS = ["model_name", "engine"]
ENGINE_RANK = "0"
FINISH_REASONS = ("stop", "length", "abort", "error")
GAUGES = {  # metric -> (field of EngineStats, help)
    "headrace:num_requests_running": ("num_running", "sequences in the running batch"),
    "headrace:num_requests_waiting": ("num_waiting", "sequences waiting to run"),
    "headrace:num_free_blocks": ("num_free_blocks", "KV-cache blocks that can be handed out"),
    "headrace:num_blocks": ("num_blocks", "KV-cache blocks"),
    "headrace:num_engine_requests": ("num_requests", "entries in the engine core's request table"),
}
COUNTERS = {
    "headrace:engine_steps": ("step", "steps of the engine core"),
    "headrace:num_preemptions": ("num_preemptions", "preemptions"),
    "headrace:prefix_cache_queries": ("prefix_cache_queries", "prompt tokens looked up"),
    "headrace:prefix_cache_hits": ("prefix_cache_hits", "prompt tokens found in the cache"),
    "headrace:accounting_errors": ("accounting_errors", "block accounting mismatches, healed"),
    "headrace:corrupted_requests": ("num_corrupted", "sequences that failed by non-finite logits"),
}


class ServerMetrics:
    """All metrics of one API server, in a registry of its own."""

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine
        self._registry = CollectorRegistry()
        self._has_failed = False
        self._prompt_tokens = self._counter("prompt_tokens", "prompt tokens of started requests")
        self._generation_tokens = self._counter("generation_tokens", "generated tokens")
        self._finished = self._counter(
            "request_success", "sequences that ended, by reason", ["finished_reason"]
        )
        self._unknown_fields = self._counter(
            "unknown_request_fields", "request fields that are not known"
        )
        self._registry.register(_EngineCollector(engine))

    def count_prompt(self, num_tokens: int) -> None:
        self._add(self._prompt_tokens, num_tokens)

    def count_generated(self, num_tokens: int) -> None:
        self._add(self._generation_tokens, num_tokens)

    def count_finished(self, reason: str, num_sequences: int = 1) -> None:
        self._add(self._finished, num_sequences, reason)

    def count_unknown_fields(self, num_fields: int) -> None:
        self._add(self._unknown_fields, num_fields)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The metrics as text, and its content type; `accept` is the request's header."""
        if self._engine.state != "starting":
            self._create_series()
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type

    def _counter(self, name: str, help: str, labels: list[str] | None = None) -> Counter:
        return Counter(
            f"headrace:{name}", help, [*LABELS, *(labels or [])], registry=self._registry
        )

    def _create_series(self) -> None:
        for counter in (self._prompt_tokens, self._generation_tokens, self._unknown_fields):
            self._add(counter, 0)
        for reason in FINISH_REASONS:
            self._add(self._finished, 0, reason)

    def _add(self, counter: Counter, amount: int, *labels: str) -> None:
        try:
            model_name = self._engine.model_config.served_model_name
            counter.labels(model_name, ENGINE_RANK, *labels).inc(amount)
        except Exception:  # a fault in the metrics never ends a response
            if not self._has_failed:
                logger.exception("a metric could not be counted; further faults are not logged")
            self._has_failed = True


class _EngineCollector(Collector):
    """Reads the engine's statistics when scraped, so that serving pays nothing for them."""

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        if stats is None:
            return
        labels = [self._engine.model_config.served_model_name, ENGINE_RANK]
        gauges = {name: (getattr(stats, field), help) for name, (field, help) in GAUGES.items()}
        gauges["headrace:kv_cache_usage_perc"] = (_usage(stats), "share of blocks in use, 0 to 1")
        gauges["headrace:num_frontend_requests"] = (
            self._engine.num_requests,
            "requests that this front end follows",
        )
        for name, (value, help) in gauges.items():
            gauge = GaugeMetricFamily(name, help, labels=LABELS)
            gauge.add_metric(labels, value)
            yield gauge
        for name, (field, help) in COUNTERS.items():
            counter = CounterMetricFamily(name, help, labels=LABELS)
            counter.add_metric(labels, getattr(stats, field))
            yield counter

    def describe(self) -> list[Metric]:
        return []


def _usage(stats: EngineStats) -> float:
    return 1.0 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0
