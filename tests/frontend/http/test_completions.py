"""`POST /v1/completions`: shapes, streams, usage, labels."""

import asyncio

import pytest

from headrace.frontend.http.listener import ServerOptions
from tests.frontend.http.streams import chunks_of, events_of, joined, parts_of


def test_whole_response(post):
    response = post("completions", {"prompt": "ab", "max_tokens": 3, "model": "tiny"})
    body = response.json()
    assert response.status_code == 200
    assert body["id"].startswith("cmpl-") and body["system_fingerprint"].startswith("headrace-")
    assert isinstance(body.pop("created"), int)
    del body["id"], body["system_fingerprint"]
    assert body == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0, "text": "Hel", "logprobs": None, "finish_reason": "length",
                "stop_reason": None, "token_ids": None, "prompt_logprobs": None,
                "prompt_token_ids": None, "routed_experts": None,
            }
        ],
        "service_tier": None,
        "usage": {
            "prompt_tokens": 3, "total_tokens": 6, "completion_tokens": 3,
            "prompt_tokens_details": None, "completion_tokens_details": None,
        },
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }  # fmt: skip


def test_defaults_are_16_tokens_and_the_first_model(post, engine):
    body = post("completions", {"prompt": "a", "model": "", "ignore_eos": True}).json()
    assert body["usage"]["completion_tokens"] == 16 and body["model"] == "tiny"
    assert post("completions", {"prompt": "a", "max_tokens": None}).json()["choices"][0][
        "finish_reason"
    ] == "stop"  # fmt: skip
    assert engine.seen[0][0].temperature == 1.0


def test_model_file_defaults_are_below_the_request(post, engine):
    engine.model_config.default_sampling_params.update(temperature=0.3, top_k=7, min_p=None)
    post("completions", {"prompt": "a", "top_k": 5})
    params = engine.seen[0][0]
    assert (params.temperature, params.top_k, params.min_p) == (0.3, 5, 0.0)


def test_alias_is_accepted_and_the_first_name_reported(post):
    assert post("completions", {"prompt": "a", "model": "alias"}).json()["model"] == "tiny"
    refused = post("completions", {"prompt": "a", "model": "nope"})
    assert refused.status_code == 404
    assert refused.json()["error"] == {
        "message": 'The model "nope" does not exist; this server has tiny, alias.',
        "type": "NotFoundError", "param": "model", "code": 404,
    }  # fmt: skip


def test_several_prompts_and_choices(post):
    body = {"prompt": ["a", "bb"], "n": 2, "max_tokens": 2, "return_token_ids": True}
    answer = post("completions", body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [
        [256, 97], [256, 97], [256, 98, 98], [256, 98, 98],
    ]  # fmt: skip
    assert answer["choices"][3]["token_ids"] == list(b"He")
    assert answer["usage"]["prompt_tokens"] == 5 and answer["usage"]["completion_tokens"] == 8


def test_prompt_of_ids_may_use_every_logit(post, engine):
    assert post("completions", {"prompt": [0, 299]}).status_code == 200
    assert post("completions", {"prompt": [[5], [6, 7]]}).status_code == 200
    assert [seen[2].token_ids for seen in engine.seen] == [[0, 299], [5], [6, 7]]


def test_logprobs(post, engine):
    body = {"prompt": "a", "max_tokens": 2, "logprobs": 3}
    logprobs = post("completions", body).json()["choices"][0]["logprobs"]
    assert logprobs == {
        "text_offset": [0, 1],
        "token_logprobs": [-0.5, -0.5],
        "tokens": ["H", "e"],
        "top_logprobs": [
            {"H": -0.5, "A": -9999.0, "B": -1.0},
            {"e": -0.5, "A": -9999.0, "B": -1.0},
        ],
    }
    engine.last_logprob = float("nan")
    answer = post("completions", {**body, "logprobs": 0, "return_tokens_as_token_ids": True})
    assert answer.json()["choices"][0]["logprobs"]["top_logprobs"][0] == {"token_id:72": -9999.0}


@pytest.mark.parametrize("n", [1, 2])
def test_stream_equals_whole(post, n):
    body = {"prompt": ["a", "b"], "n": n, "logprobs": 1, "return_token_ids": True}
    whole = post("completions", body).json()
    streamed = post("completions", {**body, "stream": True})
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done = events_of(streamed)
    assert done == "[DONE]" and all("usage" not in event for event in events)
    assert {event["id"] for event in events} == {events[0]["id"]}
    for choice in whole["choices"]:
        index = choice["index"]
        parts = parts_of(events, index)
        assert "".join(part["text"] for part in parts) == choice["text"] == "Hello!"
        assert joined(part["token_ids"] for part in parts) == choice["token_ids"]
        assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert all(part["prompt_token_ids"] is None for part in parts[1:])
        assert [part["finish_reason"] for part in parts] == [None] * 6 + ["stop"]
        for key in ("text_offset", "tokens", "token_logprobs", "top_logprobs"):
            assert joined(p["logprobs"][key] for p in parts) == choice["logprobs"][key]
    ends = [event for event in events if event["choices"][0]["finish_reason"]]
    assert all("system_fingerprint" in event for event in ends)


def test_stream_usage(post):
    body = {"prompt": "a", "max_tokens": 3, "stream": True, "stream_options": {}}
    assert all("usage" not in event for event in events_of(post("completions", body))[:-1])
    body["stream_options"] = {"include_usage": True}
    *chunks, usage, done = events_of(post("completions", body))
    assert done == "[DONE]" and all(chunk["usage"] is None for chunk in chunks)
    assert not any("system_fingerprint" in chunk for chunk in chunks)
    assert usage["choices"] == [] and "system_fingerprint" in usage
    whole = post("completions", {"prompt": "a", "max_tokens": 3}).json()
    assert usage["usage"] == whole["usage"]
    body["stream_options"]["continuous_usage_stats"] = True
    *chunks, usage, done = events_of(post("completions", body))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]
    assert usage["usage"]["completion_tokens"] == 3


