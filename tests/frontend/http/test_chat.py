"""`POST /v1/chat/completions`: shapes, streams, rendering options."""

import pytest

from tests.frontend.http.streams import events_of, joined

HI = [{"role": "user", "content": "hi"}]


def test_whole_response(post):
    response = post("chat/completions", {"messages": HI, "max_tokens": 2})
    body = response.json()
    assert response.status_code == 200 and body.pop("id").startswith("chatcmpl-")
    prompt_tokens = len("<|user|>hi") + 1 + len("<|assistant|>")
    del body["created"], body["system_fingerprint"]
    assert body == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant", "content": "He", "refusal": None, "annotations": None,
                    "audio": None, "function_call": None, "reasoning": None,
                },
                "logprobs": None, "finish_reason": "length", "stop_reason": None,
                "token_ids": None, "routed_experts": None,
            }
        ],
        "service_tier": None,
        "usage": {
            "prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + 2,
            "completion_tokens": 2, "prompt_tokens_details": None,
            "completion_tokens_details": None,
        },
        "prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None,
        "kv_transfer_params": None, "ec_transfer_params": None, "metrics": None,
    }  # fmt: skip


def test_max_tokens(post, engine):
    """Absent: the rest of the window, or what the model's files say."""
    post("chat/completions", {"messages": HI, "ignore_eos": True})
    assert engine.seen[-1][0].max_tokens == 64 - len(engine.seen[-1][2].token_ids)
    engine.model_config.default_sampling_params["max_tokens"] = 9
    post("chat/completions", {"messages": HI})
    assert engine.seen[-1][0].max_tokens == 9
    post("chat/completions", {"messages": HI, "max_tokens": 3, "max_completion_tokens": 4})
    assert engine.seen[-1][0].max_tokens == 4
    for value in (0, -1):
        body = {"messages": HI, "max_completion_tokens": value}
        assert post("chat/completions", body).status_code == 400


@pytest.mark.parametrize("n", [1, 2])
def test_stream(post, n):
    """Case A3: one usage event, last, with n counted right and the prompt once."""
    body = {
        "messages": HI, "n": n, "max_tokens": 5, "ignore_eos": True, "return_token_ids": True,
        "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    whole = post("chat/completions", body).json()
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = events_of(post("chat/completions", body))
    assert done == "[DONE]" and usage["choices"] == []
    assert usage["usage"] == whole["usage"] and usage["usage"]["completion_tokens"] == 5 * n
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    for index in range(n):
        mine = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        first, *parts = [chunk["choices"][0] for chunk in mine]
        assert first == {
            "index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
            "finish_reason": None,
        }  # fmt: skip
        assert mine[0]["prompt_token_ids"] == whole["prompt_token_ids"]
        assert "prompt_token_ids" not in mine[1]
        choice = whole["choices"][index]
        text = "".join(part["delta"]["content"] for part in parts)
        assert text == choice["message"]["content"] == "Hello"
        assert joined(part["token_ids"] for part in parts) == choice["token_ids"]
        logprobs = joined(part["logprobs"]["content"] for part in parts)
        assert logprobs == choice["logprobs"]["content"]
        assert [part["finish_reason"] for part in parts] == [None] * 4 + ["length"]
        assert "stop_reason" in parts[-1]


def test_logprobs(post):
    body = {"messages": HI, "max_tokens": 1, "logprobs": True}
    content = post("chat/completions", body).json()["choices"][0]["logprobs"]["content"]
    assert content == [{"token": "H", "logprob": -0.5, "bytes": [72], "top_logprobs": []}]
    body["top_logprobs"] = 3
    entry = post("chat/completions", body).json()["choices"][0]["logprobs"]["content"][0]
    assert [(top["token"], top["logprob"]) for top in entry["top_logprobs"]] == [
        ("A", -9999.0), ("H", -0.5), ("B", -1.0),
    ]  # fmt: skip
    del body["logprobs"]
    assert post("chat/completions", body).status_code == 400
    body |= {"logprobs": True, "top_logprobs": 21}
    assert post("chat/completions", body).json()["error"]["param"] == "top_logprobs"


def test_rendering_options(post, engine):
    body = {
        "messages": [*HI, {"role": "assistant", "content": "Well"}],
        "add_generation_prompt": False, "continue_final_message": True,
        "chat_template_kwargs": {"not_used": 1}, "return_prompt_text": True, "max_tokens": 1,
        "reasoning_effort": "none",
    }  # fmt: skip
    answer = post("chat/completions", body).json()
    assert answer["prompt_text"] == "<|user|>hi<eos><|assistant|>Well"
    assert engine.renderer.calls[0].chat_template_kwargs == {
        "not_used": 1, "reasoning_effort": "none", "enable_thinking": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["hi"]}, "messages"),
        ({"messages": [{"content": "a"}]}, "role"),
        ({"messages": [{"role": "user", "content": 3}]}, "content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "multimodal",
        ),
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"chat_template": "{{ 1 }}"}, "operator"),
        ({"chat_template_kwargs": {"messages": []}}, "messages"),
        ({"add_special_tokens": True}, "start token"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"echo": 1}, "echo"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"documents": [{"title": 3}]}, "documents"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template"),
    ],
)
def test_refused(post, fields, word):
    answer = post("chat/completions", {"messages": HI, **fields})
    assert answer.status_code == 400 and word in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "none"}, {"add_special_tokens": False}, {"store": True, "metadata": {}},
        {"modalities": ["text"]}, {"response_format": {"type": "text"}}, {"logit_bias": None},
        {"n": 1, "presence_penalty": 0, "parallel_tool_calls": True},
    ],
)  # fmt: skip
def test_neutral_values_are_accepted(post, fields):
    answer = post("chat/completions", {"messages": HI, "max_tokens": 1, **fields})
    assert answer.status_code == 200 and "x-headrace-unknown-fields" not in answer.headers


def test_model_without_template(post, engine):
    engine.tokenizer.chat_template = None
    answer = post("chat/completions", {"messages": HI})
    assert answer.status_code == 400
    assert "no chat template" in answer.json()["error"]["message"]
    assert "/v1/completions" in answer.json()["error"]["message"]
