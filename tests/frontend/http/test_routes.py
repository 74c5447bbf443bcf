"""Health, readiness, keys, models, metrics, errors after the first token."""

import asyncio
import json

import httpx
import pytest

from headrace.configs.errors import (
    EngineDeadError,
    NonFiniteLogitsError,
    RequestFailedError,
)
from headrace.frontend.http.app import create_app
from headrace.frontend.http.auth import PUBLIC_PATHS, ApiKeys, route_path
from headrace.frontend.http.listener import CrossOrigin, ServerOptions
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
        "/tokenize", "/detokenize", "/load",
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


def test_wrong_paths_and_methods(call):
    """The framework's body, with the envelope beside it."""
    missing = call("GET", "/nowhere")
    assert missing.status_code == 404
    assert missing.json() == {
        "detail": "Not Found",
        "error": {"message": "Not Found", "type": "NotFoundError", "param": None, "code": 404},
    }
    wrong = call("GET", "/v1/completions")
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST"
    assert wrong.json()["detail"] == "Method Not Allowed"
    assert call("HEAD", "/health").status_code in (200, 405)


def test_trailing_slashes_are_redirected(call):
    headers = {"Host": "evil.example"}
    for method, path, target in (
        ("GET", "/v1/models/", "/v1/models"),
        ("POST", "/v1/completions/?a=b&c", "/v1/completions?a=b&c"),
        ("GET", "/health//", "/health"),
    ):
        answer = call(method, path, headers=headers)
        assert (answer.status_code, answer.headers["location"]) == (307, target)
    for path in ("/", "//", "//evil.example/", "/nowhere/", "/v1/completions/x/"):
        answer = call("GET", path, headers=headers)
        assert answer.status_code == 404 and "location" not in answer.headers


def test_ping_is_health(call, engine):
    for method in ("GET", "POST"):
        assert call(method, "/ping").status_code == 200
    engine.state = "dead"
    assert call("GET", "/ping").status_code == 503


@pytest.mark.parametrize("is_tracked", [False, True])
def test_load(concurrently, engine, is_tracked):
    engine.options = ServerOptions(enable_server_load_tracking=is_tracked)
    engine.hold = None

    async def work(client):
        engine.hold = asyncio.Event()
        running = [
            asyncio.create_task(
                client.post("/v1/completions", json={"prompt": "a", "stream": stream})
            )
            for stream in (False, True)
        ]
        while engine.num_requests < 2:
            await asyncio.sleep(0.01)
        during = await client.get("/load")
        engine.hold.set()
        await asyncio.gather(*running)
        return during.json(), (await client.get("/load")).json()

    during, after = concurrently(work)
    assert during == {"server_load": 2 * is_tracked} and after == {"server_load": 0}


@pytest.mark.parametrize("given", ["job-7", None, "x" * 300, "a\tb"])
def test_request_ids_are_on_every_answer(call, post, engine, given):
    headers = {} if given is None else {"X-Request-Id": given}
    kept = given == "job-7"
    engine.fail_after = None
    body = {"prompt": "a", "max_tokens": 1}
    answers = [
        call("GET", "/health", headers=headers),
        call("GET", "/metrics", headers=headers),
        call("GET", "/nowhere", headers=headers),
        call("GET", "/v1/completions", headers=headers),
        call("GET", "/v1/models", headers=headers),
        call("GET", "/v1/models", headers=headers, keys=("k",)),
        post("completions", body, headers=headers),
        post("completions", {**body, "stream": True}, headers=headers),
        post("completions", {"prompt": 1}, headers=headers),
        call("POST", "/tokenize", json={"prompt": "a"}, headers=headers),
    ]
    engine.state = "starting"
    answers.append(post("completions", body, headers=headers))
    seen = [answer.headers["x-request-id"] for answer in answers]
    assert all((label == given) == kept and label.isprintable() for label in seen), seen
    assert all(answer.headers.get_list("x-request-id") == [label]
               for answer, label in zip(answers, seen, strict=True))  # fmt: skip
    if not kept:
        assert len(set(seen)) == len(seen)
    assert answers[6].json()["id"].startswith("cmpl-") and answers[6].json()["id"] != given


