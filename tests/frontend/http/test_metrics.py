"""The page of metrics: the HTTP layer's own, the engine's beside them; faults stay inside."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.configs.config import SchedulerConfig
from headrace.engine_core.messages import EngineStats
from headrace.frontend.http.metrics import ServerMetrics
from headrace.frontend.prometheus_logger import PrometheusStatLogger
from headrace.frontend.stats import IterationStats, make_stats


def read(answer):
    """Samples by (name, labels)."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


@pytest.fixture
def scrape(concurrently):
    """`scrape(work)`: the samples after `await work(client)`."""

    def run(work):
        async def go(client):
            await work(client)
            return await client.get("/metrics")

        answer = concurrently(go)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain")
        return read(answer)

    return run


async def nothing(client):
    pass


def http_key(handler, method, status):
    return (
        "http_requests_total", ("handler", handler), ("method", method), ("status", status)
    )  # fmt: skip


def test_http_requests_are_counted_by_route(scrape):
    async def work(client):
        await client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 3})
        await client.post("/v1/completions", json={"prompt": "ab", "stream": True})
        await client.post("/v1/completions", json={"prompt": 1})
        await client.get("/v1/completions")
        await client.get("/v1/models/tiny")
        await client.get("/v1/models/other")
        for k in range(5):
            await client.get(f"/nowhere/{k}")
        await client.request("SPELL", "/v1/models")
        for path in ("/health", "/metrics", "/ping", "/version", "/load"):
            await client.get(path)

    found = scrape(work)
    assert found[http_key("/v1/completions", "POST", "2xx")] == 2
    assert found[http_key("/v1/completions", "POST", "4xx")] == 1
    assert found[http_key("/v1/completions", "GET", "4xx")] == 1
    assert found[http_key("/v1/models/{model:path}", "GET", "2xx")] == 1
    assert found[http_key("/v1/models/{model:path}", "GET", "4xx")] == 1
    assert found[http_key("none", "GET", "4xx")] == 5
    assert found[http_key("/v1/models", "none", "4xx")] == 1
    handlers = {dict(key[1:])["handler"] for key in found if key[0] == "http_requests_total"}
    assert handlers == {"/v1/completions", "/v1/models/{model:path}", "/v1/models", "none"}
    handler = ("handler", "/v1/completions")
    assert found["http_request_size_bytes_count", handler] == 3
    assert found["http_response_size_bytes_count", handler] == 3  # a stream announces no length
    assert found["http_request_duration_highr_seconds_count",] == 12
    assert found["http_request_duration_seconds_count", handler, ("method", "POST")] == 3
    assert any(key[0] == "process_start_time_seconds" for key in found)


def test_refused_keys_are_counted(call, concurrently):
    async def work(client):
        await client.get("/v1/models")
        return await client.get("/metrics")

    found = read(concurrently(work, keys=("k",)))
    assert found[http_key("none", "GET", "4xx")] == 1


def test_unknown_fields_are_counted(scrape):
    """A15."""
    labels = (("engine", "0"), ("model_name", "tiny"))
    name = "headrace:unknown_request_fields_total"
    assert scrape(nothing)[name, *labels] == 0

    async def work(client):
        for _ in range(2):
            body = {"prompt": "a", "temprature": 0.3, "no_such": 1, "seed": 4}
            assert (await client.post("/v1/completions", json=body)).status_code == 200

    assert scrape(work)[name, *labels] == 4


def test_the_engines_metrics_are_on_the_page(scrape, engine):
    logger = PrometheusStatLogger(engine.config)
    engine.stat_loggers["prometheus"] = logger
    logger.log(make_stats(EngineStats(num_running=3), IterationStats(num_generation_tokens=5), 0))
    found = scrape(nothing)
    labels = (("engine", "0"), ("model_name", "tiny"))
    assert found["headrace:num_requests_running", *labels] == 3
    assert found["headrace:generation_tokens_total", *labels] == 5
    assert found["headrace:num_frontend_requests", *labels] == 0


def test_without_statistics_the_http_metrics_stay(scrape, engine):
    async def work(client):
        await client.get("/v1/models")

    found = scrape(work)
    assert found[http_key("/v1/models", "GET", "2xx")] == 1
    assert not any(key[0].startswith("headrace:num_requests") for key in found)


def test_openmetrics_is_negotiated(call):
    answer = call("GET", "/metrics", headers={"Accept": "application/openmetrics-text"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")
    assert "headrace:unknown_request_fields_total{" in answer.text


def test_a_fault_in_the_metrics_breaks_nothing(post, monkeypatch, caplog):
    """PP37: it is logged once."""
    from prometheus_client import Counter

    def fail(*args):
        raise RuntimeError("planted")

    monkeypatch.setattr(Counter, "labels", fail)
    assert post("completions", {"prompt": "a", "nobody_knows": 1}).status_code == 200
    assert post("completions", {"prompt": "a", "stream": True}).text.endswith("[DONE]\n\n")
    assert caplog.text.count("a metric could not be counted") == 2  # once for each application


@pytest.mark.parametrize(
    ("limits", "reason", "prompt", "accepted"),
    [
        ({"max_num_queued_reqs": 3}, "max_num_queued_reqs", "a", 5),
        ({"max_num_queued_reqs": 0}, "max_num_queued_reqs", "a", 2),
        ({"max_num_queued_tokens": 10}, "max_num_queued_tokens", "abcd", 4),
        ({}, None, "a", 8),
    ],
)
def test_a_full_queue_turns_requests_away(concurrently, engine, limits, reason, prompt, accepted):
    """Two sequences run at once; a prompt has a token more than characters."""
    engine.scheduler_config = SchedulerConfig(max_num_seqs=2, **limits)
    stats = EngineStats()
    engine.stats = lambda: stats  # no step ends while the requests come

    async def work(client):
        engine.hold = asyncio.Event()
        tasks = [
            asyncio.create_task(client.post("/v1/completions", json={"prompt": prompt}))
            for _ in range(8)
        ]
        while engine.num_requests < accepted:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        engine.hold.set()
        return await asyncio.gather(*tasks), await client.get("/metrics")

    answers, metrics = concurrently(work)
    assert [answer.status_code for answer in answers] == [200] * accepted + [503] * (8 - accepted)
    found = read(metrics)
    for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
        key = ("headrace:admission_rejections_total", ("model_name", "tiny"), ("reason", name))
        assert found[key] == (8 - accepted if name == reason else 0)
    for answer in answers[accepted:]:
        assert answer.json()["error"]["type"] == "Service Unavailable"
        assert int(answer.headers["retry-after"]) >= 1
        assert "--" + reason.replace("_", "-") in answer.json()["error"]["message"]


def test_the_queue_empties(engine):
    from headrace.frontend.http.errors import RequestRefused
    from headrace.frontend.http.queue_gate import QueueGate

    engine.scheduler_config = SchedulerConfig(max_num_seqs=1, max_num_queued_reqs=1)
    stats = [EngineStats()]
    engine.stats = lambda: stats[0]
    gate = QueueGate(engine, ServerMetrics(engine))
    with gate.admitted([5]), gate.admitted([5]):
        with pytest.raises(RequestRefused, match="1 requests wait"), gate.admitted([5]):
            pass
        stats[0] = EngineStats(num_running=1, num_waiting=1)
        with pytest.raises(RequestRefused), gate.admitted([5]):
            pass
        stats[0] = EngineStats(num_running=1)
        with gate.admitted([5]):
            pass
