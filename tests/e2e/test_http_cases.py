"""The HTTP API on the real engine and a real model: cases of the robustness rules, one by one."""

import asyncio
import json
import math
import random
import stat
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import StartServer
from tests.e2e.server_process import ServerProcess, run_directories, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

V = 49152  # width of the model's logits
PROMPT = "The capital of France is"
GREETING = [{"role": "user", "content": "Say hello."}]


def assert_refused(answer: httpx.Response, param: str, *parts: str) -> None:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == 400
    assert (error["param"] or "").removeprefix("body.").startswith(param), error
    for part in parts:
        assert part in error["message"], error


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream, which ends with [DONE]."""
    assert answer.status_code == 200, answer.text
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


OUTSIDE = f"[0, {V - 1}]"
BAD_IDS: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"logit_bias": {str(V): 3}}, "logit_bias", [f'"{V}"', OUTSIDE]),
    ({"logit_bias": {"-1": 3}}, "logit_bias", ['"-1"', OUTSIDE]),
    ({"logit_bias": {"x": 3}}, "logit_bias", ['"x"', OUTSIDE]),
    ({"stop_token_ids": [V], "min_tokens": 2}, "stop_token_ids", [str(V), OUTSIDE]),
    ({"allowed_token_ids": []}, "allowed_token_ids", ["[]"]),
    ({"prompt": [0, V]}, "prompt", [str(V), OUTSIDE]),
    ({"prompt": [-1]}, "prompt", ["-1", OUTSIDE]),
    ({"prompt": [True]}, "prompt", ["true", OUTSIDE]),
    ({"prompt": [1.5]}, "prompt", ["1.5", OUTSIDE]),
    ({"prompt": []}, "prompt", ["empty"]),
    ({"prompt": [[]]}, "prompt", ["empty"]),
    ({"prompt": [9223372036854775808]}, "prompt", ["9223372036854775808", OUTSIDE]),
]


@pytest.mark.parametrize(("fields", "param", "parts"), BAD_IDS)
def test_a7_bad_ids(
    server: ServerProcess, fields: dict[str, Any], param: str, parts: list[str]
) -> None:
    assert_refused(server.complete(**{"prompt": "a", **fields}), param, *parts)


def test_a7_last_id(server: ServerProcess) -> None:
    body = {"prompt": [V - 1], "stop_token_ids": [V - 1], "min_tokens": 2, "max_tokens": 3}
    assert server.complete(**body).json()["usage"]["prompt_tokens"] == 1


SWEEP = [  # field, value as JSON, whether it is accepted (A8)
    *[("temperature", value, True) for value in ("0", "1e-12", "1e-6", "2")],
    *[("temperature", value, False) for value in ("-0.1", '"hot"', "1e400")],
    ("top_p", "0", False), ("top_p", "1", True), ("top_p", "1.01", False),
    ("top_k", "-1", True), ("top_k", "0", True), ("top_k", "-2", False),
    ("top_k", str(10 * V), True),
    ("n", "0", False), ("n", "1", True), ("n", "100000", False),
    ("max_tokens", "0", False), ("max_tokens", "-5", False), ("max_tokens", str(10**12), True),
    ("logprobs", "0", True), ("logprobs", "1000000", False),
    ("repetition_penalty", "0", False), ("repetition_penalty", "1e-3", True),
    ("repetition_penalty", "1e30", True), ("presence_penalty", "-2", True),
    ("frequency_penalty", "2.5", False), ("logit_bias", '{"0": 1e300}', True),
]  # fmt: skip
SWEEP_GROWTH = 200 * 2**20  # bytes; one row of 100,000 choices would be 20 GB


def test_a8_sweep(server: ServerProcess) -> None:
    before = sum(process.memory_info().rss for process in server.everyone)
    greedy = server.complete(prompt=PROMPT, max_tokens=4, stop=".", logprobs=1).json()
    for field, value, is_accepted in SWEEP:
        # 10**12 tokens end at the full stop; a temperature above 1 may never write one
        fields = {"temperature": 0.7, "max_tokens": 4, "stop": ".", "logprobs": 2, field: None}
        written = json.dumps({"prompt": PROMPT, **fields}).replace("null", value)
        headers = {"Content-Type": "application/json"}
        answer = server.client.post("/v1/completions", content=written, headers=headers)
        assert answer.status_code == (200 if is_accepted else 400), (field, value, answer.text)
        if not is_accepted:
            assert field in answer.text or "not valid JSON" in answer.text
            continue
        choice = answer.json()["choices"][0]
        scores = choice["logprobs"]
        rivals = [number for top in scores["top_logprobs"] for number in top.values()]
        for number in scores["token_logprobs"] + rivals:
            assert isinstance(number, float) and math.isfinite(number)
        if field == "temperature" and float(value) < 1e-5:
            assert choice["text"] == greedy["choices"][0]["text"]
    after = sum(process.memory_info().rss for process in server.everyone)
    assert after - before < SWEEP_GROWTH


def test_a13_and_strict(start_server: StartServer, smollm2_gguf: Path) -> None:
    """A13: what may not be sampled is at the floor, in JSON that is strictly valid. A15: strict."""
    server = start_server(
        smollm2_gguf, "--logprobs-mode", "processed_logprobs", "--strict", "--dtype", "float32"
    )

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in the JSON")

    allowed = [100, 200]
    body = {
        "messages": GREETING, "max_tokens": 3, "allowed_token_ids": allowed, "logprobs": True,
        "top_logprobs": 5, "temperature": 1, "return_tokens_as_token_ids": True,
        "return_effective_params": True,
    }  # fmt: skip
    answer = server.chat(**body)
    assert answer.status_code == 200
    decoded = json.loads(answer.text, parse_constant=refuse)
    assert decoded["effective_params"]["logprobs_mode"] == "processed_logprobs"
    for entry in decoded["choices"][0]["logprobs"]["content"]:
        scores = {top["token"]: top["logprob"] for top in entry["top_logprobs"]}
        shares = [math.exp(scores.pop(f"token_id:{token}")) for token in allowed]
        assert math.isclose(sum(shares), 1, rel_tol=1e-4)
        assert set(scores.values()) <= {-9999.0}
    refused = server.complete(prompt="a", temprature=0.3, seed=4)
    assert_refused(refused, "temprature", "did you mean temperature")


def test_a15_unknown_and_unsupported_fields(server: ServerProcess) -> None:
    before, length = server.metrics()["unknown_request_fields_total"], len(server.log.read_text())
    answer = server.chat(messages=GREETING, max_tokens=1, temprature=0.3, seed=4)
    assert answer.status_code == 200
    assert answer.headers["X-Headrace-Unknown-Fields"] == "temprature"
    assert server.metrics()["unknown_request_fields_total"] == before + 1
    assert_refused(server.chat(messages=GREETING, guided_regex="a"), "guided_regex")
    tool = {"type": "function", "function": {"name": "f"}}
    assert_refused(server.chat(messages=GREETING, tools=[tool]), "tools")
    written = server.log.read_text()[length:].splitlines()
    assert [line for line in written if "output tokens/s" not in line] == []  # the periodic line


def test_a9_prompt_that_never_fits(start_server: StartServer, smollm2_gguf: Path) -> None:
    """A pool of 8 blocks of 16 (and the null block): a prompt of 9 blocks fails at once, alone."""
    server = start_server(smollm2_gguf, "--num-gpu-blocks-override", "9")
    assert server.metrics()["num_free_blocks"] == 8
    with ThreadPoolExecutor(11) as pool:
        long = pool.submit(server.complete, prompt=[100] * 9 * 16)
        short = [
            pool.submit(server.complete, prompt=[200 + k] * 20, max_tokens=8, ignore_eos=True)
            for k in range(10)
        ]
        assert_refused(long.result(), "input_tokens", "145", "128", "8192")
        for answer in short:
            assert answer.result().json()["usage"]["completion_tokens"] == 8
    wait_until(lambda: server.metrics()["num_requests_waiting"] == 0, 2, "an empty queue")
    assert server.metrics()["num_free_blocks"] == 8


def test_a10_window_keys_and_readiness(start_server: StartServer, smollm2_gguf: Path) -> None:
    """Live at once, then nothing but 503 until ready; a key for every door; a window of 64."""
    key = {"Authorization": "Bearer right-key"}
    server = start_server(
        smollm2_gguf, "--max-model-len", "64", "--api-key", "other-key", "right-key",
        "--host", "127.0.0.1", wait_ready=False,
    )  # fmt: skip
    check_order_of_readiness(server, key)
    for wrong in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "right-key"}):
        for path in ("/v1/models", "/v1/models/m", "/v1/completions", "/nowhere"):
            assert server.get(path, headers=wrong).status_code == 401
    for path in ("/health", "/health/live", "/health/ready", "/health/progress", "/metrics"):
        assert server.get(path).status_code == 200
    card = server.get("/v1/models/m", headers=key).json()
    assert card["id"] == "m" and card["max_model_len"] == 64
    assert server.get("/v1/models", headers=key).json()["data"][0]["id"] == "m"
    assert server.get("/v1/models/other", headers=key).status_code == 404

    def complete(length: int, **fields: Any) -> httpx.Response:
        return server.complete(headers=key, prompt=[100] * length, ignore_eos=True, **fields)

    for limit in ({}, {"max_tokens": 1}, {"max_tokens": 2}):
        assert_refused(complete(64, **limit), "input_tokens", "64")
        assert_refused(complete(65, **limit), "input_tokens", "65", "64")
        answer = complete(63, **limit).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["prompt_tokens"] == 63 and answer["usage"]["completion_tokens"] == 1


def check_order_of_readiness(server: ServerProcess, key: dict[str, str]) -> None:
    def is_live() -> bool:
        with suppress(httpx.TransportError):
            return server.get("/health/live").status_code == 200
        return False

    wait_until(is_live, 10, "the server is live")
    seen_loading = 0
    while server.get("/health/ready").status_code != 200:
        assert server.get("/health/live").status_code == 200
        for path in ("/health", "/health/progress", "/metrics", "/v1/models", "/nowhere"):
            answer = server.get(path, headers=key)
            if answer.status_code == 503:
                seen_loading += 1
                assert int(answer.headers["Retry-After"]) >= 1
                assert answer.json()["error"]["type"] == "ServiceUnavailableError"
            else:
                assert server.get("/health/ready").status_code == 200, path
    assert seen_loading >= 5
    server.wait_ready()


class Abandoned:
    """Requests over plain sockets, each dropped at a chosen moment (A11)."""

    NUM_REQUESTS = 40

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._rng = random.Random(11)
        self._step = server.steps()

    async def run(self) -> None:
        ways = (self._after_three_tokens, self._in_second_chunk, self._queued, self._queued)
        watch = asyncio.create_task(self._watch_steps())
        await asyncio.gather(
            *(self._one(ways[k % 4], streams=k % 8 < 4) for k in range(self.NUM_REQUESTS))
        )
        watch.cancel()

    async def _watch_steps(self) -> None:
        while True:
            self._step = await asyncio.to_thread(self._server.steps)
            await asyncio.sleep(0.01)

    async def _one(
        self, leave: Callable[[asyncio.StreamReader, bool], Awaitable[None]], streams: bool
    ) -> None:
        body = {
            "prompt": [self._rng.randint(1000, 40000) for _ in range(100)], "max_tokens": 4000,
            "ignore_eos": True, "stream": streams,
        }  # fmt: skip
        data = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        writer.write(head.encode() + data)
        await writer.drain()
        await leave(reader, streams)
        writer.close()

    async def _queued(self, reader: asyncio.StreamReader, streams: bool) -> None:
        await asyncio.sleep(0.2)  # far less than the steps of those that came before

    async def _in_second_chunk(self, reader: asyncio.StreamReader, streams: bool) -> None:
        await self._steps(2)

    async def _after_three_tokens(self, reader: asyncio.StreamReader, streams: bool) -> None:
        if not streams:
            return await self._steps(6)
        for _ in range(3):
            await reader.readuntil(b"data: ")

    async def _steps(self, count: int) -> None:
        first = self._step
        while self._step < first + count:
            await asyncio.sleep(0.01)


def test_a11_disconnects_free_everything(server: ServerProcess) -> None:
    base, before = server.gauges(), server.metrics()
    alone = text_of(server.complete(prompt=PROMPT, max_tokens=4))
    asyncio.run(Abandoned(server).run())
    wait_until(lambda: server.gauges() == base, 2, f"the base line {base}")
    aborted = server.metrics()["request_success_total:abort"]
    assert aborted - before["request_success_total:abort"] == Abandoned.NUM_REQUESTS
    assert text_of(server.complete(prompt=PROMPT, max_tokens=4)) == alone


def test_a12_one_request_id_for_all(server: ServerProcess) -> None:
    rng = random.Random(12)
    prompts = [[rng.randint(1000, 40000) for _ in range(6)] for _ in range(50)]
    alone = [text_of(server.complete(prompt=prompt, max_tokens=2)) for prompt in prompts]
    assert len(set(alone)) > 25

    def ask(prompt: list[int]) -> httpx.Response:
        return server.complete({"X-Request-Id": "job-7"}, prompt=prompt, max_tokens=2)

    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(ask, prompts))
    assert [text_of(answer) for answer in answers] == alone
    assert {answer.headers["X-Request-Id"] for answer in answers} == {"job-7"}
    assert len({answer.json()["id"] for answer in answers}) == 50


def test_a3_usage_in_streams(server: ServerProcess) -> None:
    body = {"messages": GREETING, "n": 2, "max_tokens": 5, "ignore_eos": True, "temperature": 0.7}
    whole = server.chat(**body).json()["usage"]
    assert whole["completion_tokens"] == 10
    events = events_of(server.chat(**body, stream=True, stream_options={"include_usage": True}))
    assert events[-1]["choices"] == []
    assert all(event["usage"] is None and event["choices"] for event in events[:-1])
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert events[-1]["usage"][name] == whole[name]


def test_text_equals_the_library(server: ServerProcess, smollm2_gguf: Path) -> None:
    """Greedy text over HTTP, streamed or not, is that of `LLM.generate` in the same dtype."""
    from headrace import LLM, SamplingParams

    prompts = [PROMPT, "Water boils at", "def add(a, b):"]
    llm = LLM(
        str(smollm2_gguf), dtype="float32", kv_cache_memory_bytes=64 << 20,
        max_num_batched_tokens=64, max_num_seqs=8,
    )  # fmt: skip
    try:
        params = SamplingParams(temperature=0, max_tokens=10)
        expected = [
            output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)
        ]
        chat = llm.chat(GREETING, params, use_tqdm=False)[0].outputs[0].text
    finally:
        llm.close()
    for prompt, text in zip(prompts, expected, strict=True):
        assert text_of(server.complete(prompt=prompt, max_tokens=10)) == text
    events = events_of(server.complete(prompt=PROMPT, max_tokens=10, stream=True))
    assert "".join(event["choices"][0]["text"] for event in events) == expected[0]
    answer = server.chat(messages=GREETING, max_tokens=10).json()
    assert answer["choices"][0]["message"]["content"] == chat


def test_request_ids(server: ServerProcess) -> None:
    for label, is_echoed in (("mine 1", True), ("x" * 257, False), ("", False)):
        answer = server.complete({"X-Request-Id": label}, prompt="a", max_tokens=1)
        assert answer.headers["X-Request-Id"] == (label if is_echoed else answer.json()["id"])
    refused = server.complete({"X-Request-Id": "job-8"}, prompt=[])
    assert refused.status_code == 400 and refused.headers["X-Request-Id"] == "job-8"


def test_base_model_without_template(start_server: StartServer, gemma3_gguf: Path) -> None:
    """Gemma 3 270M: chat is a 400 that says why; a doubled start token gets a warning (PP29)."""
    server = start_server(gemma3_gguf)
    assert_refused(server.chat(messages=GREETING), "messages", "no chat template")
    plain = server.complete(prompt=PROMPT, max_tokens=3)
    assert "X-Headrace-Warning" not in plain.headers
    doubled = server.complete(prompt=f"<bos>{PROMPT}", max_tokens=3)
    assert "twice" in doubled.headers["X-Headrace-Warning"]
    assert doubled.json()["usage"]["prompt_tokens"] == plain.json()["usage"]["prompt_tokens"] + 1
    given = server.complete(prompt=f"<bos>{PROMPT}", max_tokens=3, add_special_tokens=False)
    assert "X-Headrace-Warning" not in given.headers and text_of(given) == text_of(plain)


def test_s2_nothing_else_listens(server: ServerProcess) -> None:
    (run_directory,) = run_directories(server.temp)
    assert stat.S_IMODE(run_directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(run_directory.parent.stat().st_mode) == 0o700
    listening, bound, paths = set(), set(), set()
    for process in server.everyone:
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                listening.add(tuple(connection.laddr))
            elif connection.status == psutil.CONN_NONE:
                bound.add(tuple(connection.laddr))  # UDP
        paths |= {c.laddr for c in process.net_connections("unix") if c.laddr}
    assert listening == {("127.0.0.1", server.port)} and not bound
    assert paths and all(Path(path).parent == run_directory for path in paths)
