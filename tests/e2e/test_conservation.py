"""PP17 and PP50: whenever clients leave, everything comes back, and every request counts once."""

import json
import random
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from tests.e2e.server_process import ServerProcess, wait_until
from tests.e2e.tiny_model import save_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

REASONS = ("stop", "length", "abort", "error")
NUM_ABANDONED = 240
LONG = {"prompt": "a" * 60, "max_tokens": 60, "ignore_eos": True}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A tiny random model: two sequences at once, 16 tokens in a step, a line per request."""
    model = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    server = ServerProcess(
        model, tmp_path_factory.mktemp("s"), "--dtype", "float32", "--max-num-seqs", "2",
        "--max-num-batched-tokens", "16", "--num-gpu-blocks-override", "40",
        "--enable-log-requests",
    )  # fmt: skip
    yield server
    server.kill()


def num_ended(metrics: dict[str, float]) -> float:
    return sum(metrics[f"request_success_total:{reason}"] for reason in REASONS)


def submitted(server: ServerProcess) -> int:
    """Requests that the engine was given, by its log."""
    return len(re.findall(r"added request \S+", server.log.read_text()))


def send(server: ServerProcess, **fields: Any) -> socket.socket:
    """A connection on which a request was sent."""
    data = json.dumps({"model": "m", **fields}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    client = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    client.sendall(head.encode() + data)
    return client


def leave_after(server: ServerProcess, seconds: float, streams: bool) -> None:
    with closing(send(server, **LONG, stream=streams)):
        time.sleep(seconds)


def leave_at_the_last_token(server: ServerProcess) -> None:
    """The engine has ended the request, the response is still being written."""
    with closing(send(server, **LONG, stream=True)) as client, client.makefile("rb") as lines:
        for line in lines:
            if b'"finish_reason":"length"' in line:
                return


def test_leaving_at_any_moment_gives_everything_back(tiny: ServerProcess) -> None:
    """Queued, in each chunk of the prefill, while decoding, in the last step; stream or not."""
    alone = tiny.complete(**LONG).json()["choices"][0]["text"]
    base, before, num_before = tiny.gauges(), tiny.metrics(), submitted(tiny)
    began = time.monotonic()
    tiny.complete(**LONG)
    whole = time.monotonic() - began
    rng = random.Random(17)

    def abandon(k: int) -> None:
        if k % 8 == 0:
            leave_at_the_last_token(tiny)
        else:
            leave_after(tiny, rng.uniform(0, 2 * whole), streams=k % 2 == 0)

    with ThreadPoolExecutor(6) as pool:  # more than run at once, so some of them wait
        list(pool.map(abandon, range(NUM_ABANDONED)))
    wait_until(lambda: tiny.gauges() == base, 5, f"the base line {base}")
    after = tiny.metrics()
    ended = num_ended(after) - num_ended(before)
    assert ended == submitted(tiny) - num_before
    assert NUM_ABANDONED / 2 < ended <= NUM_ABANDONED + 1
    aborted = after["request_success_total:abort"] - before["request_success_total:abort"]
    assert aborted > NUM_ABANDONED / 4
    assert after["request_success_total:error"] == before["request_success_total:error"]
    assert tiny.complete(**LONG).json()["choices"][0]["text"] == alone


def test_token_sums_are_the_sums_of_usage(tiny: ServerProcess) -> None:
    """Over streams and whole answers, several prompts and choices, stop strings and refusals."""
    before = tiny.metrics()
    rng = random.Random(50)
    usages, num_choices, num_requests = [], 0, 0

    def ask(k: int) -> dict[str, int]:
        body: dict[str, Any] = {
            "prompt": ["ab" * rng.randint(1, 20) for _ in range(k % 3 + 1)],
            "n": k % 2 + 1, "max_tokens": rng.randint(1, 30), "temperature": 1, "seed": k,
        }  # fmt: skip
        if k % 4 == 0:
            body["stop"] = ["a", "e"]
        if k % 5 == 0:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            answer = tiny.complete(**body)
            lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
            return dict(json.loads(lines[-1].removeprefix("data: "))["usage"])
        return dict(tiny.complete(**body).json()["usage"])

    with ThreadPoolExecutor(4) as pool:
        usages = list(pool.map(ask, range(40)))
        refused = list(pool.map(lambda _: tiny.complete(prompt="a" * 500), range(3)))
    assert {answer.status_code for answer in refused} == {400}
    num_requests = sum(k % 3 + 1 for k in range(40))
    num_choices = sum((k % 3 + 1) * (k % 2 + 1) for k in range(40))

    def grown(name: str) -> float:
        return tiny.metrics()[name] - before[name]

    wait_until(lambda: num_ended(tiny.metrics()) - num_ended(before) >= num_choices, 5, "the end")
    assert num_ended(tiny.metrics()) - num_ended(before) == num_choices
    assert grown("request_success_total:abort") == grown("request_success_total:error") == 0
    assert grown("prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    generated = sum(usage["completion_tokens"] for usage in usages)
    assert grown("generation_tokens_total") == generated
    assert grown("request_prompt_tokens_sum") == grown("prompt_tokens_total")
    assert grown("request_generation_tokens_sum") == generated
    assert grown("request_params_n_count") == num_requests
    assert grown("time_to_first_token_seconds_count") == num_requests


def test_what_was_submitted_is_somewhere(server: ServerProcess) -> None:
    """While 12 requests run and wait, and after they were dropped."""
    base, before = server.gauges(), server.metrics()

    def is_all_there(ended: int) -> bool:
        metrics = server.metrics()
        queued = metrics["num_requests_running"] + metrics["num_requests_waiting"]
        return num_ended(metrics) - num_ended(before) == ended and queued == 12 - ended

    clients = [
        send(server, prompt=f"{k}", max_tokens=500, ignore_eos=True, stream=k % 2 == 0)
        for k in range(12)
    ]
    wait_until(lambda: is_all_there(0), 10, "12 requests that run or wait")
    for client in clients[:4]:
        client.close()
    wait_until(lambda: is_all_there(4), 10, "4 aborted, 8 that run")
    for client in clients[4:]:
        client.close()
    wait_until(lambda: is_all_there(12), 10, "12 aborted")
    wait_until(lambda: server.gauges() == base, 2, f"the base line {base}")


def test_log_lines_have_no_text(tiny: ServerProcess) -> None:
    """S24: a request's line has ids and numbers, nothing of its text."""
    tiny.complete({"X-Request-Id": "job-7"}, prompt="my secret", max_tokens=1, stop="whisper")
    log = tiny.log.read_text()
    assert "job-7" in log and "secret" not in log and "whisper" not in log