def test_cross_origin_requests(call, engine):
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert call("OPTIONS", "/v1/completions", headers=preflight).status_code == 400
    plain = call("GET", "/v1/models", headers={"Origin": "https://a.example"})
    assert plain.status_code == 200 and "access-control-allow-origin" not in plain.headers
    origins = ("https://a.example",)
    engine.options = ServerOptions(cross_origin=CrossOrigin(origins, credentials=True))
    allowed = call("OPTIONS", "/v1/completions", headers=preflight, keys=("k",))
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    refused = call("GET", "/v1/models", headers={"Origin": "https://a.example"}, keys=("k",))
    assert refused.status_code == 401  # the page may read that, but still needs a key
    other = call("OPTIONS", "/v1/completions", headers={**preflight, "Origin": "https://b.example"})
    assert other.status_code == 400


def test_prefix_of_a_proxy(engine):
    """The server's path is the one behind the prefix, also where keys are checked."""
    scope = {"path": "/llm/health", "root_path": "/llm"}
    assert route_path(scope) == "/health"
    assert route_path({"path": "/llmhealth", "root_path": "/llm"}) == "/llmhealth"
    assert route_path({"path": "/health", "root_path": ""}) == "/health"

    async def ask(path):
        app = create_app(ServerState(engine, ServerOptions(api_keys=("k",))))
        transport = httpx.ASGITransport(app, root_path="/llm")
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return (await client.get(path)).status_code

    assert asyncio.run(ask("/llm/health")) == 200
    assert asyncio.run(ask("/llm/v1/models")) == 401


def test_request_log(post, engine, caplog):
    """S24, A12: ids at INFO, prompts at DEBUG, nothing without the flag."""
    logger = "headrace.frontend.http.request_log"
    body, headers = {"prompt": "secret words", "max_tokens": 1}, {"X-Request-Id": "job-7"}
    with caplog.at_level("DEBUG", logger=logger):
        post("completions", body, headers=headers)
    assert not [record for record in caplog.records if record.name == logger]
    engine.options = ServerOptions(enable_log_requests=True, max_log_len=6)
    with caplog.at_level("INFO", logger=logger):
        ids = [post("completions", body, headers=headers).json()["id"] for _ in range(2)]
    assert ids[0] != ids[1] and all(request_id in caplog.text for request_id in ids)
    assert caplog.text.count("job-7") == 2 and "secret" not in caplog.text
    caplog.clear()
    with caplog.at_level("DEBUG", logger=logger):
        post("completions", body, headers=headers)
    assert "'secret'" in caplog.text and "words" not in caplog.text


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
    engine.renderer.render_cmpl_async = None
    answer = post("completions", {"prompt": "secret words"})
    assert answer.status_code == 500 and "NoneType" not in answer.text
    assert "secret words" not in caplog.text and "failed" in caplog.text


def test_shutdown_ends_running_requests(engine):
    """A stream gets an error event and [DONE]; a request without a token yet gets a 503."""

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
            state.shutdown.end()
            return await stream, await whole

    stream, whole = asyncio.run(go())
    assert whole.status_code == 503 and "shutting down" in whole.text
    assert stream.status_code == 200
    assert "shutting down" in stream.text and stream.text.endswith("data: [DONE]\n\n")
    assert engine.num_requests == 0 and engine.num_aborted == 2


def test_while_the_engine_core_is_restarted(call, post, engine):
    """A load balancer is told; requests that come all the same are taken."""
    engine.is_up = False
    for path in ("/health", "/health/ready", "/ping"):
        answer = call("GET", path)
        assert answer.status_code == 503 and "restarted" in answer.text
        assert int(answer.headers["retry-after"]) >= 1
    assert call("GET", "/health/live").status_code == 200
    assert call("GET", "/health/progress").json()["status"] == "restarting"
    assert post("completions", {"prompt": "a"}).status_code == 200
    engine.is_up = True
    assert call("GET", "/health/ready").status_code == 200
