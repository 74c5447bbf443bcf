"""Echoed prompts and prompt logprobs."""

import pytest

from tests.frontend.http.streams import chunks_of, joined, parts_of


def test_echo_puts_the_prompt_first(post):
    for prompt, ids, shown in (("ab", False, "ab"), ([97, 98], True, "ab")):
        answer = post("completions", {"prompt": prompt, "echo": True, "max_tokens": 2}).json()
        assert answer["choices"][0]["text"] == f"{shown}He"
        assert answer["usage"]["completion_tokens"] == 2
        assert answer["usage"]["prompt_tokens"] == (2 if ids else 3)


def test_echo_alone(post, engine):
    """`max_tokens: 0` is only for echoes, and no token of the answer is counted or shown."""
    body = {"prompt": "ab", "max_tokens": 0, "n": 2}
    assert post("completions", body).status_code == 400
    answer = post("completions", {**body, "echo": True, "return_effective_params": True}).json()
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "ab"]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 0 and answer["usage"]["total_tokens"] == 3
    assert answer["effective_params"]["max_tokens"] == 0
    assert post("completions", {**body, "echo": True, "max_tokens": -1}).status_code == 400
    assert post("completions", {**body, "echo": False}).status_code == 400


@pytest.mark.parametrize("max_tokens", [0, 2])
@pytest.mark.parametrize("n", [1, 2])
def test_echo_stream_equals_whole(post, max_tokens, n):
    body = {"prompt": ["ab", [97]], "echo": True, "max_tokens": max_tokens, "n": n, "logprobs": 1}
    whole = post("completions", body).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage = chunks_of(post("completions", {**body, **options}))
    assert usage["usage"] == whole["usage"]
    assert usage["usage"]["completion_tokens"] == 2 * n * max_tokens
    for choice in whole["choices"]:
        parts = parts_of(chunks, choice["index"])
        assert parts[0]["text"] == ("ab" if choice["index"] < n else "a")
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"] == "length"
        assert all(part["finish_reason"] is None for part in parts[:-1])
        for key, values in choice["logprobs"].items():
            assert joined(p["logprobs"][key] for p in parts if p["logprobs"]) == values


def test_logprobs_of_an_echo(post):
    body = {"prompt": "ab", "echo": True, "max_tokens": 1, "logprobs": 1}
    logprobs = post("completions", body).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["", "a", "b", "H"]
    assert logprobs["text_offset"] == [0, 0, 1, 2]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {"a": -0.5, "A": -9999.0}
    body["max_tokens"] = 0
    logprobs = post("completions", body).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["", "a", "b"] and logprobs["token_logprobs"][0] is None


def test_echo_with_ids_has_no_text(post):
    body = {"prompt": "ab", "echo": True, "max_tokens": 2, "return_token_ids": True}
    choice = post("completions", body).json()["choices"][0]
    assert choice["text"] == "He" and choice["prompt_token_ids"] == [256, 97, 98]
    parts = parts_of(chunks_of(post("completions", {**body, "stream": True})), 0)
    assert "".join(part["text"] for part in parts) == "He"
    assert parts[0]["prompt_token_ids"] == [256, 97, 98]
    assert all(part["prompt_token_ids"] is None for part in parts[1:])
    parts = parts_of(chunks_of(post("completions", {**body, "stream": True, "logprobs": 0})), 0)
    assert parts[0]["prompt_token_ids"] == [256, 97, 98] and parts[0]["token_ids"] == []
    assert parts[0]["logprobs"]["tokens"] == ["", "a", "b"]
    assert all(part["prompt_token_ids"] is None for part in parts[1:])


def test_prompt_logprobs(post):
    body = {"prompt": ["ab", "a"], "n": 2, "max_tokens": 1, "prompt_logprobs": 1}
    choices = post("completions", body).json()["choices"]
    a = {
        "97": {"logprob": -0.5, "rank": 2, "decoded_token": "a"},
        "65": {"logprob": -9999.0, "rank": 1, "decoded_token": "A"},
    }
    b = {
        "98": {"logprob": -0.5, "rank": 2, "decoded_token": "b"},
        "65": {"logprob": -9999.0, "rank": 1, "decoded_token": "A"},
    }
    assert [choice["prompt_logprobs"] for choice in choices] == [[None, a, b]] * 2 + [[None, a]] * 2
    assert all(choice["logprobs"] is None for choice in choices)
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "prompt_logprobs": 0}
    scores = post("chat/completions", chat).json()["prompt_logprobs"]
    assert scores[0] is None and scores[2] == {
        "117": {"logprob": -0.5, "rank": 2, "decoded_token": "u"}
    }


def test_echo_and_prompt_logprobs_each_have_their_own_number(post, engine):
    body = {"prompt": "ab", "echo": True, "logprobs": 0, "prompt_logprobs": 2, "max_tokens": 1}
    choice = post("completions", body).json()["choices"][0]
    assert engine.seen[0][0].prompt_logprobs == 2
    assert choice["logprobs"]["top_logprobs"] == [None, {"a": -0.5}, {"b": -0.5}, {"H": -0.5}]
    assert set(choice["prompt_logprobs"][1]) == {"97", "65"}


def test_streams_have_no_prompt_logprobs(post, engine):
    body = {"prompt": "a", "stream": True, "max_tokens": 1}
    assert post("completions", {**body, "prompt_logprobs": 1}).status_code == 400
    assert post("completions", {**body, "prompt_logprobs": 0}).status_code == 200
    assert engine.seen[0][0].prompt_logprobs is None
