"""Bad input: a 400 with the field, its value and its range, and never anything worse."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

V = 300


@pytest.mark.parametrize(
    ("fields", "param", "parts"),
    [
        ({"logit_bias": {str(V): 3}}, "logit_bias", ['"300"', "[0, 299]"]),
        ({"logit_bias": {"-1": 3}}, "logit_bias", ['"-1"', "[0, 299]"]),
        ({"logit_bias": {"x": 3}}, "logit_bias", ['"x"', "[0, 299]"]),
        ({"stop_token_ids": [V], "min_tokens": 2}, "stop_token_ids", ["300", "[0, 299]"]),
        ({"allowed_token_ids": []}, "allowed_token_ids", ["[]", "at least one"]),
        ({"allowed_token_ids": [V]}, "allowed_token_ids", ["300", "[0, 299]"]),
        ({"prompt": [0, V]}, "prompt", ["300", "[0, 299]"]),
        ({"prompt": [-1]}, "prompt", ["-1", "[0, 299]"]),
        ({"prompt": [True]}, "prompt", ["true", "[0, 299]"]),
        ({"prompt": [1.5]}, "prompt", ["1.5", "[0, 299]"]),
        ({"prompt": []}, "prompt", ["empty"]),
        ({"prompt": [[]]}, "prompt", ["empty"]),
        ({"prompt": [[1], [V]]}, "prompt", ["300"]),
        ({"prompt": ["a", 1]}, "prompt", ["1"]),
        ({"prompt": [9223372036854775808]}, "prompt", ["9223372036854775808", "[0, 299]"]),
        ({"prompt": ""}, "prompt", ["empty"]),
        ({"prompt": None}, "prompt", ["null"]),
        ({"prompt": {"a": 1}}, "prompt", ['{"a":1}']),
    ],
)
def test_token_ids(post, fields, param, parts):
    """Case A7."""
    answer = post("completions", {"prompt": "a", **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param and error["code"] == 400
    assert error["type"] == "BadRequestError"
    for part in parts:
        assert part in error["message"]


SWEEP = [  # field, value as JSON, whether it is accepted
    *[("temperature", value, True) for value in ("0", "1e-12", "1e-6", "2", "null")],
    *[("temperature", value, False) for value in ("-0.1", '"hot"', "1e400", "true", "NaN")],
    ("top_p", "0", False), ("top_p", "1", True), ("top_p", "1.01", False),
    ("top_k", "-1", True), ("top_k", "0", True), ("top_k", "-2", False), ("top_k", "3000", True),
    ("top_k", "1.0", False), ("top_k", "9" * 40, True),
    ("n", "0", False), ("n", "1", True), ("n", "100000", False), ("n", "true", False),
    ("max_tokens", "0", False), ("max_tokens", "-5", False), ("max_tokens", "1000000000000", True),
    ("max_tokens", "9" * 40, True), ("max_tokens", "1.5", False),
    ("min_tokens", "-1", False), ("min_tokens", "17", False), ("min_tokens", "16", True),
    ("logprobs", "0", True), ("logprobs", "20", True), ("logprobs", "21", False),
    ("logprobs", "1000000", False), ("logprobs", "-1", False), ("logprobs", "true", False),
    ("repetition_penalty", "0", False), ("repetition_penalty", "1", True),
    ("repetition_penalty", "1.1", False), ("presence_penalty", "-3", False),
    ("presence_penalty", "0", True), ("frequency_penalty", '"a"', False),
    ("seed", "18446744073709551616", False), ("seed", "-1", True), ("seed", "1.0", False),
    ("stop", '""', False), ("stop", '["a", ""]', False), ("stop", '["a","b","c","d","e"]', False),
    ("stop", '"a"', True), ("stop", "[1]", False),
    ("echo", "false", True), ("echo", "0", False), ("echo", "true", False),
    ("best_of", "1", True), ("best_of", "2", False), ("best_of", "0", False),
    ("logit_bias", "{}", True), ("logit_bias", '{"3": 1}', False), ("suffix", '"a"', False),
    ("bad_words", '[""]', False), ("bad_words", "[]", True), ("prompt_logprobs", "1", False),
    ("response_format", '{"type": "text"}', True), ("structured_outputs", "{}", False),
    ("response_format", '{"type": "json_object"}', False), ("guided_regex", '"a"', False),
    ("truncate_prompt_tokens", "-2", False), ("truncate_prompt_tokens", "5", False),
    ("stream_options", '{"include_usage": true}', False), ("cache_salt", '"a/b"', False),
    ("cache_salt", '""', False), ("priority", "9223372036854775808", False),
    ("stream", '"yes"', False), ("skip_special_tokens", "1", False), ("model", "3", False),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value", "accepted"), SWEEP)
def test_sweep(call, field, value, accepted):
    """Case A8, and the other fields."""
    answer = call(
        "POST",
        "/v1/completions",
        content=f'{{"prompt": "a", "{field}": {value}}}',
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == (200 if accepted else 400), answer.text
    if not accepted:
        error = answer.json()["error"]
        if not error["message"].startswith("the body is not valid JSON"):
            assert error["param"].removeprefix("body.").startswith(field)
            assert field in error["message"]


def test_greedy_with_n_is_refused(post):
    answer = post("completions", {"prompt": "a", "temperature": 1e-12, "n": 2})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "n"


def test_values_are_clamped_not_passed_on(post, engine):
    post("completions", {"prompt": "a", "max_tokens": 10**40, "top_k": 10**40})
    assert engine.seen[0][0].max_tokens == 62 and engine.seen[0][0].top_k == V


@pytest.mark.parametrize(
    ("content", "media_type"),
    [
        (b"{}", "text/plain"),
        (b"[1]", "application/json"),
        (b'"a"', "application/json"),
        (b"3", "application/json"),
        (b"", "application/json"),
        (b'{"prompt": "a"', "application/json"),
        (b'{"prompt": "\xff"}', "application/json"),
        (b'{"prompt": "\\ud800"}', "application/json"),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "application/json"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "application/json"),
    ],
)
def test_not_a_json_object(call, content, media_type):
    answer = call("POST", "/v1/completions", content=content, headers={"Content-Type": media_type})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] in ("Bad Request", "BadRequestError")


def test_charset_is_allowed_and_compression_is_not(call):
    headers = {"Content-Type": "application/json; charset=utf-8"}
    content = b'{"prompt": "a"}'
    assert call("POST", "/v1/completions", content=content, headers=headers).status_code == 200
    headers["Content-Encoding"] = "gzip"
    assert call("POST", "/v1/completions", content=content, headers=headers).status_code == 400


def test_schema_errors_name_the_path(post):
    error = post("completions", {"prompt": "a", "max_tokens": "many"}).json()["error"]
    assert error["type"] == "Bad Request" and error["param"] == "body.max_tokens"
    assert '"many"' in error["message"] and "int" in error["message"]
    options = {"stream": True, "stream_options": {"include_usage": 3}}
    error = post("completions", {"prompt": "a", **options}).json()["error"]
    assert error["param"] == "body.stream_options.include_usage"


def test_long_values_are_cut_in_messages(post):
    error = post("completions", {"prompt": "a", "max_tokens": "x" * 10_000}).json()["error"]
    assert len(error["message"]) < 500


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)  # fmt: skip
FIELDS = sorted(
    {name for name, _, _ in SWEEP}
    | {"prompt", "messages", "user", "tools", "stop_token_ids", "request_id", "ignore_eos"}
)


def test_no_body_gives_a_500(concurrently):
    @settings(max_examples=150, deadline=None)
    @given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4), st.booleans())
    def check(fields, is_chat):
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        messages = [{"role": "user", "content": "a"}]
        base = {"messages": messages} if is_chat else {"prompt": "a"}

        async def work(client):
            return await client.post(path, json={**base, **fields})

        assert concurrently(work).status_code in (200, 400, 404)

    check()
