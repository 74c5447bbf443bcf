"""The official `openai` client against a running server with a real model: sync, async, streams,
typed errors, extra fields, raw responses."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.conftest import SMALL_STEPS
from tests.e2e.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

KEY = "right-key"
PROMPT = "The capital of France is"
GREETING: Any = [{"role": "user", "content": "Say hello."}]
GREEDY: Any = {"model": "m", "temperature": 0}


@pytest.fixture(scope="module")
def keyed_server(
    smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Answers only to KEY, and tells how much of a prompt was cached."""
    server = ServerProcess(
        smollm2_gguf, tmp_path_factory.mktemp("s"), "--dtype", "float32", "--api-key", KEY,
        "--host", "127.0.0.1", "--enable-prompt-tokens-details", *SMALL_STEPS,
    )  # fmt: skip
    yield server
    server.kill()


@pytest.fixture(scope="module")
def client(keyed_server: ServerProcess) -> Iterator[openai.OpenAI]:
    # A connection for each call: the server may close an idle one at any moment.
    transport = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0), trust_env=False)
    with openai.OpenAI(
        base_url=f"{keyed_server.url}/v1", api_key=KEY, max_retries=0, http_client=transport
    ) as client:
        yield client


def text_of_chunks(chunks: Any) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices)


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == "m" and model.owned_by == "headrace" and model.object == "model"
    assert client.models.retrieve("m").id == "m"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=6)
    assert answer.object == "text_completion" and answer.model == "m"
    assert answer.id.startswith("cmpl-") and answer.system_fingerprint
    (choice,) = answer.choices
    assert choice.text.startswith(" Paris") and choice.finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 6
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6
    by_default = client.completions.create(**GREEDY, prompt="a", extra_body={"ignore_eos": True})
    assert by_default.usage is not None and by_default.usage.completion_tokens == 16


def test_completion_logprobs_and_echo(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        **GREEDY, prompt=PROMPT, max_tokens=2, logprobs=2, echo=True,
        extra_body={"prompt_logprobs": 1, "return_tokens_as_token_ids": False},
    )  # fmt: skip
    (choice,) = answer.choices
    scores = choice.logprobs
    assert scores is not None and scores.tokens is not None and scores.token_logprobs is not None
    assert choice.text.startswith(PROMPT) and "".join(scores.tokens) == choice.text
    assert scores.text_offset == [
        sum(map(len, scores.tokens[:k])) for k in range(len(scores.tokens))
    ]
    assert scores.token_logprobs[0] is None
    assert all(number <= 0 for number in scores.token_logprobs[1:])
    assert scores.top_logprobs is not None
    for token, number, top in list(
        zip(scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True)
    )[1:]:
        assert top[token] == number and len(top) in (2, 3)
    first, *rest = choice.prompt_logprobs  # type: ignore[attr-defined]
    assert first is None and len(rest) == len(scores.tokens) - 3
    for token, number, entry in zip(
        scores.tokens[1:], scores.token_logprobs[1:], rest, strict=False
    ):
        assert {"logprob": number, "decoded_token": token}.items() <= next(
            value.items() for value in entry.values() if value["decoded_token"] == token
        )
    alone = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=0, logprobs=2, echo=True)
    assert alone.choices[0].text == PROMPT and alone.usage is not None
    assert alone.usage.completion_tokens == 0
    alone_scores = alone.choices[0].logprobs
    assert alone_scores is not None
    shown = alone_scores.token_logprobs
    assert shown is not None and shown[0] is None
    assert shown[1:] == pytest.approx(scores.token_logprobs[1:-2], abs=1e-4)


def test_completion_stream_equals_the_whole(client: openai.OpenAI) -> None:
    options: Any = {**GREEDY, "prompt": [PROMPT, "Water boils at"], "max_tokens": 8, "logprobs": 1}
    whole = client.completions.create(**options)
    chunks = list(
        client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    *chunks, last = chunks
    assert last.choices == [] and last.usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks)
    for choice in whole.choices:
        parts = [c.choices[0] for c in chunks if c.choices[0].index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert parts[-1].finish_reason == choice.finish_reason
        numbers = [n for part in parts for n in part.logprobs.token_logprobs]
        assert numbers == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)
    echoed = client.completions.create(
        **GREEDY, prompt=PROMPT, max_tokens=2, echo=True, stream=True
    )
    first, *rest = echoed
    assert first.choices[0].text == PROMPT and text_of_chunks(rest).startswith(" Paris")


