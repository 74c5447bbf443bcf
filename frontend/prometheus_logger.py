"""Engine metrics for Prometheus, under `headrace:`, from the statistics of every step.

The numbers are kept as plain Python values and turned into families when they are read, so that a
step of hundreds of requests costs microseconds. Series exist, at zero, from the start. Names and
buckets are those of the public API; times are in seconds.
"""

import bisect
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headrace.configs.config import EngineConfig
from headrace.engine_core.messages import ROUTING_REASONS, EngineStats
from headrace.frontend.stats import FinishedRequest, StatLoggerBase, Stats

PREFIX = "headrace:"
LABELS = ("model_name", "engine")
MODEL_SETTINGS = ("dtype", "quantization", "max_model_len")
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")

LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
INTER_TOKEN_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
STEP_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N_BUCKETS = (1, 2, 5, 10, 20)
PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)

GAUGES = {  # name -> (field of EngineStats, help)
    "num_requests_running": ("num_running", "sequences in the running batch"),
    "num_requests_waiting": ("num_waiting", "sequences waiting to run"),
    "num_free_blocks": ("num_free_blocks", "KV-cache blocks that can be handed out"),
    "num_blocks": ("num_blocks", "KV-cache blocks"),
    "num_engine_requests": ("num_requests", "entries in the engine core's request table"),
    "outstanding_tokens": (
        "num_outstanding_tokens",
        "prompt tokens to compute and output tokens expected, of several replicas",
    ),
}
ENGINE_COUNTERS = {  # name -> (field of EngineStats, help)
    "engine_steps": ("step", "steps of the engine core"),
    "num_preemptions": ("num_preemptions", "preemptions"),
    "prefix_cache_queries": ("prefix_cache_queries", "prompt tokens looked up in the cache"),
    "prefix_cache_hits": ("prefix_cache_hits", "prompt tokens found in the cache"),
    "computed_prompt_tokens": ("num_computed_prompt_tokens", "prompt tokens computed"),
    "accounting_errors": ("accounting_errors", "block accounting mismatches, healed"),
    "corrupted_requests": ("num_corrupted", "sequences that failed by non-finite logits"),
    "engine_restarts": ("num_restarts", "engine cores that were lost and came back"),
    "replayed_requests": ("num_replayed_requests", "requests run again after such a loss"),
    "recovery_seconds": ("recovery_s", "time without an engine core"),
}


class BucketCounts:
    """A histogram as plain numbers. `bounds` are upper bounds, increasing, without infinity."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, values: Iterable[float]) -> None:
        """Count `values`; a NaN is dropped, a negative time (a clock was set back) counts as 0."""
        for value in values:
            if math.isnan(value):
                continue
            value = max(value, 0.0)
            self.counts[bisect.bisect_left(self.bounds, value)] += 1
            self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it), the last one for +Inf."""
        names = [*(repr(float(bound)) for bound in self.bounds), "+Inf"]
        totals = (float(total) for total in itertools.accumulate(self.counts))
        return list(zip(names, totals, strict=True))


