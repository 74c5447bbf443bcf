"""Engine metrics: names, labels, buckets, and that everything counts once."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from headrace.configs.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from headrace.engine_core.messages import EngineStats
from headrace.frontend.http.metrics import expose
from headrace.frontend.prometheus_logger import (
    FINISH_REASONS,
    BucketCounts,
    PrometheusStatLogger,
    token_buckets,
)
from headrace.frontend.stats import FinishedRequest, IterationStats, make_stats

MODEL = ModelConfig("org/m", "p", "p", ("m", "other"), "A", {}, "float32", 2048, 300, 1)
CONFIG = EngineConfig(MODEL, CacheConfig(block_size=8))
LABELS = {"model_name": "m", "engine": "0"}


def samples(logger):
    """Value by (name, labels other than model and engine)."""
    text = generate_latest(logger.registry).decode()
    return {
        (s.name.removeprefix("headrace:"), *sorted(set(s.labels.items()) - set(LABELS.items()))): s
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def value(logger, *key):
    return samples(logger)[key].value


def finished(**fields):
    values = {
        "n": 1, "max_tokens": 5, "num_prompt_tokens": 10, "num_cached_tokens": 4,
        "num_generation_tokens": [3], "finish_reasons": ["stop"], "num_preemptions": 0,
        "arrival_time": 100.0, "first_scheduled_time": 101.0, "first_token_time": 103.0,
        "last_token_time": 107.0, "finished_time": 107.5,
    }  # fmt: skip
    return FinishedRequest(**{**values, **fields})


def log(logger, engine=None, **iteration):
    stats = make_stats(engine or EngineStats(), IterationStats(now=1.0, **iteration), 0)
    logger.log(stats)


def test_every_series_is_there_at_zero():
    logger = PrometheusStatLogger(CONFIG)
    found = samples(logger)
    for reason in FINISH_REASONS:
        assert found["request_success_total", ("finished_reason", reason)].value == 0
    for source in ("local_compute", "local_cache_hit", "external_kv_transfer"):
        assert found["prompt_tokens_by_source_total", ("source", source)].value == 0
    for name in (
        "prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits",
        "num_preemptions", "prompt_tokens_cached", "corrupted_requests",
    ):  # fmt: skip
        assert found[name + "_total",].value == 0
        assert found[name + "_created",].value > 1e9
    for reason in ("capacity", "deferred"):
        assert found["num_requests_waiting_by_reason", ("reason", reason)].value == 0
    for name in (
        "time_to_first_token_seconds", "inter_token_latency_seconds", "iteration_tokens_total",
        "e2e_request_latency_seconds", "request_queue_time_seconds", "request_params_n",
        "request_inference_time_seconds", "request_prefill_time_seconds", "request_prompt_tokens",
        "request_decode_time_seconds", "request_generation_tokens", "request_num_preemptions",
        "request_max_num_generation_tokens", "request_params_max_tokens",
        "request_prefill_kv_computed_tokens", "request_time_per_output_token_seconds",
    ):  # fmt: skip
        assert found[name + "_bucket", ("le", "+Inf")].value == 0
        assert found[name + "_sum",].value == found[name + "_count",].value == 0


def test_labels():
    for key, sample in samples(PrometheusStatLogger(CONFIG)).items():
        if key[0] == "cache_config_info":
            assert sample.value == 1 and sample.labels["block_size"] == "8"
            assert sample.labels["engine"] == "0" and "model_name" not in sample.labels
        else:
            assert sample.labels.items() >= LABELS.items(), key


def test_gauges_follow_the_engine():
    logger = PrometheusStatLogger(CONFIG)
    log(logger, EngineStats(num_running=3, num_waiting=2, num_free_blocks=25, num_blocks=100))
    assert value(logger, "num_requests_running") == 3
    assert value(logger, "num_requests_waiting") == 2
    assert value(logger, "num_requests_waiting_by_reason", ("reason", "capacity")) == 2
    assert value(logger, "kv_cache_usage_perc") == 0.75
    log(logger, EngineStats(num_free_blocks=100, num_blocks=100))
    assert value(logger, "num_requests_running") == value(logger, "kv_cache_usage_perc") == 0


def test_counters_of_a_restarted_core_go_on():
    logger = PrometheusStatLogger(CONFIG)
    for step, queries in ((5, 100), (9, 150), (1, 20), (2, 30)):
        log(logger, EngineStats(step=step, prefix_cache_queries=queries))
    assert value(logger, "engine_steps_total") == 9 + 2
    assert value(logger, "prefix_cache_queries_total") == 150 + 30


def test_tokens_and_finished_requests_count_once():
    logger = PrometheusStatLogger(CONFIG)
    log(logger, num_prompt_tokens=10, num_cached_tokens=4, num_generation_tokens=1)
    log(
        logger,
        num_generation_tokens=5,
        finished=[finished(), finished(n=2, num_generation_tokens=[1, 2],
                                       finish_reasons=["length", "abort"])],
    )  # fmt: skip
    assert value(logger, "prompt_tokens_total") == 10
    assert value(logger, "prompt_tokens_cached_total") == 4
    assert value(logger, "prompt_tokens_by_source_total", ("source", "local_compute")) == 6
    assert value(logger, "generation_tokens_total") == 6
    for reason, number in (("stop", 1), ("length", 1), ("abort", 1), ("error", 0)):
        assert value(logger, "request_success_total", ("finished_reason", reason)) == number
    assert value(logger, "request_params_n_sum") == 3
    assert value(logger, "request_generation_tokens_sum") == 6
    assert value(logger, "request_max_num_generation_tokens_sum") == 5
    assert value(logger, "request_prefill_kv_computed_tokens_sum") == 12


def test_times_of_a_request():
    logger = PrometheusStatLogger(CONFIG)
    log(logger, finished=[finished()])
    for name, seconds in (
        ("e2e_request_latency", 7.5), ("request_queue_time", 1), ("request_prefill_time", 2),
        ("request_decode_time", 4), ("request_inference_time", 6),
        ("request_time_per_output_token", 2),
    ):  # fmt: skip
        assert value(logger, name + "_seconds_sum") == seconds
        assert value(logger, name + "_seconds_count") == 1


def test_a_request_that_never_ran_has_only_an_end():
    logger = PrometheusStatLogger(CONFIG)
    log(logger, finished=[finished(
        first_scheduled_time=None, first_token_time=None, num_generation_tokens=[0],
        finish_reasons=["abort"], max_tokens=None,
    )])  # fmt: skip
    assert value(logger, "e2e_request_latency_seconds_count") == 1
    for name in ("request_queue_time_seconds", "request_decode_time_seconds"):
        assert value(logger, name + "_count") == 0
    assert value(logger, "request_params_max_tokens_count") == 0
    assert value(logger, "request_success_total", ("finished_reason", "abort")) == 1


def test_steps():
    logger = PrometheusStatLogger(CONFIG)
    log(
        logger,
        EngineStats(num_step_prompt_tokens=30, num_step_generation_tokens=2),
        time_to_first_tokens=[0.003, 4.0],
        inter_token_latencies=[0.02] * 3,
    )
    log(logger)  # a message without a step
    assert value(logger, "iteration_tokens_total_count") == 1
    assert value(logger, "iteration_tokens_total_sum") == 32
    assert value(logger, "time_to_first_token_seconds_count") == 2
    assert value(logger, "time_to_first_token_seconds_bucket", ("le", "0.005")) == 1
    assert value(logger, "inter_token_latency_seconds_sum") == pytest.approx(0.06)


def test_buckets():
    assert token_buckets(2048) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]
    assert token_buckets(1) == [1]
    counts = BucketCounts((1, 2, 5))
    counts.observe([0.5, 1, 1.5, 5, 6, math.nan, -3])
    assert counts.cumulative() == [("1.0", 3), ("2.0", 4), ("5.0", 5), ("+Inf", 6)]
    assert counts.sum == 14


def test_registries_are_separate():
    mine = CollectorRegistry()
    one, other = PrometheusStatLogger(CONFIG, mine), PrometheusStatLogger(CONFIG)
    assert one.registry is mine is not other.registry
    log(one, num_generation_tokens=3)
    assert value(other, "generation_tokens_total") == 0


def test_openmetrics():
    logger = PrometheusStatLogger(CONFIG)
    log(logger, finished=[finished()])
    accept = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
    text, content_type = expose(logger.registry, accept)
    assert content_type.startswith("application/openmetrics-text")
    names = {
        sample.name for family in openmetrics_families(text.decode()) for sample in family.samples
    }
    assert "headrace:request_success_total" in names
    assert "headrace:iteration_tokens_total_bucket" in names
    assert all(name.startswith("headrace:") for name in names)


def test_the_page_lists_every_metric():
    """`docs/metrics.md` has a row for each engine metric, as it is exposed."""
    page = (Path(__file__).parent.parent.parent / "docs" / "metrics.md").read_text()
    rows = []
    for family in PrometheusStatLogger(CONFIG).registry.collect():
        ours = {"le", *LABELS}
        others = {name for sample in family.samples for name in sample.labels} - ours
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = "every field" if name.endswith("cache_config_info") else ", ".join(sorted(others))
        rows.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |")
    engine_part = page.split("The HTTP server adds")[0]
    assert rows == [line for line in engine_part.splitlines() if line.startswith("| `")]


def test_series_of_replicas():
    """Each has its rank among all; a record counts for its own replica only."""
    parallel = ParallelConfig(data_parallel_size=4, data_parallel_size_local=2,
                              data_parallel_start_rank=2)  # fmt: skip
    logger = PrometheusStatLogger(replace(CONFIG, parallel_config=parallel))
    iteration = IterationStats(num_generation_tokens=5, finished=[finished()])
    engine = EngineStats(step=3, num_outstanding_tokens=70, routed={"load": 4, "moved": 1})
    logger.log(make_stats(engine, iteration, 0, rank=3))
    logger.log(make_stats(EngineStats(step=1), IterationStats(), 0, rank=2))
    text = generate_latest(logger.registry).decode()
    found = {
        (s.name.removeprefix("headrace:"), s.labels["engine"], s.labels.get("reason")): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
    assert {engine for _, engine, _ in found} == {"2", "3"}
    assert found["engine_steps_total", "2", None] == 1
    assert found["engine_steps_total", "3", None] == 3
    assert found["outstanding_tokens", "3", None] == 70
    assert found["generation_tokens_total", "2", None] == 0
    assert found["generation_tokens_total", "3", None] == 5
    assert found["routed_requests_total", "3", "load"] == 4
    assert found["routed_requests_total", "2", "load"] == 0
    assert found["e2e_request_latency_seconds_count", "2", None] == 0
    assert found["e2e_request_latency_seconds_count", "3", None] == 1
