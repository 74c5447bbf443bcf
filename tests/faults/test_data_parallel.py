"""Two replicas under one front end: the same texts as from one, also when a replica is killed."""

import asyncio
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from headrace import (
    LLM,
    AsyncEngineArgs,
    AsyncLLMEngine,
    EngineArgs,
    LLMEngine,
    SamplingParams,
)
from headrace.configs.errors import ConfigurationError
from tests.e2e.server_process import ServerProcess, run_directories, wait_until
from tests.e2e.tiny_model import ENGINE_ARGUMENTS, save_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

TWO = {"data_parallel_size": 2, "max_restarts": 1000, "allow_replay_after_rpc": True}
SMALL = ("--dtype", "float32", "--num-gpu-blocks-override", "64", "--max-num-batched-tokens", "128",
         "--max-num-seqs", "8")  # fmt: skip
PROMPTS = [[256, 10 + i, 20 + i, 30] for i in range(16)]


def params(i: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=80, ignore_eos=True, seed=i, temperature=i % 2, logprobs=i % 3, n=1 + 2 * (i % 2)
    )


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def make_engine(path: Path, **fields: Any) -> LLMEngine:
    return LLMEngine.from_engine_args(EngineArgs(str(path), **{**ENGINE_ARGUMENTS, **fields}))


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[LLMEngine]:
    engine = make_engine(tiny_model, **TWO)
    yield engine
    engine.close()


def pids(engine: LLMEngine) -> dict[int, int]:
    """Of the engine cores of now, by rank."""
    replicas = engine._client._session.replicas  # type: ignore[union-attr]
    return {rank: view.ready.pid for rank, view in replicas.items() if view.ready is not None}


def run(engine: LLMEngine, kill_after: int | None = None) -> tuple[dict[str, Any], set[int]]:
    """What each request gave, and the ranks that ran some; rank 0 is killed after some outputs."""
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params(i))
    ledger = engine._client._session.ledger  # type: ignore[union-attr]
    ranks = {entry.rank for entry in ledger.entries()}
    done, num_outputs = {}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            num_outputs += 1
            if num_outputs == kill_after:
                psutil.Process(pids(engine)[0]).kill()
            if output.finished:
                done[output.request_id] = [
                    (c.token_ids, c.text, c.logprobs, c.finish_reason) for c in output.outputs
                ]
    return done, ranks


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path) -> dict[str, Any]:
    engine = make_engine(tiny_model)
    try:
        return run(engine)[0]
    finally:
        engine.close()


def test_texts_are_those_of_one_replica(engine: LLMEngine, undisturbed: dict[str, Any]) -> None:
    done, ranks = run(engine)
    assert done == undisturbed and ranks == {0, 1}


@pytest.mark.parametrize("kill_after", [1, 200])
def test_the_other_one_takes_over(
    engine: LLMEngine, undisturbed: dict[str, Any], kill_after: int
) -> None:
    before, first = engine.front_end.stats.num_replayed_requests, pids(engine)
    done, ranks = run(engine, kill_after)
    assert done == undisturbed and ranks == {0, 1}
    assert engine.front_end.stats.num_replayed_requests > before
    wait_until(lambda: engine._client.call("reset_prefix_cache"), 30, "both are there")
    after = pids(engine)
    assert after[0] != first[0] and after[1] == first[1]
    assert engine.front_end.stats.num_requests == 0


def test_calls_reach_all_and_cores_are_divided(engine: LLMEngine) -> None:
    def ranks(worker: Any) -> int:
        return int(worker.config.parallel_config.data_parallel_rank)

    def cpus(worker: Any) -> list[int]:
        return sorted(os.sched_getaffinity(0))

    assert engine.collective_rpc(ranks) == [0, 1]
    assert engine.reset_prefix_cache() is True
    first, second = engine.collective_rpc(cpus)
    if len(os.sched_getaffinity(0)) > 1 and first != second:
        assert not set(first) & set(second)


def test_offline(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(tiny_model), data_parallel_size=2, **ENGINE_ARGUMENTS)
    try:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params(0))
        assert [output.prompt_token_ids for output in outputs] == PROMPTS
        steps = {
            metric.labels["engine"]: metric.value
            for metric in llm.get_metrics()
            if metric.name == "headrace:engine_steps"
        }
        assert set(steps) == {"0", "1"} and min(steps.values()) > 0
    finally:
        llm.close()
    monkeypatch.setenv("HEADRACE_MULTIPROCESSING", "0")
    with pytest.raises(ConfigurationError, match="data_parallel_size 2 needs processes"):
        LLM(str(tiny_model), data_parallel_size=2, **ENGINE_ARGUMENTS)


