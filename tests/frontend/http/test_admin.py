"""Routes that change the engine: there only with an admin key, which nothing else replaces."""

import dataclasses
from typing import Any

import httpx
import pytest

from headrace.configs.errors import InvalidRequestError, WrongStateError
from headrace.frontend.http.admin import ROUTES
from headrace.frontend.http.app import create_app
from headrace.frontend.http.auth import PUBLIC_PATHS
from headrace.frontend.http.listener import ServerOptions
from headrace.frontend.http.server_state import ServerState

KEY = {"Authorization": "Bearer admin"}


@pytest.fixture
def admin(call, engine):
    """`admin(method, path, **options)` with the admin key."""
    engine.options = dataclasses.replace(ServerOptions(), admin_api_keys=("admin",))

    def send(method: str, path: str, **options: Any) -> httpx.Response:
        return call(method, path, headers=KEY, **options)

    return send


def test_without_an_admin_key_there_are_no_such_routes(call, engine):
    paths = {route.path for route in create_app(ServerState(engine)).routes}
    assert paths.isdisjoint(ROUTES)
    for path, method in ROUTES.items():
        assert call(method, path).status_code == 404


def test_they_take_the_admin_key_alone(call, engine, admin):
    """PP59: every one of them, whatever other keys there are."""
    assert PUBLIC_PATHS.isdisjoint(ROUTES)
    for keys in ((), ("user",)):
        for path, method in ROUTES.items():
            for headers in ({}, {"Authorization": "Bearer user"}):
                answer = call(method, path, keys=keys, headers=headers)
                assert answer.status_code == 401, path
    assert engine.calls == []
    assert call("GET", "/v1/models", keys=("user",), headers=KEY).status_code == 401
    assert call("GET", "/v1/models").status_code == 200


@pytest.mark.parametrize(
    ("path", "method", "kwargs", "value", "answer"),
    [
        ("/pause", "pause", {"mode": "abort", "clear_cache": True}, None, {"status": "paused"}),
        (
            "/pause?mode=keep&clear_cache=false", "pause",
            {"mode": "keep", "clear_cache": False}, None, {"status": "paused"},
        ),
        ("/resume", "resume", {}, None, {"status": "resumed"}),
        (
            "/sleep", "sleep", {"level": 1, "mode": None}, None,
            {"status": "sleeping", "level": 1},
        ),
        (
            "/sleep?level=2&mode=wait", "sleep", {"level": 2, "mode": "wait"}, None,
            {"status": "sleeping", "level": 2},
        ),
        (
            "/wake_up", "wake_up", {"tags": None}, {"status": "awake"},
            {"status": "awake", "tags": None},
        ),
        (
            "/wake_up?tags=weights&tags=kv_cache", "wake_up", {"tags": ["weights", "kv_cache"]},
            {"status": "sleeping"}, {"status": "sleeping", "tags": ["weights", "kv_cache"]},
        ),
        (
            "/release_kv_cache_memory", "release_kv_cache_memory", {}, None,
            {"status": "kv_cache_released"},
        ),
        ("/reset_prefix_cache", "reset_prefix_cache", {}, True, {"success": True}),
    ],
)  # fmt: skip
def test_calls_and_answers(admin, engine, path, method, kwargs, value, answer):
    engine.answers[method] = value
    response = admin("POST", path)
    assert response.status_code == 200 and response.json() == answer
    assert engine.calls == [(method, kwargs)]


def test_facts(admin, engine):
    info = {"weight_version": "v2", "path": None, "digest": None}
    engine.answers |= {
        "is_paused": True, "is_sleeping": False, "weight_info": info, "world_size": 4,
    }  # fmt: skip
    assert admin("GET", "/is_paused").json() == {"is_paused": True}
    assert admin("GET", "/is_sleeping").json() == {"is_sleeping": False}
    assert admin("GET", "/weight_info").json() == info
    assert admin("GET", "/get_world_size?include_dp=false").json() == {"world_size": 4}


def test_a_weight_update(admin, engine):
    engine.answers["finish_weight_update"] = {"weight_version": "v2"}
    for path, body in (
        ("init_weight_transfer_engine", {"init_info": {"master_port": 1}}),
        ("start_weight_update", None),
        ("update_weights", {"update_info": {"path": "new"}}),
        ("finish_weight_update", {"weight_version": "v2"}),
        ("finish_weight_update", None),
        ("update_weight_version", {"new_version": "v3"}),
        ("rollback_weight_update", None),
        ("shutdown_weight_transfer_engine", None),
    ):
        response = admin("POST", f"/{path}", **({} if body is None else {"json": body}))
        assert response.status_code == 200, response.text
    assert [kwargs for _, kwargs in engine.calls] == [
        {"init_info": {"master_port": 1}}, {}, {"update_info": {"path": "new"}},
        {"weight_version": "v2"}, {"weight_version": None}, {"new_version": "v3"}, {}, {},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/sleep?level=3", None), ("/sleep?level=one", None), ("/pause?clear_cache=maybe", None),
        ("/update_weights", {}), ("/update_weights", {"update_info": "all"}),
        ("/update_weight_version", {"new_version": 3}), ("/collective_rpc", {}),
        ("/collective_rpc", {"method": "f", "args": "x"}),
    ],
)  # fmt: skip
def test_wrong_requests(admin, engine, path, body):
    response = admin("POST", path, **({} if body is None else {"json": body}))
    assert response.status_code == 400 and response.json()["error"]["code"] == 400
    assert engine.calls == []


def test_errors_of_the_engine(admin, engine):
    engine.answers["start_weight_update"] = WrongStateError("it was started already")
    response = admin("POST", "/start_weight_update")
    assert response.status_code == 500 and "already" in response.json()["error"]["message"]
    engine.answers["pause"] = InvalidRequestError("mode must be one of", "mode")
    response = admin("POST", "/pause?mode=x")
    assert response.status_code == 400 and response.json()["error"]["param"] == "mode"


def test_collective_rpc(admin, engine):
    engine.answers["report"] = [{"a": 1}, [2], None, 3, "four"]
    body = {"method": "report", "args": ["x", 1], "timeout": 2}
    response = admin("POST", "/collective_rpc", json=body)
    assert response.json() == {"results": [{"a": 1}, [2], None, "3", "four"]}
    assert engine.calls == [("report", {"timeout": 2, "args": ["x", 1]})]
    engine.answers["report"] = TimeoutError("report did not answer within 2 s")
    assert admin("POST", "/collective_rpc", json=body).status_code == 504
