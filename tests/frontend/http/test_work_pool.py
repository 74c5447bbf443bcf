"""PP44: big bodies are worked on beside the event loop, and never in one long piece."""

import asyncio
import threading
import time

import pytest

from headrace.frontend.http import call as call_module
from headrace.frontend.http import work_pool
from headrace.frontend.http.json_shape import find_excess
from headrace.frontend.http.limits import RequestLimits


@pytest.mark.parametrize("extra", [-1, 0])
def test_big_bodies_are_decoded_in_a_thread(call, monkeypatch, extra):
    names = []

    def decode(*args):
        names.append(threading.current_thread().name)
        return real(*args)

    real = call_module.decode_body
    monkeypatch.setattr(call_module, "decode_body", decode)
    body = '{"prompt": "a", "max_tokens": 1, "user": "%s"}'
    body %= "x" * (work_pool.INLINE_BYTES + extra + 1 - len(body % ""))
    answer = call(
        "POST", "/v1/completions", content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 200
    assert names[0].startswith("http-work") == (extra == 0)


def test_errors_of_big_bodies_are_the_same(post):
    for prompt in ("x" * 2, "x" * 10**6):
        answer = post("completions", {"prompt": prompt, "temperature": -1})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "temperature"
        answer = post("completions", {"prompt": [1, len(prompt) * 1000], "user": prompt})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt"


def test_the_loop_goes_on_while_a_hostile_body_is_examined():
    """Strings of brackets: all of it has to be looked through, and it is all right."""
    data = b'{"user":["a"' + b',"[]{}[]"' * (2**20 - 10) + b"]}"
    limits = RequestLimits()
    began = time.perf_counter()
    assert find_excess(data, limits) is None
    inline = time.perf_counter() - began

    async def longest_gap():
        work = asyncio.create_task(
            work_pool.WorkPool().run(lambda: find_excess(data, limits), 10**6)
        )
        gaps, last = [], time.perf_counter()
        while not work.done():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
        assert await work is None
        return max(gaps)

    assert min(asyncio.run(longest_gap()) for _ in range(3)) < inline / 2
