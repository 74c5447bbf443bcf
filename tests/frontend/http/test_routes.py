"""Health, readiness, keys, models, metrics, errors after the first token."""

import asyncio
import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.configs.errors import (
    EngineDeadError,
    NonFiniteLogitsError,
    RequestFailedError,
)
from headrace.frontend.http.app import create_app
from headrace.frontend.http.auth import PUBLIC_PATHS, ApiKeys
from headrace.frontend.http.server_state import ServerState


def test_health_of_a_ready_server(call):
    assert call("GET", "/health").status_code == 200
    assert call("GET", "/health/live").status_code == 200
    assert call("GET", "/health/ready").status_code == 200
    progress = call("GET", "/health/progress").json()
    assert progress == {"status": "ready", "step": 7, "age_s": 0.0, "running": 0, "waiting": 0}
    assert "version" in call("GET", "/version").json()


@pytest.mark.parametrize("state", ["starting", "draining", "dead"])
def test_everything_else_is_503_until_ready(call, post, engine, state):
    engine.state = state
    assert call("GET", "/health/live").status_code == 200
    for answer in (
        call("GET", "/health"), call("GET", "/health/ready"), call("GET", "/v1/models"),
        post("completions", {"prompt": "a"}), call("GET", "/nowhere"),
    ):  # fmt: skip
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "ServiceUnavailableError"
    is_starting = state == "starting"
    assert call("GET", "/health/progress").status_code == (503 if is_starting else 200)
    assert call("GET", "/metrics").status_code == (503 if is_starting else 200)


def test_every_route_needs_a_key_unless_it_is_public(call, engine):
    """PP59: walks the route table."""
    routes = {route.path: route.methods for route in create_app(ServerState(engine)).routes}
    assert set(routes) > PUBLIC_PATHS
    for path, methods in routes.items():
        for method in methods:
            answer = call(method, path.replace("{model:path}", "tiny"), keys=("k1", "k2"))
            assert (answer.status_code == 401) == (path not in PUBLIC_PATHS), path
    answer = call("GET", "/nowhere", keys=("k1",))
    assert answer.status_code == 401 and answer.json() == {"error": "Unauthorized"}
    assert call("OPTIONS", "/v1/models", keys=("k1",)).status_code == 401
    assert call("GET", "/health/", keys=("k1",)).status_code == 401


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer k1", 200), ("bearer k2", 200), ("Bearer  k2 ", 200), ("Bearer k3", 401),
        ("k1", 401), ("Basic k1", 401), ("Bearer ", 401), ("Bearer k1k2", 401), ("", 401),
    ],
)  # fmt: skip
def test_keys(call, header, status):
    headers = {"Authorization": header}
    assert call("GET", "/v1/models", keys=("k1", "k2"), headers=headers).status_code == status


def test_all_keys_are_compared(monkeypatch):
    """S16: no early return tells which key matched."""
    import hmac

    seen = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: seen.append(1) or real(a, b))
    assert ApiKeys(["a", "b", "c"]).accepts(b"Bearer a")
    assert len(seen) == 3


def test_no_control_routes(engine):
    paths = {route.path for route in create_app(ServerState(engine)).routes}
    assert paths == PUBLIC_PATHS | {
        "/v1/models", "/v1/models/{model:path}", "/v1/completions", "/v1/chat/completions",
    }  # fmt: skip


def test_models(call):
    answer = call("GET", "/v1/models").json()
    assert [card["id"] for card in answer["data"]] == ["tiny", "alias"]
    card = answer["data"][0]
    assert card["max_model_len"] == 64 and card["root"] == "org/tiny" and card["parent"] is None
    assert card["permission"][0]["object"] == "model_permission"
    assert call("GET", "/v1/models/tiny").json()["id"] == "tiny"
    missing = call("GET", "/v1/models/org/none")
    assert missing.status_code == 404 and missing.json()["error"]["param"] == "model"


