"""`/tokenize` and `/detokenize`."""

import threading
import time

import pytest

from headrace.frontend.http.listener import ServerOptions
from headrace.frontend.tokenizers import load_tokenizer


@pytest.fixture
def tokenize(call):
    return lambda **body: call("POST", "/tokenize", json=body)


@pytest.fixture
def detokenize(call):
    return lambda **body: call("POST", "/detokenize", json=body)


def test_a_prompt(tokenize):
    answer = tokenize(prompt="Hi<eos>")
    assert answer.status_code == 200
    assert answer.json() == {
        "count": 4, "max_model_len": 64, "tokens": [256, 72, 105, 257], "token_strs": None,
    }  # fmt: skip
    plain = tokenize(model="alias", prompt="Hi", add_special_tokens=False, return_token_strs=True)
    assert plain.json()["tokens"] == [72, 105] and plain.json()["token_strs"] == ["H", "i"]
    empty = tokenize(prompt="").json()
    assert empty["count"] == 0 and empty["tokens"] == []


def test_there_is_no_length_limit(tokenize):
    answer = tokenize(prompt="a" * 1000)
    assert answer.status_code == 200 and answer.json()["count"] == 1001


def test_a_chat(tokenize, engine):
    messages = [{"role": "user", "content": "Hi"}]
    text = "<|user|>Hi<eos><|assistant|>"
    answer = tokenize(messages=messages)
    assert answer.json()["tokens"] == engine.tokenizer.encode(text, False)
    text = "<|user|>Hi<eos>"
    answer = tokenize(messages=messages, add_generation_prompt=False)
    assert answer.json()["tokens"] == engine.tokenizer.encode(text, False)


def test_templates_come_from_the_operator(tokenize, engine):
    """S11."""
    messages, template = [{"role": "user", "content": "Hi"}], "{{ messages[0].content }}!"
    refused = tokenize(messages=messages, chat_template=template)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "chat_template"
    engine.options = ServerOptions(trust_request_chat_template=True)
    assert tokenize(messages=messages, chat_template=template).json()["tokens"] == [72, 105, 33]
    engine.options = ServerOptions(chat_template=template)
    assert tokenize(messages=messages).json()["tokens"] == [72, 105, 33]


@pytest.mark.parametrize(
    "body",
    [
        {}, {"prompt": 1}, {"prompt": [1, 2]}, {"prompt": ["a"]}, {"messages": []},
        {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, {"messages": "a"},
        {"messages": [1]}, {"prompt": "a", "add_special_tokens": "x"},
        {"prompt": "a", "messages": []},
        {"messages": [{"role": "user", "content": "a"}], "tools": [{}]},
    ],
)  # fmt: skip
def test_bad_tokenize_requests(tokenize, body):
    answer = tokenize(**body)
    assert answer.status_code == 400 and answer.json()["error"]["message"], answer.text


def test_unknown_model(tokenize, detokenize):
    assert tokenize(model="nope", prompt="a").status_code == 404
    assert detokenize(model="nope", tokens=[1]).status_code == 404


def test_detokenize(detokenize):
    assert detokenize(tokens=[72, 105]).json() == {"prompt": "Hi"}
    assert detokenize(tokens=[256, 72, 257]).json() == {"prompt": "<s>H<eos>"}
    assert detokenize(tokens=[]).json() == {"prompt": ""}
    unknown = [258, 299, 300, 2**32, 2**63 - 1]
    assert detokenize(tokens=unknown).json() == {"prompt": ""}
    assert detokenize(tokens=[72, *unknown, 105]).json() == {"prompt": "Hi"}


@pytest.mark.parametrize(
    "tokens", [None, "a", 1, {}, [-1], [2**63], [1.5], [True], [None], ["1"], [[1]]]
)
def test_bad_detokenize_requests(detokenize, tokens):
    answer = detokenize(tokens=tokens)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tokens", answer.text


def test_unknown_ids_are_not_remembered(detokenize, engine):
    """The table of token bytes does not grow by what clients make up."""
    seen = []
    real = engine.tokenizer.token_bytes
    engine.tokenizer.token_bytes = lambda token: seen.append(token) or real(token)
    detokenize(tokens=[72, 10**6, 10**12])
    assert seen == [72]


@pytest.mark.slow
def test_a_long_text_holds_no_other_thread_up(smollm2_gguf):
    """A16: the event loop goes on while the pool tokenizes."""
    tokenizer = load_tokenizer(smollm2_gguf, None)
    finished = threading.Event()
    gaps = []

    def tick():
        last = time.perf_counter()
        while not finished.wait(0.002):
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.perf_counter()
    assert len(tokenizer.encode("ab " * 300_000)) > 300_000
    seconds = time.perf_counter() - began
    finished.set()
    thread.join()
    assert max(gaps, default=seconds) < seconds / 2