def test_an_external_replica_has_its_rank(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, data_parallel_size=4, data_parallel_rank=3)
    try:
        done, ranks = run(engine)
        assert len(done) == len(PROMPTS) and ranks == {3}
        assert list(pids(engine)) == [3]
    finally:
        engine.close()


def test_a_caller_pins_a_rank(tiny_model: Path) -> None:
    arguments = {**ENGINE_ARGUMENTS, **TWO}
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(str(tiny_model), **arguments))

    async def go() -> None:
        for rank in (0, 1, 1):
            outputs = engine.generate(
                {"prompt_token_ids": [256, 1]}, params(0), f"r{rank}", data_parallel_rank=rank
            )
            assert [output async for output in outputs][-1].finished
        with pytest.raises(ValueError, match=r"out of range \[0, 2\)"):
            await engine.add_request("r", "a", params(0), data_parallel_rank=2)
        await engine.reset_prefix_cache()

    try:
        asyncio.run(go())
        client = engine.engine._client
        assert client is not None
        decisions = client._session.router.decisions
        assert {rank: dict(counts) for rank, counts in decisions.items()} == {
            0: {"pinned": 1},
            1: {"pinned": 2},
        }
    finally:
        engine.close()


def by_rank(server: ServerProcess, name: str) -> dict[str, float]:
    """Values of a metric, by the label `engine`, summed over its other labels."""
    found: dict[str, float] = {}
    pattern = re.compile(rf'headrace:{name}{{.*engine="(\d+)".*}} (\S+)')
    for line in server.get("/metrics").text.splitlines():
        if match := pattern.match(line):
            found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


def test_a_server(tiny_model: Path, tmp_path: Path) -> None:
    """Pinned requests; a replica killed under load: ready all the time, no answer but the right."""
    server = ServerProcess(tiny_model, tmp_path, *SMALL, "--data-parallel-size", "2")
    try:
        for rank in (0, 1):
            for _ in range(3):
                answer = server.complete({"X-data-parallel-rank": str(rank)}, prompt=[1, 2])
                assert answer.status_code == 200
        answer = server.complete({"X-data-parallel-rank": "2"}, prompt=[1, 2])
        assert answer.status_code == 400 and "[0, 2)" in answer.text
        assert by_rank(server, "routed_requests_total") == {"0": 3, "1": 3}
        bodies = [
            {"prompt": [1, 2, 3 + i], "max_tokens": 60, "ignore_eos": True, "stream": i % 2 == 1}
            for i in range(24)
        ]
        undisturbed = [content(server.complete(**body)) for body in bodies]
        cores = [c for c in server.children if "headrace.engine_core" in c.cmdline()]
        assert len(cores) == 2
        with ThreadPoolExecutor(12) as pool:
            before = server.steps()
            answers = [pool.submit(server.complete, **body) for body in bodies]
            wait_until(lambda: server.steps() > before + 5, 30, "some steps")
            cores[0].kill()
            assert server.get("/health/ready").status_code == 200
            assert [content(answer.result(60)) for answer in answers] == undisturbed
        wait_until(lambda: sum(by_rank(server, "engine_restarts_total").values()) == 1, 30, "back")
        assert server.get("/health/ready").status_code == 200
        assert set(by_rank(server, "num_free_blocks")) == {"0", "1"}
    finally:
        server.kill()


def test_several_api_servers_of_two_replicas(tiny_model: Path, tmp_path: Path) -> None:
    options = ("--data-parallel-size", "2", "--api-server-count", "2")
    server = ServerProcess(tiny_model, tmp_path, *SMALL, *options)
    try:
        bodies = [{"prompt": [1, 2, 3 + i], "max_tokens": 30} for i in range(12)]
        undisturbed = [content(server.complete(**body)) for body in bodies]
        cores = [c for c in server.children if "headrace.engine_core" in c.cmdline()]
        with ThreadPoolExecutor(12) as pool:
            answers = [pool.submit(server.complete, **body) for body in bodies]
            cores[1].kill()
            assert [content(answer.result(60)) for answer in answers] == undisturbed
        server.process.terminate()
        assert server.process.wait(15) == 0
        wait_until(lambda: not run_directories(tmp_path), 5, "the run directory is gone")
    finally:
        server.kill()


def content(answer: httpx.Response) -> str:
    """The text of an answer, streamed or whole."""
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return str(answer.json()["choices"][0]["text"])
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    assert not any("error" in event for event in events)
    return "".join(part["text"] for event in events for part in event["choices"])
