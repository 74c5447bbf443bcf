"""Every field that is acted on: what it becomes for the engine, the renderer and the answer."""

import pytest

from headrace.frontend.http.chat import CHAT_FIELDS
from headrace.frontend.http.completions import COMPLETION_FIELDS
from headrace.frontend.http.fields import GENERATION_FIELDS, IGNORED_FIELDS
from headrace.frontend.http.listener import ServerOptions
from headrace.frontend.http.protocol import ChatBody, CompletionBody
from headrace.frontend.http.sampling import SAMPLING_FIELDS
from tests.frontend.http.streams import chunks_of, parts_of

V = 300
EOS = 257
HI = [{"role": "user", "content": "hi"}]
PATHS = ("completions", "chat/completions")

SAMPLING = [  # field, value in the body, value in SamplingParams
    ("n", 2, 2), ("temperature", 0.5, 0.5), ("top_p", 0.25, 0.25), ("top_k", 7, 7),
    ("min_p", 0.125, 0.125), ("seed", 2**63 - 1, 2**63 - 1), ("seed", -5, 2**64 - 5),
    ("presence_penalty", -1.5, -1.5), ("frequency_penalty", 2, 2.0),
    ("repetition_penalty", 1.3, 1.3),
    ("logit_bias", {"0": 1, "299": -0.5}, {0: 1.0, 299: -0.5}),
    ("logit_bias", {"5": 1e9, "6": -101}, {5: 100.0, 6: -100.0}),
    ("allowed_token_ids", [299, 0, 299], [299, 0]),
    ("bad_words", ["no", " never"], ["no", " never"]),
    ("stop", "end", ["end"]), ("stop", ["a", "b"], ["a", "b"]),
    ("stop_token_ids", [299, 299], [299]), ("ignore_eos", True, True),
    ("min_tokens", 3, 3), ("include_stop_str_in_output", True, True),
    ("skip_special_tokens", False, False), ("spaces_between_special_tokens", False, False),
    ("best_of", 3, 3), ("prompt_logprobs", 2, 2),
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("field", "value", "expected"), SAMPLING)
def test_sampling_fields_reach_the_engine(post, engine, path, field, value, expected):
    body = {"prompt": "a"} if path == "completions" else {"messages": HI}
    assert post(path, {**body, "max_tokens": 5, field: value}).status_code == 200
    assert getattr(engine.seen[0][0], field) == expected


def test_no_sampling_field_is_untested():
    assert set(SAMPLING_FIELDS) <= {field for field, _, _ in SAMPLING}


def test_a_field_is_acted_on_or_refused_but_not_both():
    for kind, others in ((CompletionBody, COMPLETION_FIELDS), (ChatBody, CHAT_FIELDS)):
        fields = set(kind.__struct_fields__)
        assert not fields & set(others) and not fields & IGNORED_FIELDS
        assert set(GENERATION_FIELDS) <= set(others) and not set(others) & IGNORED_FIELDS


@pytest.mark.parametrize("path", PATHS)
def test_null_is_unset(post, path):
    """A client that writes out all fields, unset ones as null, gets the plain answer."""
    kind, others = (
        (CompletionBody, COMPLETION_FIELDS) if path == "completions" else (ChatBody, CHAT_FIELDS)
    )
    given = {"prompt": "a"} if path == "completions" else {"messages": HI}
    body = dict.fromkeys((*kind.__struct_fields__, *others, *IGNORED_FIELDS)) | given
    answer, plain = post(path, body), post(path, given)
    assert answer.status_code == 200 and answer.json()["choices"] == plain.json()["choices"]
    assert "x-headrace-unknown-fields" not in answer.headers


def test_best_of_returns_n_and_shows_no_scores(post, engine):
    answer = post("completions", {"prompt": "a", "n": 2, "best_of": 3, "max_tokens": 2}).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    params = engine.seen[0][0]
    assert (params.n, params.num_returned) == (3, 2) and params.logprobs is not None