def test_operator_can_force_usage_and_show_cached_tokens(post, engine):
    engine.options = ServerOptions(
        enable_force_include_usage=True, enable_prompt_tokens_details=True
    )
    *chunks, usage = chunks_of(
        post("completions", {"prompt": "a", "max_tokens": 2, "stream": True})
    )
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2]
    whole = post("completions", {"prompt": "a", "max_tokens": 2}).json()
    assert usage["choices"] == [] and usage["usage"] == whole["usage"]
    assert whole["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 2, "created_cache_tokens": None, "multimodal_tokens": None,
    }  # fmt: skip


def test_ids_are_ours_and_labels_are_echoed(concurrently, engine):
    async def work(client):
        return await asyncio.gather(
            *(
                client.post(
                    "/v1/completions",
                    json={"prompt": f"p{i}", "request_id": "in-body"},
                    headers={"X-Request-Id": "job-7"},
                )
                for i in range(50)
            )
        )

    answers = concurrently(work)
    assert {answer.headers["x-request-id"] for answer in answers} == {"job-7"}
    assert len({answer.json()["id"] for answer in answers}) == 50
    assert len({options["request_id"] for _, options, _ in engine.seen}) == 50
    assert not any("job-7" in options["request_id"] for _, options, _ in engine.seen)


def test_label_of_the_body_and_no_label(post):
    assert post("completions", {"prompt": "a", "request_id": "mine"}).headers[
        "x-request-id"
    ] == "mine"  # fmt: skip
    answer = post("completions", {"prompt": "a"})
    assert answer.headers["x-request-id"] == answer.json()["id"]
    assert post("completions", {"prompt": "a", "request_id": "a\nb"}).status_code == 400


def test_engine_gets_priority_and_salt(post, engine):
    post("completions", {"prompt": "a", "priority": -3, "cache_salt": "s", "user": "u"})
    _, options, prompt = engine.seen[0]
    assert (options["priority"], prompt.cache_salt) == (-3, "s")
    for header in ("X-Headrace-Priority", "X-Vllm-Priority"):
        post("completions", {"prompt": "a", "priority": 2}, headers={header: "-7"})
        assert engine.seen[-1][1]["priority"] == -7
    for value in ("high", "", "1.5", "9" * 30):
        body = {"prompt": "a", "priority": 2}
        post("completions", body, headers={"X-Headrace-Priority": value})
        assert engine.seen[-1][1]["priority"] == 2


def test_unknown_fields_are_named_and_counted(concurrently):
    async def work(client):
        answer = await client.post(
            "/v1/completions", json={"prompt": "a", "temprature": 0.3, "x\r\ny": 1, "user": "u"}
        )
        return answer, (await client.get("/metrics")).text

    answer, metrics = concurrently(work)
    assert answer.status_code == 200
    assert answer.headers["x-headrace-unknown-fields"] == "temprature, x%0D%0Ay"
    assert 'unknown_request_fields_total{engine="0",model_name="tiny"} 2.0' in metrics


def test_strict_refuses_unknown_fields(post, engine):
    """Case A15, the other half."""
    engine.options = ServerOptions(strict=True)
    error = post("completions", {"prompt": "a", "temprature": 0.3}).json()["error"]
    assert error["param"] == "temprature" and error["code"] == 400
    assert '"temprature"' in error["message"]
    assert "did you mean temperature?" in error["message"]
    error = post("completions", {"prompt": "a", "guided_regx": "a"}).json()["error"]
    assert "did you mean guided_regex?" in error["message"]
    error = post("completions", {"prompt": "a", "zzzzzzzz": 1}).json()["error"]
    assert "zzzzzzzz" in error["message"] and "did you mean" not in error["message"]
    assert post("completions", {"prompt": "a", "user": "u"}).status_code == 200


def test_doubled_start_token_is_a_warning(post):
    answer = post("completions", {"prompt": "<s>a"})
    assert answer.headers["x-headrace-warning"] == "the start token is there twice"
    plain = post("completions", {"prompt": "<s>a", "add_special_tokens": False})
    assert "x-headrace-warning" not in plain.headers


def test_context_length(post, engine):
    """Case A10: L is 64."""
    for length, max_tokens, status in [
        (64, None, 400), (65, None, 400), (64, 1, 400), (63, None, 200), (63, 1, 200), (63, 2, 200),
    ]:  # fmt: skip
        answer = post("completions", {"prompt": [65] * length, "max_tokens": max_tokens})
        assert answer.status_code == status, (length, max_tokens)
        if status == 400:
            assert answer.json()["error"]["param"] == "input_tokens"
            assert str(length) in answer.json()["error"]["message"]
            assert "64" in answer.json()["error"]["message"]
        else:
            assert answer.json()["usage"]["completion_tokens"] == 1
            assert answer.json()["choices"][0]["finish_reason"] == "length"
            assert len(engine.seen[-1][2].token_ids) == length