def test_framework_errors(call):
    assert call("GET", "/nowhere").json() == {"detail": "Not Found"}
    assert call("GET", "/v1/completions").status_code == 405
    assert call("HEAD", "/health").status_code in (200, 405)


def test_metrics(concurrently, engine):
    async def work(client):
        await client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 3, "n": 2})
        body = {"prompt": ["a", "b"], "stream": True}
        await client.post("/v1/completions", json=body)
        await client.post("/v1/completions", json={"prompt": [999]})
        return await client.get("/metrics")

    answer = concurrently(work)
    assert answer.headers["content-type"].startswith("text/plain")
    samples = {
        (sample.name, sample.labels.get("finished_reason")): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    prefix = "headrace:"
    assert samples[prefix + "prompt_tokens_total", None] == 3 + 2 + 2
    assert samples[prefix + "generation_tokens_total", None] == 6 + 7 + 7
    assert samples[prefix + "request_success_total", "length"] == 2
    assert samples[prefix + "request_success_total", "stop"] == 2
    assert samples[prefix + "request_success_total", "abort"] == 0
    assert samples[prefix + "kv_cache_usage_perc", None] == 0.25
    assert samples[prefix + "num_free_blocks", None] == 12
    assert samples[prefix + "engine_steps_total", None] == 7
    for name in ("num_requests_running", "num_requests_waiting", "num_engine_requests"):
        assert samples[prefix + name, None] == 0


def test_a_fault_in_the_metrics_breaks_nothing(post, engine, monkeypatch):
    from prometheus_client import Counter

    def fail(*args):
        raise RuntimeError("planted")

    monkeypatch.setattr(Counter, "labels", fail)
    assert post("completions", {"prompt": "a"}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (RequestFailedError("it failed"), 500),
        (NonFiniteLogitsError("NaN"), 500),
        (EngineDeadError("gone"), 503),
    ],
)
def test_early_faults_have_a_status(post, engine, stream, failure, status):
    """PP37."""
    engine.fail_after, engine.failure = 0, failure
    answer = post("completions", {"prompt": "a", "stream": stream})
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == str(failure)
    assert answer.json()["error"]["code"] == status
    assert ("retry-after" in answer.headers) == (status == 503)


def test_late_faults_are_one_event(post, engine):
    engine.fail_after, engine.failure = 2, RequestFailedError("it failed")
    answer = post("completions", {"prompt": "a", "stream": True})
    assert answer.status_code == 200
    lines = [line for line in answer.text.split("\n\n") if line]
    assert len(lines) == 4 and lines[-1] == "data: [DONE]"
    error = json.loads(lines[-2].removeprefix("data: "))["error"]
    assert error == {
        "message": "it failed", "type": "InternalServerError", "param": None, "code": 500,
    }  # fmt: skip


def test_surprises_stay_inside(post, engine, caplog):
    engine.renderer.render_completion = None
    answer = post("completions", {"prompt": "secret words"})
    assert answer.status_code == 500 and "NoneType" not in answer.text
    assert "secret words" not in caplog.text and "failed" in caplog.text


def test_shutdown_ends_running_requests(engine):
    """A stream gets an error event and [DONE]; a request without a token yet gets a 503."""
    import httpx

    async def go():
        state = ServerState(engine)
        engine.delay_s = 0.05
        transport = httpx.ASGITransport(create_app(state))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"prompt": "a", "ignore_eos": True, "max_tokens": 50}
            stream = asyncio.create_task(
                client.post("/v1/completions", json={**body, "stream": True})
            )
            whole = asyncio.create_task(client.post("/v1/completions", json=body))
            await asyncio.sleep(0.2)
            state.stopping.set()
            return await stream, await whole

    stream, whole = asyncio.run(go())
    assert whole.status_code == 503 and "shutting down" in whole.text
    assert stream.status_code == 200
    assert "shutting down" in stream.text and stream.text.endswith("data: [DONE]\n\n")
    assert engine.num_requests == 0 and engine.num_aborted == 2