class RequestHistograms:
    """What is known of a request when it has ended, and of steps."""

    def __init__(self, max_model_len: int) -> None:
        tokens = token_buckets(max_model_len)
        self.by_name = {
            name: (help, BucketCounts(bounds))
            for name, help, bounds in (
                ("request_prompt_tokens", "prompt tokens", tokens),
                ("request_generation_tokens", "generated tokens", tokens),
                ("request_max_num_generation_tokens", "tokens of the longest sequence", tokens),
                ("request_params_max_tokens", "max_tokens in effect", tokens),
                ("request_params_n", "sequences per request", N_BUCKETS),
                ("request_prefill_kv_computed_tokens", "prompt tokens not cached", tokens),
                ("iteration_tokens_total", "tokens of an engine step", STEP_BUCKETS),
                ("time_to_first_token_seconds", "arrival to first token", FIRST_TOKEN_BUCKETS),
                ("inter_token_latency_seconds", "between outputs", INTER_TOKEN_BUCKETS),
                (
                    "request_time_per_output_token_seconds",
                    "decode time per token after the first",
                    INTER_TOKEN_BUCKETS,
                ),
                ("e2e_request_latency_seconds", "arrival to finish", LATENCY_BUCKETS),
                ("request_queue_time_seconds", "arrival to first scheduled", LATENCY_BUCKETS),
                ("request_prefill_time_seconds", "first scheduled to first token", LATENCY_BUCKETS),
                ("request_decode_time_seconds", "first to last token", LATENCY_BUCKETS),
                (
                    "request_inference_time_seconds",
                    "first scheduled to last token",
                    LATENCY_BUCKETS,
                ),
                ("request_num_preemptions", "preemptions of a request", PREEMPTION_BUCKETS),
            )
        }

    def observe(self, name: str, *values: float | None) -> None:
        self.by_name[name][1].observe(value for value in values if value is not None)

    def add_step(self, stats: Stats) -> None:
        if stats.num_tokens_iter > 0:
            self.observe("iteration_tokens_total", stats.num_tokens_iter)
        self.observe("time_to_first_token_seconds", *stats.iteration.time_to_first_tokens)
        self.observe("inter_token_latency_seconds", *stats.iteration.inter_token_latencies)

    def add_finished(self, request: FinishedRequest) -> None:
        """One request that has ended, for whatever reason."""
        generated = sum(request.num_generation_tokens)
        self.observe("request_prompt_tokens", request.num_prompt_tokens)
        self.observe("request_generation_tokens", generated)
        longest = max(request.num_generation_tokens, default=0)
        self.observe("request_max_num_generation_tokens", longest)
        self.observe("request_params_max_tokens", request.max_tokens)
        self.observe("request_params_n", request.n)
        self.observe("request_num_preemptions", request.num_preemptions)
        self.observe("e2e_request_latency_seconds", request.finished_time - request.arrival_time)
        scheduled, first = request.first_scheduled_time, request.first_token_time
        if scheduled is None or first is None:
            return
        computed = request.num_prompt_tokens - request.num_cached_tokens
        self.observe("request_prefill_kv_computed_tokens", computed)
        self.observe("request_queue_time_seconds", scheduled - request.arrival_time)
        self.observe("request_prefill_time_seconds", first - scheduled)
        self.observe("request_decode_time_seconds", request.last_token_time - first)
        self.observe("request_inference_time_seconds", request.last_token_time - scheduled)
        if longest > 1:
            per_token = (request.last_token_time - first) / (longest - 1)
            self.observe("request_time_per_output_token_seconds", per_token)


class _Replica:
    """What is counted of one data-parallel replica."""

    def __init__(self, max_model_len: int) -> None:
        self.engine = EngineStats()
        self.engine_totals: dict[str, float] = dict.fromkeys(ENGINE_COUNTERS, 0)
        self.routed: dict[str, int] = dict.fromkeys(ROUTING_REASONS, 0)
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generation_tokens = 0
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.histograms = RequestHistograms(max_model_len)

    def add(self, stats: Stats) -> None:
        """Requests and tokens in a record count once, here and nowhere else."""
        self._add_engine(stats.engine)
        iteration = stats.iteration
        self.num_prompt_tokens += iteration.num_prompt_tokens
        self.num_cached_tokens += iteration.num_cached_tokens
        self.num_generation_tokens += iteration.num_generation_tokens
        self.histograms.add_step(stats)
        for request in iteration.finished:
            for reason in request.finish_reasons:
                self.finished[reason] = self.finished.get(reason, 0) + 1
            self.histograms.add_finished(request)

    def _add_engine(self, engine: EngineStats) -> None:
        """Counters of the core only grow here: a restarted core counts from zero."""
        for name, (field, _) in ENGINE_COUNTERS.items():
            new, old = getattr(engine, field), getattr(self.engine, field)
            self.engine_totals[name] += new - old if new >= old else new
        self.routed.update(engine.routed)
        self.engine = engine


Labelled = Mapping[tuple[str, ...], float]  # values by their labels beside model and engine


