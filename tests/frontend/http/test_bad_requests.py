"""Bad input: a 400 with the field, its value and its range, and never anything worse."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.configs.config import ParallelConfig

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
    ("repetition_penalty", "1.1", True), ("presence_penalty", "-3", False),
    ("presence_penalty", "-2", True), ("frequency_penalty", '"a"', False),
    ("frequency_penalty", "2.01", False),
    ("seed", "9223372036854775808", False), ("seed", "9223372036854775807", True),
    ("seed", "-9223372036854775808", True), ("seed", "-1", True), ("seed", "1.0", False),
    ("stop", '""', False), ("stop", '["a", ""]', False), ("stop", '["a","b","c","d","e"]', False),
    ("stop", '"a"', True), ("stop", "[1]", False), ("stop", '["a","b","c","d"]', True),
    ("echo", "false", True), ("echo", "0", False), ("echo", "true", True),
    ("best_of", "1", True), ("best_of", "2", True), ("best_of", "0", False),
    ("best_of", "100000", False), ("best_of", "true", False),
    ("logit_bias", "{}", True), ("logit_bias", '{"3": 1}', True), ("suffix", '"a"', False),
    ("logit_bias", '{"3": 1000}', True), ("logit_bias", '{"3": "a"}', False),
    ("logit_bias", '{"3": true}', False), ("logit_bias", '{"3": NaN}', False),
    ("logit_bias", '{"3": 1e400}', False), ("logit_bias", "[1]", False),
    ("logit_bias", '{"3.0": 1}', False), ("logit_bias", f'{{"{"9" * 50}": 1}}', False),
    ("allowed_token_ids", "[1, 1]", True), ("allowed_token_ids", "[true]", False),
    ("allowed_token_ids", '"a"', False),
    ("bad_words", '[""]', False), ("bad_words", '[" "]', False), ("bad_words", "[]", True),
    ("bad_words", '["a"]', True), ("bad_words", '"a"', False), ("bad_words", "[1]", False),
    ("prompt_logprobs", "1", True), ("prompt_logprobs", "0", True),
    ("prompt_logprobs", "-1", False), ("prompt_logprobs", "21", False),
    ("logprobs_mode", '"raw"', True), ("logprobs_mode", '"raw_logprobs"', True),
    ("logprobs_mode", '"processed"', False), ("logprobs_mode", "1", False),
    ("response_format", '{"type": "text"}', True), ("structured_outputs", "{}", False),
    ("response_format", '{"type": "json_object"}', False), ("guided_regex", '"a"', False),
    ("use_beam_search", "true", False), ("length_penalty", "1.0", True),
    ("length_penalty", "0.5", False), ("logprob_token_ids", "[1]", False),
    ("prompt_embeds", '"AAAA"', False), ("stream_interval", "2", False),
    ("truncate_prompt_tokens", "-2", False), ("truncate_prompt_tokens", "5", True),
    ("truncate_prompt_tokens", "0", False), ("truncate_prompt_tokens", "-1", True),
    ("truncate_prompt_tokens", "64", False), ("truncate_prompt_tokens", "63", True),
    ("truncation_side", '"right"', True), ("truncation_side", '"middle"', False),
    ("stream_options", '{"include_usage": true}', False), ("cache_salt", '"a/b"', False),
    ("cache_salt", '""', False), ("cache_salt", f'"{"a" * 128}"', True),
    ("cache_salt", f'"{"a" * 129}"', False), ("cache_salt", '"a\\u0000"', False),
    ("cache_salt", '"a@b"', False), ("cache_salt", '"a\\\\b"', False),
    ("priority", "9223372036854775808", False), ("priority", "-9223372036854775808", True),
    ("stream", '"yes"', False), ("skip_special_tokens", "1", False), ("model", "3", False),
    ("spaces_between_special_tokens", "false", True), ("return_effective_params", "1", False),
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


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": ["a"] * 2, "n": 16384}, "n"),
        ({"n": 16384, "best_of": 16384, "prompt": ["a", "b"]}, "n"),
        ({"bad_words": ["a"] * 129}, "bad_words"),
        ({"bad_words": ["a" * 1025]}, "bad_words"),
        ({"stop": "a" * 4097}, "stop"),
        ({"request_id": "a" * 257}, "request_id"),
    ],
)
def test_combinations_and_limits(post, engine, fields, param):
    error = post("completions", {"prompt": "a", **fields}).json()["error"]
    assert error["param"] == param and error["code"] == 400 and param in error["message"]
    assert not engine.seen


def test_at_the_limits(post):
    for fields in (
        {"prompt": ["a"] * 1024, "max_tokens": 1}, {"bad_words": ["a"] * 128},
        {"bad_words": ["a" * 1024]}, {"stop": "a" * 4096}, {"request_id": "a" * 256},
        {"logit_bias": {str(k): 1 for k in range(V)}},
    ):  # fmt: skip
        assert post("completions", {"prompt": "a", **fields}).status_code == 200


def test_scores_of_the_whole_vocabulary_need_the_operators_leave(post, engine):
    """S20: and even then a request has a bound."""
    body = {"prompt": "a", "max_tokens": 1}
    for field in ("logprobs", "prompt_logprobs"):
        assert post("completions", {**body, field: -1}).status_code == 400
    engine.configure(max_logprobs=-1)
    post("completions", {**body, "logprobs": -1, "prompt_logprobs": -1})
    assert engine.seen[0][0].logprobs == engine.seen[0][0].prompt_logprobs == V
    assert post("completions", {**body, "logprobs": -2}).status_code == 400
    post("completions", {**body, "logprobs": 10**30})
    assert engine.seen[1][0].logprobs == V
    num_scores = 1000 * 60 * (V + 1)
    answer = post("completions", {"prompt": "a", "n": 1000, "max_tokens": 60, "logprobs": -1})
    assert answer.status_code == 400 and str(num_scores) in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "logprobs"


@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [
        (ParallelConfig(), range(1)),
        (ParallelConfig(data_parallel_size=3, data_parallel_size_local=3), range(3)),
        (ParallelConfig(data_parallel_size=3, data_parallel_start_rank=2), range(2, 3)),
    ],
)
def test_pinned_rank(post, engine, parallel, ranks):
    """What is no int is ignored; a rank that is not here is refused, with those that are."""
    engine.parallel_config = parallel
    for value in ("0", "1", "2", "3", "-1", "one", ""):
        answer = post("completions", {"prompt": "a"}, headers={"X-data-parallel-rank": value})
        is_rank = value.lstrip("-").isdigit()
        assert answer.status_code == (400 if is_rank and int(value) not in ranks else 200)
        if answer.status_code == 400:
            message = answer.json()["error"]["message"]
            assert f"out of range [{ranks.start}, {ranks.stop})" in message
        elif is_rank:
            assert engine.pinned == int(value)
        else:
            assert engine.pinned is None


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


@pytest.mark.parametrize(("depth", "status"), [(127, 200), (128, 400)])
def test_depth_of_the_body(call, depth, status):
    """The body itself is one level."""
    content = b'{"prompt": "a", "user": ' + b"[" * depth + b"]" * depth + b"}"
    headers = {"Content-Type": "application/json"}
    answer = call("POST", "/v1/completions", content=content, headers=headers)
    assert answer.status_code == status
    assert status == 200 or "128 levels" in answer.json()["error"]["message"]


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
    | {"documents", "chat_template", "return_token_ids", "top_logprobs", "max_completion_tokens"}
    | {"chat_template_kwargs", "reasoning_effort", "add_generation_prompt"}
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