PRECEDENCE = [  # request, operator and model merged, expected: PP28
    (None, {}, 1.0), (None, {"temperature": 0.25}, 0.25), (0.75, {"temperature": 0.25}, 0.75),
    (1.0, {"temperature": 0.25}, 1.0), (0, {"temperature": 0.25}, 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("given", "defaults", "expected"), PRECEDENCE)
def test_precedence_and_its_report(post, engine, given, defaults, expected):
    engine.configure(default_sampling_params=dict(defaults))
    body = {"prompt": "a", "temperature": given, "return_effective_params": True}
    report = post("completions", body).json()["effective_params"]
    assert report["temperature"] == expected == engine.seen[0][0].temperature
    (first, *rest) = chunks_of(post("completions", {**body, "stream": True}))
    assert first["effective_params"] == report
    assert not any("effective_params" in chunk for chunk in rest)
    body["return_effective_params"] = False
    assert "effective_params" not in post("completions", body).json()


def test_effective_params_after_clamping(post, engine):
    engine.configure(extra_eos_token_ids=(250,), max_output_tokens=30)
    body = {
        "prompt": ["aa", "a"], "max_tokens": 10**9, "top_k": 10**9, "top_p": 0.5, "stop": "x",
        "logit_bias": {"7": 500}, "seed": 3, "min_tokens": 40, "logprobs": 2, "n": 2,
        "return_effective_params": True,
    }  # fmt: skip
    assert post("completions", body).json()["effective_params"] == {
        "n": 2, "best_of": None, "temperature": 1.0, "top_p": 0.5, "top_k": V, "min_p": 0.0,
        "seed": 3, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
        "logit_bias": {"7": 100.0}, "allowed_token_ids": None, "bad_words": [], "stop": ["x"],
        "stop_token_ids": [], "ignore_eos": False, "min_tokens": 30,
        "include_stop_str_in_output": False, "skip_special_tokens": True,
        "spaces_between_special_tokens": True, "max_tokens": 30, "logprobs": 2,
        "prompt_logprobs": None, "logprobs_mode": "raw_logprobs", "eos_token_ids": [250, EOS],
    }  # fmt: skip
    assert {params.max_tokens for params, _, _ in engine.seen} == {30}
    engine.configure(max_output_tokens=None, logprobs_mode="processed_logprobs")
    body = {"messages": HI, "return_effective_params": True, "logprobs_mode": "processed"}
    report = post("chat/completions", body).json()["effective_params"]
    assert report["max_tokens"] == engine.seen[-1][0].max_tokens == 64 - 24
    assert report["logprobs_mode"] == "processed_logprobs"


def test_truncation(post, engine):
    """PP46: only when asked by name."""
    long = list(range(70))
    assert post("completions", {"prompt": long}).status_code == 400
    for fields, expected in (
        ({"truncate_prompt_tokens": 3}, [67, 68, 69]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, [67, 68, 69]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [0, 1, 2]),
        ({"truncate_prompt_tokens": -1}, long[-48:]),  # room for the 16 tokens of max_tokens
        ({"truncate_prompt_tokens": -1, "max_tokens": 1}, long[-63:]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 1000}, [69]),
    ):
        answer = post("completions", {"prompt": long, "return_token_ids": True, **fields})
        assert answer.json()["choices"][0]["prompt_token_ids"] == expected
        assert answer.json()["usage"]["prompt_tokens"] == len(expected)
    answer = post("chat/completions", {"messages": HI, "truncate_prompt_tokens": 4})
    assert answer.json()["usage"]["prompt_tokens"] == 4


def test_logprob_tokens_as_ids_is_also_the_operators(post, engine):
    engine.options = ServerOptions(return_tokens_as_token_ids=True)
    body = {"prompt": "a", "max_tokens": 1, "logprobs": 1}
    shown = post("completions", body).json()["choices"][0]["logprobs"]["tokens"]
    assert shown == ["token_id:72"]
    body["return_tokens_as_token_ids"] = False
    assert post("completions", body).json()["choices"][0]["logprobs"]["tokens"] == ["H"]


