"""Streams against whole answers, comments on idle streams, and numbers that JSON does not have."""

import asyncio
import json
import math

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.configs.errors import NonFiniteLogitsError
from headrace.frontend.http.listener import ServerOptions
from headrace.frontend.http.logprobs import FLOOR, finite
from tests.frontend.http.streams import chunks_of, events_of, joined, parts_of

HI = [{"role": "user", "content": "hi"}]
COMMON = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(1, 3),
        "max_tokens": st.integers(1, 9),
        "ignore_eos": st.booleans(),
        "return_token_ids": st.booleans(),
        "return_tokens_as_token_ids": st.booleans(),
        "return_effective_params": st.booleans(),
        "echo": st.booleans(),
    },
)
COMPLETION = st.fixed_dictionaries(
    {"prompt": st.sampled_from(["ab", [97, 299], ["a", "bc"], [[1], [2, 3]]])},
    optional={"logprobs": st.integers(0, 4)},
)
CHAT = st.sampled_from(
    [{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3}, {"return_prompt_text": True}]
)


def post(engine, path, body):
    from tests.frontend.http.conftest import with_client

    async def work(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(f"/v1/{path}", json=body)

    return with_client(engine, work)


def check_usage(chunks, whole, num_choices):
    """PP36: running totals never fall, the last chunk has no choices and the final numbers."""
    *chunks, last = chunks
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == whole["usage"]["completion_tokens"]
    assert {c["usage"]["prompt_tokens"] for c in chunks} == {whole["usage"]["prompt_tokens"]}
    finished = [c for c in chunks if c["choices"][0]["finish_reason"] is not None]
    assert sorted(c["choices"][0]["index"] for c in finished) == list(range(num_choices))
    assert "system_fingerprint" in last and not any("system_fingerprint" in c for c in chunks)


USAGE = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def test_completion_streams_equal_whole_answers(scripted):
    @settings(max_examples=60, deadline=None)
    @given(COMMON, COMPLETION)
    def check(common, fields):
        body, engine = {**common, **fields}, scripted("Hi!")
        whole = post(engine, "completions", body).json()
        chunks = chunks_of(post(engine, "completions", {**body, **USAGE}))
        check_usage(chunks, whole, len(whole["choices"]))
        assert chunks[0].get("effective_params") == whole.get("effective_params")
        for choice in whole["choices"]:
            parts = parts_of(chunks, choice["index"])
            assert "".join(part["text"] for part in parts) == choice["text"]
            assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
            if body.get("return_token_ids"):
                assert joined(part["token_ids"] for part in parts) == choice["token_ids"]
            assert parts[-1]["finish_reason"] == choice["finish_reason"]
            assert parts[-1]["stop_reason"] == choice["stop_reason"]
            assert (choice["logprobs"] is not None) == ("logprobs" in body)
            for key, values in (choice["logprobs"] or {}).items():
                assert joined(p["logprobs"][key] for p in parts if p["logprobs"]) == values

    check()


def test_chat_streams_equal_whole_answers(scripted):
    @settings(max_examples=60, deadline=None)
    @given(COMMON, CHAT)
    def check(common, fields):
        body, engine = {"messages": HI, **common, **fields}, scripted()
        whole = post(engine, "chat/completions", body).json()
        chunks = chunks_of(post(engine, "chat/completions", {**body, **USAGE}))
        check_usage(chunks, whole, len(whole["choices"]))
        for choice in whole["choices"]:
            index = choice["index"]
            mine = [c for c in chunks if c["choices"] and c["choices"][0]["index"] == index]
            parts = parts_of(chunks, index)
            text = "".join(part["delta"]["content"] for part in parts)
            assert text == choice["message"]["content"]
            assert [p["delta"].get("role") for p in parts][:2] == ["assistant", None]
            assert mine[0]["prompt_token_ids"] == whole["prompt_token_ids"]
            assert mine[0]["prompt_text"] == whole["prompt_text"]
            assert not any("prompt_token_ids" in chunk for chunk in mine[1:])
            if body.get("return_token_ids"):
                ids = joined(part["token_ids"] for part in parts[1:] if part["token_ids"])
                assert ids == choice["token_ids"]
            assert parts[-1]["finish_reason"] == choice["finish_reason"]
            if choice["logprobs"] is not None:
                content = joined(p["logprobs"]["content"] for p in parts if p["logprobs"])
                assert content == choice["logprobs"]["content"]

    check()


@pytest.mark.parametrize("value", [float("-inf"), float("inf"), float("nan"), -1e5, -3.5, 0.0])
def test_no_number_is_infinite(post, engine, value):
    """Case A13: strictly valid JSON, whatever the engine scores."""
    engine.last_logprob = value
    expected = value if abs(value) < -FLOOR else FLOOR

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in the JSON")

    for path, body in (
        ("completions", {"prompt": "a", "echo": True, "logprobs": 4, "prompt_logprobs": 4}),
        ("completions", {"prompt": "a", "logprobs": 4, "stream": True}),
        ("chat/completions", {"messages": HI, "logprobs": True, "top_logprobs": 4}),
        (
            "chat/completions",
            {"messages": HI, "logprobs": True, "top_logprobs": 4, "stream": True},
        ),
    ):
        answer = post(path, body)
        assert answer.status_code == 200
        texts = [answer.text]
        if body.get("stream"):
            texts = [line.removeprefix("data: ") for line in answer.text.split("\n\n")[:-2]]
        numbers = [
            number
            for text in texts
            for number in scores_in(json.loads(text, parse_constant=refuse))
        ]
        assert numbers and all(math.isfinite(number) for number in numbers)
        assert expected in numbers and min(numbers) >= FLOOR
    assert finite(value) == expected


def scores_in(value):
    """Every float in decoded JSON."""
    if isinstance(value, dict):
        return [number for item in value.values() for number in scores_in(item)]
    if isinstance(value, list):
        return [number for item in value for number in scores_in(item)]
    return [value] if isinstance(value, float) else []


def test_non_finite_logits_end_that_request_alone(concurrently, engine, scripted):
    """Case A13, the other half: a typed 500, or an event if the stream has begun."""

    async def work(client):
        good = asyncio.create_task(client.post("/v1/completions", json={"prompt": "good"}))
        engine.fail_after, engine.failure = 1, NonFiniteLogitsError("the logits were NaN")
        bad = await client.post("/v1/completions", json={"prompt": "bad"})
        stream = await client.post("/v1/completions", json={"prompt": "bad", "stream": True})
        engine.fail_after = None
        return await good, bad, stream, await client.post("/v1/completions", json={"prompt": "a"})

    _, bad, stream, after = concurrently(work)
    assert bad.status_code == 500 and bad.json()["error"]["type"] == "InternalServerError"
    assert "NaN" in bad.json()["error"]["message"]
    first, error, done = events_of(stream)
    assert first["choices"] and error["error"]["code"] == 500 and done == "[DONE]"
    assert after.status_code == 200


def test_idle_streams_get_comments(live_server, scripted):
    engine = scripted(delay_s=0.15)
    engine.options = ServerOptions(sse_keep_alive_interval=0.04)
    server = live_server(engine)
    body = {"prompt": "a", "max_tokens": 3, "stream": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body)
    blocks = [block for block in answer.text.split("\n\n") if block]
    assert blocks[0].startswith("data: ")  # nothing before the first token
    comments = [block for block in blocks if block.startswith(":")]
    assert len(comments) >= 4 and set(comments) == {": keep-alive"}
    data = [block for block in blocks if block.startswith("data: ")]
    assert len(data) == 4 and data[-1] == "data: [DONE]"
    assert len(comments) + len(data) == len(blocks)