def test_sampling_fields(client: openai.OpenAI) -> None:
    def ask(**fields: Any) -> list[str]:
        answer = client.completions.create(
            **{"model": "m", "prompt": PROMPT, "max_tokens": 6, **fields}
        )
        return [choice.text for choice in answer.choices]

    seeded: Any = {"n": 3, "seed": 5, "temperature": 1.5}
    first = ask(**seeded)
    assert first == ask(**seeded) and len(set(first)) > 1
    assert len(ask(n=2, best_of=4, temperature=1.0)) == 2
    (paris,) = ask(temperature=0, max_tokens=1)
    assert paris == " Paris"
    (_, token) = ids_of(client, f"{PROMPT} Paris")[-2:]
    assert ask(temperature=0, max_tokens=1, logit_bias={str(token): -100}) != [" Paris"]
    assert ask(temperature=0, extra_body={"bad_words": ["Paris"]}, max_tokens=1) != [" Paris"]
    assert ask(temperature=0, extra_body={"allowed_token_ids": [token]}) == [" Paris" * 6]
    cities = [token, ids_of(client, f"{PROMPT} London")[-1]]
    (repeated,) = ask(temperature=0, frequency_penalty=2, extra_body={"allowed_token_ids": cities})
    assert 0 < repeated.count(" Paris") < 6
    assert ask(temperature=0, stop=["zzz", "."]) == [" Paris"]
    (kept,) = ask(temperature=0, stop=".", extra_body={"include_stop_str_in_output": True})
    assert kept == " Paris."


def ids_of(client: openai.OpenAI, text: str) -> list[int]:
    answer: Any = client.completions.create(
        **GREEDY, prompt=text, max_tokens=1, extra_body={"return_token_ids": True}
    )
    ids: list[int] = answer.choices[0].prompt_token_ids
    return ids


def test_tokens_in_tokens_out(client: openai.OpenAI) -> None:
    """PP52: the ids that are given are the ids that run, canonical or not."""
    letters = [ids_of(client, letter)[0] for letter in "hello"]
    assert len(ids_of(client, "hello")) < len(letters)
    extra = {"return_token_ids": True}
    whole: Any = client.completions.create(
        **GREEDY, prompt=letters, max_tokens=4, echo=False, extra_body=extra
    )
    assert whole.choices[0].prompt_token_ids == letters and whole.usage.prompt_tokens == 5
    chunks: Any = client.completions.create(
        **GREEDY, prompt=letters, max_tokens=4, stream=True, extra_body=extra
    )
    parts = [chunk.choices[0] for chunk in chunks]
    assert parts[0].prompt_token_ids == letters
    assert [token for part in parts for token in part.token_ids] == whole.choices[0].token_ids
    batch: Any = client.completions.create(
        **GREEDY, prompt=[letters, letters[:2]], max_tokens=4, extra_body=extra
    )
    assert batch.choices[0].token_ids == whole.choices[0].token_ids
    assert batch.choices[1].prompt_token_ids == letters[:2]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        **GREEDY, messages=GREETING, max_completion_tokens=8, logprobs=True, top_logprobs=2
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.message.tool_calls is None and choice.message.refusal is None
    assert choice.logprobs is not None and choice.logprobs.content is not None
    tokens = choice.logprobs.content
    assert b"".join(bytes(t.bytes or []) for t in tokens).decode() == choice.message.content
    for token in tokens:
        assert len(token.top_logprobs) == 2 and math.isfinite(token.logprob)
        assert token.top_logprobs[0].logprob == token.logprob  # greedy
    assert answer.usage is not None and answer.usage.completion_tokens == 8
    again = client.chat.completions.create(**GREEDY, messages=GREETING, max_tokens=8)
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) >= 16
    assert again.choices[0].message.content == choice.message.content


