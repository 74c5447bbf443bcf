"""PP10: a server that ends refuses what is new, lets what runs finish, and cuts it at last."""

import asyncio
import contextlib

import httpx
import pytest

from headrace.configs.errors import EngineDeadError
from headrace.frontend.http.app import create_app
from headrace.frontend.http.server_state import ServerState

BODY = {"prompt": "a", "ignore_eos": True, "max_tokens": 30}
STREAM = {**BODY, "stream": True}
LABEL = {"X-Request-Id": "mine"}


@pytest.fixture
def draining(engine):
    """`draining(work)` runs `await work(client, shutdown)` on an application over `engine`."""

    def run(work):
        async def go():
            state = ServerState(engine)
            transport = httpx.ASGITransport(create_app(state))
            async with (
                asyncio.timeout(10),
                httpx.AsyncClient(transport=transport, base_url="http://test") as client,
            ):
                return await work(client, state.shutdown)

        return asyncio.run(go())

    return run


async def started(engine, num, *requests):
    """Tasks of the requests, once `num` of them run in the engine."""
    tasks = [asyncio.create_task(request) for request in requests]
    while engine.num_requests < num:
        await asyncio.sleep(0.005)
    return tasks


def without_ids(text):
    """The pieces of a stream, without what differs between any two."""
    return [line.partition('"choices"')[2] for line in text.splitlines()]


def test_running_requests_finish(draining, engine):
    engine.delay_s = 0.01

    async def work(client, shutdown):
        undisturbed = await client.post("/v1/completions", json=STREAM)
        running = await started(
            engine, 2,
            client.post("/v1/completions", json=STREAM),
            client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": ""}],
                        "max_tokens": 30, "ignore_eos": True}),
        )  # fmt: skip
        shutdown.begin()
        assert await shutdown.drain(9) == 0
        return undisturbed, *await asyncio.gather(*running)

    undisturbed, stream, whole = draining(work)
    assert stream.text.endswith("data: [DONE]\n\n") and "error" not in stream.text
    assert without_ids(stream.text) == without_ids(undisturbed.text)
    assert whole.status_code == 200 and whole.json()["usage"]["completion_tokens"] == 30
    assert engine.num_aborted == 0


def test_new_requests_are_refused_at_once(draining, engine):
    engine.delay_s = 0.05

    async def work(client, shutdown):
        (running,) = await started(engine, 1, client.post("/v1/completions", json=STREAM))
        shutdown.begin()
        for path in ("/health", "/health/ready", "/ping", "/v1/models", "/nowhere"):
            check(await client.get(path, headers=LABEL))
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
            check(await client.post(path, json=BODY, headers=LABEL))
        assert (await client.get("/health/live")).status_code == 200
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/health/progress")).json()["status"] == "draining"
        assert not running.done() and shutdown.num_running == 1
        shutdown.end()
        await running

    def check(answer):
        assert answer.status_code == 503
        assert answer.json()["error"]["type"] == "ServiceUnavailableError"
        assert answer.json()["error"]["code"] == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.headers["x-request-id"] == "mine"

    draining(work)


@pytest.mark.parametrize("way", ["time", "order", "none"])
def test_what_does_not_finish_is_cut(draining, engine, way):
    """A stream gets an error event and [DONE]; whatever has sent nothing yet gets a 503."""
    engine.delay_s = 0.5

    async def half_a_body():
        yield b'{"prompt": '
        await asyncio.sleep(60)

    async def work(client, shutdown):
        json_type = {"Content-Type": "application/json"}
        running = await started(
            engine, 2,
            client.post("/v1/completions", json=STREAM, headers=LABEL),
            client.post("/v1/completions", json=BODY, headers=LABEL),
            client.post("/v1/completions", content=half_a_body(), headers={**LABEL, **json_type}),
        )  # fmt: skip
        await asyncio.sleep(0.6)  # a token of the stream
        shutdown.begin()
        if way == "order":
            asyncio.get_running_loop().call_later(0.05, shutdown.end)
        assert await shutdown.drain({"time": 0.1, "order": 60, "none": 0}[way]) == 3
        return await asyncio.gather(*running)

    stream, *others = draining(work)
    assert stream.status_code == 200
    assert "shutting down" in stream.text and stream.text.endswith("data: [DONE]\n\n")
    for answer in others:
        assert answer.status_code == 503 and "shutting down" in answer.text
        assert answer.json()["error"]["type"] == "ServiceUnavailableError"
        assert int(answer.headers["retry-after"]) >= 1
    for answer in (stream, *others):
        assert answer.headers["x-request-id"] == "mine"
    assert engine.num_requests == 0 and engine.num_aborted == 2


def test_requests_that_wait_in_the_queue_may_finish(draining, engine):
    async def work(client, shutdown):
        engine.hold = asyncio.Event()
        running = await started(engine, 1, client.post("/v1/completions", json=BODY))
        shutdown.begin()
        asyncio.get_running_loop().call_later(0.05, engine.hold.set)
        assert await shutdown.drain(9) == 0
        return await running[0]

    assert draining(work).status_code == 200


def test_nothing_runs(draining):
    async def work(client, shutdown):
        assert (await client.get("/v1/models")).status_code == 200
        health = asyncio.create_task(client.get("/health"))
        shutdown.begin()
        assert await shutdown.drain(60) == 0
        assert (await health).status_code == 503

    draining(work)


def test_a_client_that_leaves_is_not_waited_for(draining, engine):
    engine.delay_s = 60

    async def work(client, shutdown):
        (running,) = await started(engine, 1, client.post("/v1/completions", json=BODY))
        shutdown.begin()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        assert await shutdown.drain(60) == 0

    draining(work)


def test_death_of_the_engine_ends_the_wait(draining, engine):
    engine.delay_s, engine.fail_after = 0.05, 3
    engine.failure = EngineDeadError("planted death")

    async def work(client, shutdown):
        (running,) = await started(engine, 1, client.post("/v1/completions", json=STREAM))
        shutdown.begin()
        assert await shutdown.drain(60) == 0
        return await running

    answer = draining(work)
    assert "planted death" in answer.text and answer.text.endswith("data: [DONE]\n\n")
