"""S19: limits on what is in a body, each at its value and one above it, set to a small number."""

import dataclasses

import pytest

from headrace.frontend.http.limits import RequestLimits
from headrace.frontend.http.listener import ServerOptions

KIB = 2**10
HI = {"role": "user", "content": "hi"}
PART = {"type": "text", "text": "a"}


def messages(count):
    return "chat/completions", {"messages": [HI] * count}


def parts(count):
    return "chat/completions", {"messages": [{"role": "user", "content": [PART] * count}]}


def completion(**fields):
    return "completions", {"prompt": "a", "max_tokens": 1, **fields}


LIMITS = {  # limit: its value here, a request of a given size, the field that is refused
    "max_messages": (3, messages, "messages"),
    "max_content_parts": (3, parts, "messages"),
    "max_prompts": (3, lambda k: completion(prompt=["a"] * k), "prompt"),
    "max_num_choices": (3, lambda k: completion(n=k), "n"),
    "max_total_choices": (6, lambda k: completion(prompt=["a"] * 2, n=k // 2), "n"),
    "max_stop_strings": (2, lambda k: completion(stop=["x", "y", "z"][:k]), "stop"),
    "max_stop_chars": (5, lambda k: completion(stop="x" * k), "stop"),
    "max_bad_words": (2, lambda k: completion(bad_words=["x", "y", "z"][:k]), "bad_words"),
    "max_bad_word_chars": (5, lambda k: completion(bad_words=["x" * k]), "bad_words"),
    "max_logit_bias": (3, lambda k: completion(logit_bias={str(t): 1 for t in range(k)}),
                       "logit_bias"),
    "max_scores": (1400, lambda k: completion(n=k, logprobs=0), "logprobs"),
    "max_cache_salt_chars": (5, lambda k: completion(cache_salt="s" * k), "cache_salt"),
}  # fmt: skip
# Those of HTTP itself, of JSON's shape, and of ids have tests of their own.
ELSEWHERE = {
    "max_header_count", "max_header_bytes", "max_url_bytes", "max_body_bytes", "header_timeout_s",
    "body_timeout_s", "body_total_timeout_s", "max_json_depth", "max_json_items",
    "max_json_commas", "max_request_id_chars",
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_at_the_limit_and_above(post, engine, name):
    value, make, field = LIMITS[name]
    engine.options = ServerOptions(limits=RequestLimits(**{name: value}))
    step = 2 if name == "max_total_choices" else 1
    answer = post(*make(value))
    assert answer.status_code == 200, answer.text
    num_seen = len(engine.seen)
    assert num_seen > 0
    answer = post(*make(value + step))
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == field
    assert str(value) in error["message"] and len(engine.seen) == num_seen
    engine.options = ServerOptions()
    if name != "max_scores":  # its default is far above what this engine can make
        assert post(*make(value + step)).status_code == 200


def test_every_limit_is_tested_and_has_its_value():
    assert {field.name for field in dataclasses.fields(RequestLimits)} == {*LIMITS, *ELSEWHERE}
    limits = RequestLimits()
    assert (limits.max_header_count, limits.max_header_bytes) == (256, 64 * KIB)
    assert limits.max_body_bytes == 16 * KIB * KIB