def test_ids_given_are_the_ids_run(post, engine):
    """PP52: also ids that no text gives, and in a stream."""
    given = [256, 256, 104, 299, 0]
    body = {"prompt": given, "return_token_ids": True, "max_tokens": 3, "logprobs": 0}
    choice = post("completions", body).json()["choices"][0]
    assert choice["prompt_token_ids"] == given == engine.seen[0][2].token_ids
    assert choice["token_ids"] == list(b"Hel")
    assert len(choice["logprobs"]["token_logprobs"]) == 3
    parts = parts_of(chunks_of(post("completions", {**body, "stream": True})), 0)
    assert parts[0]["prompt_token_ids"] == given
    assert [part["token_ids"] for part in parts] == [[72], [101], [108]]


def test_renderer_gets_the_chat_fields(post, engine):
    post("chat/completions", {"messages": HI, "documents": [{"title": "t", "text": "x"}]})
    params = engine.renderer.calls[-1]
    assert params.documents == [{"title": "t", "text": "x"}]
    assert params.chat_template is None and params.add_generation_prompt
    engine.options = ServerOptions(
        default_chat_template_kwargs={"style": "plain", "depth": 2}, chat_template="A{{ 1 }}",
        chat_template_content_format="string",
    )  # fmt: skip
    body = {"messages": HI, "chat_template_kwargs": {"depth": 3}, "reasoning_effort": "low"}
    post("chat/completions", body)
    params = engine.renderer.calls[-1]
    assert params.chat_template_kwargs == {
        "style": "plain", "depth": 3, "reasoning_effort": "low", "enable_thinking": True,
    }  # fmt: skip
    assert params.chat_template == "A{{ 1 }}" and params.chat_template_content_format == "string"


def test_clients_bring_templates_only_where_the_operator_trusts_them(post, engine):
    """S11."""
    body = {"messages": HI, "chat_template": "ab{{ 1 }}", "return_prompt_text": True}
    refused = post("chat/completions", body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "chat_template"
    engine.options = ServerOptions(trust_request_chat_template=True, chat_template="operator")
    assert post("chat/completions", body).json()["prompt_text"] == "ab1"
    del body["chat_template"]
    assert post("chat/completions", body).json()["prompt_text"] == "operator"


@pytest.mark.parametrize(
    ("message", "role", "text"),
    [
        ({"role": "assistant", "content": "Well, "}, "assistant", "Well, "),
        (
            {"role": "assistant", "content": [{"type": "text", "text": "Well, "}]},
            "assistant",
            "Well, ",
        ),
        ({"role": "critic", "content": "Well, "}, "critic", "Well, "),
    ],
)
def test_chat_echo(post, message, role, text):
    """The content of a last message that has the answer's role comes first."""
    body = {
        "messages": [*HI, message], "add_generation_prompt": False, "continue_final_message": True,
        "echo": True, "max_tokens": 2,
    }  # fmt: skip
    choice = post("chat/completions", body).json()["choices"][0]["message"]
    assert choice["role"] == role and choice["content"] == f"{text}He"
    deltas = [
        p["delta"]
        for p in parts_of(chunks_of(post("chat/completions", {**body, "stream": True})), 0)
    ]
    assert deltas[:2] == [{"role": role, "content": ""}, {"content": text}]
    assert "".join(delta["content"] for delta in deltas) == f"{text}He"


def test_chat_echo_of_another_role_is_nothing(post, engine):
    body = {"messages": HI, "echo": True, "max_tokens": 2}
    assert post("chat/completions", body).json()["choices"][0]["message"]["content"] == "He"
    engine.options = ServerOptions(response_role="user")
    message = post("chat/completions", body).json()["choices"][0]["message"]
    assert message["content"] == "hiHe" and message["role"] == "user"


def test_limits_of_messages(post):
    many = [{"role": "user", "content": "a"}] * 4097
    error = post("chat/completions", {"messages": many}).json()["error"]
    assert error["param"] == "messages" and "4096" in error["message"]
    parts = [{"type": "text", "text": "a"}] * 4097
    error = post("chat/completions", {"messages": [{"role": "user", "content": parts}]}).json()[
        "error"
    ]
    assert error["param"] == "messages" and "4097" in error["message"]