class PrometheusStatLogger(StatLoggerBase):
    """Keeps the engine's metrics and registers them; `registry` holds nothing of other engines."""

    def __init__(self, config: EngineConfig, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self._config = config
        self._created = time.time()
        # By rank; the label is the rank among all replicas, those of other servers included.
        self._replicas = {
            rank: _Replica(config.model_config.max_model_len)
            for rank in config.parallel_config.ranks
        }
        self.registry.register(_Families(self))

    def log(self, stats: Stats) -> None:
        """Take one record."""
        replica = self._replicas.get(stats.engine_rank)
        if replica is not None:
            replica.add(stats)

    def collect(self) -> Iterator[Metric]:
        """All families, with every series there can be."""
        yield from self._gauges()
        yield from self._counters()
        first = next(iter(self._replicas.values()))
        for name, (help, _) in first.histograms.by_name.items():
            family = HistogramMetricFamily(PREFIX + name, help, labels=LABELS)
            for rank, replica in self._replicas.items():
                histogram = replica.histograms.by_name[name][1]
                family.add_metric(self._labels(rank), histogram.cumulative(), histogram.sum)
            yield family

    def _labels(self, rank: int) -> tuple[str, str]:
        return (self._config.model_config.served_model_name, str(rank))

    def _gauges(self) -> Iterator[Metric]:
        for name, (field, help) in GAUGES.items():
            yield self._gauge(name, help, _field_of_engine(field))
        help = "share of KV-cache blocks in use, 0 to 1"
        yield self._gauge("kv_cache_usage_perc", help, lambda r: {(): _usage(r.engine)})
        yield self._gauge(
            "num_requests_waiting_by_reason",
            "sequences waiting to run, by what they wait for",
            lambda r: {("capacity",): r.engine.num_waiting, ("deferred",): 0},
            "reason",
        )
        yield self._cache_config_info()
        yield self._model_config_info()

    def _cache_config_info(self) -> Metric:
        """A constant 1 whose labels are the settings of the KV cache."""
        settings = dataclasses.asdict(self._config.cache_config)
        names = [*settings, "num_gpu_blocks", "kv_cache_size_tokens"]
        family = GaugeMetricFamily(
            PREFIX + "cache_config_info", "settings of the KV cache", labels=("engine", *names)
        )
        for rank, replica in self._replicas.items():
            settings["num_gpu_blocks"] = replica.engine.num_blocks
            settings["kv_cache_size_tokens"] = replica.engine.num_blocks * settings["block_size"]
            family.add_metric((str(rank), *(str(settings[name]) for name in names)), 1)
        return family

    def _model_config_info(self) -> Metric:
        """A constant 1 whose labels say how the model is computed."""
        model = self._config.model_config
        values = tuple(str(getattr(model, name)) for name in MODEL_SETTINGS)
        help = "how the model is computed"
        return self._gauge("model_config_info", help, lambda r: {values: 1}, *MODEL_SETTINGS)

    def _gauge(
        self, name: str, help: str, read: Callable[[_Replica], Labelled], *labels: str
    ) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, help, labels=(*LABELS, *labels))
        for rank, replica in self._replicas.items():
            for extra, value in read(replica).items():
                family.add_metric((*self._labels(rank), *extra), value)
        return family

    def _counters(self) -> Iterator[Metric]:
        for name, (_, help) in ENGINE_COUNTERS.items():
            yield self._counter(name, help, _engine_total(name))
        help = "requests that this front end sent there, by why it did"
        yield self._counter(
            "routed_requests", help, lambda r: {(k,): v for k, v in r.routed.items()}, "reason"
        )
        help = "prompt tokens that were prefilled"
        yield self._counter("prompt_tokens", help, lambda r: {(): r.num_prompt_tokens})
        help = "prompt tokens from a cache"
        yield self._counter("prompt_tokens_cached", help, lambda r: {(): r.num_cached_tokens})
        help = "prompt tokens, by where they came from"
        yield self._counter("prompt_tokens_by_source", help, _by_source, "source")
        help = "generated tokens"
        yield self._counter("generation_tokens", help, lambda r: {(): r.num_generation_tokens})
        help = "sequences that ended, by reason"
        yield self._counter(
            "request_success",
            help,
            lambda r: {(k,): v for k, v in r.finished.items()},
            "finished_reason",
        )

    def _counter(
        self, name: str, help: str, read: Callable[[_Replica], Labelled], *labels: str
    ) -> Metric:
        family = CounterMetricFamily(PREFIX + name, help, labels=(*LABELS, *labels))
        for rank, replica in self._replicas.items():
            for extra, value in read(replica).items():
                family.add_metric((*self._labels(rank), *extra), value, created=self._created)
        return family


def _field_of_engine(field: str) -> Callable[[_Replica], Labelled]:
    return lambda replica: {(): getattr(replica.engine, field)}


def _engine_total(name: str) -> Callable[[_Replica], Labelled]:
    return lambda replica: {(): replica.engine_totals[name]}


def _usage(engine: EngineStats) -> float:
    return 1.0 - engine.num_free_blocks / engine.num_blocks if engine.num_blocks else 0.0


def _by_source(replica: _Replica) -> Labelled:
    return {
        ("local_compute",): replica.num_prompt_tokens - replica.num_cached_tokens,
        ("local_cache_hit",): replica.num_cached_tokens,
        ("external_kv_transfer",): 0,
    }


class _Families(Collector):
    """What a registry asks; a class of its own, since a stat logger is no collector."""

    def __init__(self, logger: PrometheusStatLogger) -> None:
        self._logger = logger

    def collect(self) -> Iterable[Metric]:
        return self._logger.collect()


def token_buckets(max_value: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... up to `max_value`."""
    series = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
    return list(itertools.takewhile(lambda bound: bound <= max_value, series))