def test_chat_streams(client: openai.OpenAI) -> None:
    options: Any = {**GREEDY, "messages": GREETING, "max_tokens": 20, "stop": ["!"]}
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].finish_reason == "stop"
    content = whole.choices[0].message.content
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(chunk.usage is None for chunk in chunks)
    with client.chat.completions.stream(
        **options, stream_options={"include_usage": True}
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == content
    assert final.usage is not None and whole.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens
    stream_to_leave = client.chat.completions.create(
        **{**options, "max_tokens": 2000}, stream=True, extra_body={"ignore_eos": True}
    )
    with stream_to_leave:
        next(iter(stream_to_leave))


def test_extra_fields_and_raw_responses(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        **GREEDY, messages=GREETING, max_tokens=2, user="someone", seed=3,
        extra_headers={"X-Request-Id": "job-7"},
        extra_body={
            "return_prompt_text": True, "return_token_ids": True, "return_effective_params": True,
            "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "temprature": 1,
        },
    )  # fmt: skip
    assert raw.status_code == 200 and raw.headers["x-request-id"] == "job-7"
    assert raw.headers["x-headrace-unknown-fields"] == "temprature"
    answer: Any = raw.parse()
    assert answer._request_id == "job-7" and answer.id != "chatcmpl-job-7"
    assert "Say hello." in answer.prompt_text
    assert len(answer.prompt_token_ids) == answer.usage.prompt_tokens
    assert len(answer.choices[0].token_ids) == 2
    effective = answer.effective_params
    assert effective["top_k"] == 0  # greedy: nothing is cut
    assert effective["repetition_penalty"] == 1.1 and effective["seed"] == 3
    with client.completions.with_streaming_response.create(
        **GREEDY, prompt="a", max_tokens=1
    ) as response:
        assert response.headers["content-type"] == "application/json"
        assert response.headers["x-request-id"] == response.parse().id


BAD: list[tuple[dict[str, Any], str | None]] = [
    ({"max_tokens": 0}, "max_tokens"), ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"), ({"n": 100_000}, "n"), ({"n": 2}, "n"),
    ({"logprobs": 1_000_000}, "logprobs"), ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"logit_bias": {"49152": 1}}, "logit_bias"), ({"prompt": ""}, "prompt"),
    ({"prompt": [-1]}, "prompt"), ({"stop": ["a"] * 5}, "stop"), ({"suffix": "b"}, "suffix"),
    ({"max_tokens": "many"}, "body.max_tokens"), ({"seed": 2**70}, "seed"),
    ({"best_of": 2, "stream": True}, "best_of"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_bad_requests(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{**GREEDY, "prompt": "a", **fields})
    assert caught.value.status_code == 400 and caught.value.param == param
    assert caught.value.code == "400" and param.removeprefix("body.") in caught.value.message
    assert caught.value.type in ("BadRequestError", "Bad Request")
    assert caught.value.request_id


def test_a_prompt_that_is_too_long(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="the prompt has 8192 tokens") as caught:
        client.completions.create(**{**GREEDY, "prompt": [5] * 8192})
    assert caught.value.param == "input_tokens"


def test_typed_errors(client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError, match="nope") as missing:
            client.completions.create(model="nope", prompt="a", stream=stream)
        assert missing.value.param == "model" and missing.value.code == "404"
    for fields in (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
        {"response_format": {"type": "json_object"}},
        {"top_logprobs": 3},
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"extra_body": {"guided_regex": "a+"}},
    ):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**{**GREEDY, "messages": GREETING, **fields})
    with pytest.raises(openai.NotFoundError):
        client.moderations.create(input="a")
    with pytest.raises(openai.AuthenticationError) as refused:
        client.with_options(api_key="wrong").models.list()
    assert refused.value.status_code == 401


def run(server: ServerProcess, work: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> Any:
    async def go() -> Any:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key=KEY, max_retries=0
        ) as client:
            return await work(client)

    return asyncio.run(go())


def test_async_client(keyed_server: ServerProcess, client: openai.OpenAI) -> None:
    """Streams and whole answers side by side, each as it is alone."""
    prompts = [PROMPT, "Water boils at", "def add(a, b):", "Once upon a time"]
    alone = [
        client.completions.create(**GREEDY, prompt=prompt, max_tokens=8).choices[0].text
        for prompt in prompts
    ]

    async def streamed(chunks: AsyncIterator[Any]) -> str:
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def work(client: openai.AsyncOpenAI) -> tuple[list[str], list[str]]:
        create = client.completions.create
        wholes = [create(**GREEDY, prompt=p, max_tokens=8) for p in prompts]
        streams = [create(**GREEDY, prompt=p, max_tokens=8, stream=True) for p in prompts]
        results: Any = await asyncio.gather(*wholes, *streams)
        texts = [result.choices[0].text for result in results[: len(prompts)]]
        return texts, await asyncio.gather(*map(streamed, results[len(prompts) :]))

    assert run(keyed_server, work) == (alone, alone)


def test_async_errors(keyed_server: ServerProcess) -> None:
    async def work(client: openai.AsyncOpenAI) -> list[BaseException | Any]:
        chat = client.chat.completions.create
        return await asyncio.gather(
            chat(model="nope", messages=GREETING),
            chat(**{**GREEDY, "temperature": 5e400}, messages=GREETING),
            chat(**GREEDY, messages=GREETING, max_tokens=-1, stream=True),
            client.with_options(api_key="wrong").models.list(),
            chat(**GREEDY, messages=GREETING, max_tokens=1),
            return_exceptions=True,
        )

    missing, infinite, negative, refused, good = run(keyed_server, work)
    assert isinstance(missing, openai.NotFoundError)
    assert isinstance(infinite, (openai.BadRequestError, ValueError))  # JSON has no infinity
    assert isinstance(negative, openai.BadRequestError) and negative.param == "max_tokens"
    assert isinstance(refused, openai.AuthenticationError)
    assert good.choices[0].finish_reason == "length"
