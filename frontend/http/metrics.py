"""Metrics of the HTTP layer, and the page that shows them beside the engine's.

Nothing here can raise into serving: a fault while counting is logged once and dropped. The engine's
own metrics come from its `PrometheusStatLogger`.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    Summary,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.frontend.http.auth import route_path
from headrace.frontend.http.engine import ServingEngine
from headrace.frontend.prometheus_logger import PREFIX, PrometheusStatLogger

logger = logging.getLogger(__name__)

UNCOUNTED_PATHS = frozenset(
    {
        "/metrics", "/load", "/ping", "/version",
        "/health", "/health/live", "/health/ready", "/health/progress",
    }
)  # fmt: skip
DURATION_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30,
    60,
)  # fmt: skip
COARSE_DURATION_BUCKETS = (0.1, 0.5, 1)
REJECTION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class ServerMetrics:
    """What one API server counts, in a registry of its own."""

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine
        self._registry = registry = CollectorRegistry()
        self._has_failed = False
        self._unknown_fields = Counter(
            PREFIX + "unknown_request_fields",
            "request fields that are not known",
            ["model_name", "engine"],
            registry=registry,
        )
        self._rejections = Counter(
            PREFIX + "admission_rejections",
            "requests refused because the queue was full",
            ["model_name", "reason"],
            registry=registry,
        )
        self._requests = Counter(
            "http_requests", "requests", ["handler", "method", "status"], registry=registry
        )
        self._request_size = Summary(
            "http_request_size_bytes", "Content-Length of requests", ["handler"], registry=registry
        )
        self._response_size = Summary(
            "http_response_size_bytes", "Content-Length of responses", ["handler"],
            registry=registry,
        )  # fmt: skip
        self._duration = Histogram(
            "http_request_duration_highr_seconds",
            "time to the end of the response",
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        self._duration_by_handler = Histogram(
            "http_request_duration_seconds",
            "time to the end of the response",
            ["handler", "method"],
            buckets=COARSE_DURATION_BUCKETS,
            registry=registry,
        )
        registry.register(_FollowedRequests(engine))
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)

    def count_unknown_fields(self, num_fields: int) -> None:
        """Count names in a body that nobody knows."""
        self._safely(lambda: self._unknown().inc(num_fields))

    def count_rejection(self, reason: str) -> None:
        """Count a request that a full queue turned away; one of REJECTION_REASONS."""
        self._safely(lambda: self._rejections.labels(self._model_name(), reason).inc())

    def count_request(
        self,
        handler: str,
        method: str,
        status: int,
        seconds: float,
        request_size: int | None,
        response_size: int | None,
    ) -> None:
        """Count one finished HTTP request; sizes in bytes, None where no length was announced."""

        def count() -> None:
            self._requests.labels(handler, method, f"{status // 100}xx").inc()
            if request_size is not None:
                self._request_size.labels(handler).observe(request_size)
            if response_size is not None:
                self._response_size.labels(handler).observe(response_size)
            self._duration.observe(seconds)
            self._duration_by_handler.labels(handler, method).observe(seconds)

        self._safely(count)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """All metrics as text, and its content type; `accept` is the request's header."""
        registries = [self._registry]
        if self._engine.state != "starting":
            self._safely(self._create_series)
            engine_logger = self._engine.stat_loggers.get("prometheus")
            if isinstance(engine_logger, PrometheusStatLogger):
                registries.insert(0, engine_logger.registry)
        return expose(_Together(registries), accept)

    def _create_series(self) -> None:
        self._unknown()
        for reason in REJECTION_REASONS:
            self._rejections.labels(self._model_name(), reason)

    def _unknown(self) -> Counter:
        return self._unknown_fields.labels(self._model_name(), first_rank(self._engine))

    def _model_name(self) -> str:
        return self._engine.model_config.served_model_name

    def _safely(self, count: Callable[[], object]) -> None:
        try:
            count()
        except Exception:  # a fault in the metrics never ends a response
            if not self._has_failed:
                logger.exception("a metric could not be counted; further faults are not logged")
            self._has_failed = True


def first_rank(engine: ServingEngine) -> str:
    """The label of what is about the front end, and so about no single replica."""
    return str(engine.config.parallel_config.data_parallel_start_rank)


def expose(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """A registry in the format that an `Accept` header asks for, and its content type."""
    if "application/openmetrics-text" in accept:
        # The library's other escapings of this format turn the colon of our names into "_".
        return openmetrics.generate_latest(registry, openmetrics.ALLOWUTF8), (
            openmetrics.CONTENT_TYPE_LATEST
        )
    encoder, content_type = choose_encoder(accept)
    return encoder(registry), content_type


class HttpMetrics:
    """ASGI middleware: counts requests by route, never by what a client made up.

    `handlers`: the path, as the route table has it, of every endpoint.
    """

    def __init__(
        self, app: ASGIApp, metrics: ServerMetrics, handlers: Mapping[object, str]
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status, response_size = 500, None

        async def counting_send(message: Message) -> None:
            nonlocal status, response_size
            if message["type"] == "http.response.start":
                status = message["status"]
                response_size = _content_length(message.get("headers", ()))
            await send(message)

        try:
            await self._app(scope, receive, counting_send)
        finally:
            handler = self._handlers.get(scope.get("endpoint"), "none")
            if handler not in UNCOUNTED_PATHS and route_path(scope) not in UNCOUNTED_PATHS:
                method = scope["method"] if scope["method"] in METHODS else "none"
                seconds = time.perf_counter() - began
                request_size = _content_length(scope["headers"])
                self._metrics.count_request(
                    handler, method, status, seconds, request_size, response_size
                )


def _content_length(headers: object) -> int | None:
    for name, value in headers:  # type: ignore[attr-defined]
        if name.lower() == b"content-length" and value.isdigit():
            return int(value[:20])
    return None


class _FollowedRequests(Collector):
    """A gauge that is read when scraped."""

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        if self._engine.state == "starting":
            return
        family = GaugeMetricFamily(
            PREFIX + "num_frontend_requests",
            "requests that this front end follows",
            labels=("model_name", "engine"),
        )
        labels = (self._engine.model_config.served_model_name, first_rank(self._engine))
        family.add_metric(labels, self._engine.num_requests)
        yield family

    def describe(self) -> list[Metric]:
        return []


class _Together(CollectorRegistry):
    """Several registries as one, for an encoder."""

    def __init__(self, registries: list[CollectorRegistry]) -> None:
        super().__init__()
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        for registry in self._registries:
            yield from registry.collect()
