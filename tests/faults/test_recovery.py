"""Engine cores that die under a library: every request ends as if nothing had happened."""

import asyncio
import os
import random
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace import AsyncEngineArgs, AsyncLLMEngine, EngineArgs, LLMEngine, SamplingParams
from headrace.configs.errors import (
    EngineChangedError,
    EngineCrashError,
    EngineDeadError,
    HeadraceError,
)
from headrace.frontend.outputs import RequestOutput
from headrace.sampling_params import RequestOutputKind
from headrace.workers.worker import Worker
from tests.e2e.server_process import wait_until
from tests.e2e.tiny_model import ENGINE_ARGUMENTS, save_tiny_model
from tests.faults.faulty_workers import (
    MARKER,
    POISON,
    STUCK,
    PoisonedWorker,
    SlowWorker,
    StartsOnce,
    name_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

NUM_KILLS = int(os.environ.get("RECOVERY_TEST_KILLS", "4"))  # at random moments
MANY = {"max_restarts": 1000}


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 60, "ignore_eos": True, "seed": 5, **fields})


# The kinds of state that a request can have: prompt, parameters.
KINDS: dict[str, tuple[list[int], SamplingParams]] = {
    "greedy": ([256, 10, 20, 30], params(temperature=0)),
    "random": ([256, 11, 21], params(logprobs=2)),
    "choices": ([256, 12, 22], params(n=3, logprobs=1)),
    "scores": ([256, *range(120, 190)], params(prompt_logprobs=1, max_tokens=40)),
    "stops": ([256, 13, 23], params(stop=["\n", "zq"], temperature=1.3)),
    "penalties": ([256, 14, 24], params(repetition_penalty=1.4, presence_penalty=0.5, min_p=0.01)),
    "best": ([256, 15, 25], params(n=1, best_of=3, max_tokens=30)),
}


@pytest.fixture(scope="module", autouse=True)
def importable_workers() -> Iterator[None]:
    """Engine cores get this process's `sys.path`."""
    folder = str(Path(__file__).parent)
    sys.path.append(folder)
    yield
    sys.path.remove(folder)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def arguments(worker: type[Worker] = SlowWorker, **fields: Any) -> dict[str, Any]:
    return {**ENGINE_ARGUMENTS, "worker_cls": name_of(worker), **fields}


def make_engine(path: Path, worker: type[Worker] = SlowWorker, **fields: Any) -> LLMEngine:
    return LLMEngine.from_engine_args(EngineArgs(str(path), **arguments(worker, **fields)))


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[LLMEngine]:
    engine = make_engine(tiny_model, **MANY)
    yield engine
    engine.close()


def core_of(engine: LLMEngine) -> psutil.Process:
    return psutil.Process(engine._client.ready.pid)


def facts(output: RequestOutput) -> list[Any]:
    """Everything that a caller sees of a request."""
    choices = [
        (c.token_ids, c.text, c.logprobs, c.cumulative_logprob, c.finish_reason, c.stop_reason)
        for c in output.outputs
    ]
    return [choices, output.prompt_logprobs]


class Run:
    """All kinds of requests in an engine, step by step."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.done: dict[str, list[Any]] = {}
        self.errors: list[Exception] = []
        self.num_tokens = 0
        for name, (prompt, sampling) in KINDS.items():
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

    def step(self) -> None:
        try:
            for output in self.engine.step():
                self.num_tokens += 1
                if output.finished:
                    self.done[output.request_id] = facts(output)
        except HeadraceError as error:
            self.errors.append(error)

    def go_on(self, num_outputs: int) -> None:
        """Until so many more outputs have come, or the end."""
        goal = self.num_tokens + num_outputs
        while self.engine.has_unfinished_requests() and self.num_tokens < goal:
            self.step()

    def finish(self) -> dict[str, list[Any]]:
        while self.engine.has_unfinished_requests():
            self.step()
        return self.done


@pytest.fixture(scope="module")
def undisturbed(engine: LLMEngine) -> dict[str, list[Any]]:
    return Run(engine).finish()


def assert_idle(engine: LLMEngine) -> None:
    assert not engine.has_unfinished_requests() and not len(engine._client._session.ledger)  # type: ignore[union-attr]
    stats = dict(zip(("step", "running", "waiting", "free", "blocks", "requests"),
                     engine._client.call("stats"), strict=False))  # fmt: skip
    assert stats["requests"] == 0 and stats["free"] == stats["blocks"]


@pytest.mark.parametrize("num_outputs", [0, 1, 40, 150])
def test_requests_go_on_as_if_nothing_had_happened(
    engine: LLMEngine, undisturbed: dict[str, list[Any]], num_outputs: int
) -> None:
    before = engine.front_end.stats.num_restarts
    run = Run(engine)
    run.go_on(num_outputs)
    core_of(engine).kill()
    assert run.finish() == undisturbed and not run.errors
    assert engine.front_end.stats.num_restarts == before + 1
    assert_idle(engine)


def test_kills_at_random_moments(engine: LLMEngine, undisturbed: dict[str, list[Any]]) -> None:
    """Also of an engine core that replays."""
    randomness = random.Random(NUM_KILLS)
    before = engine.front_end.stats.num_restarts
    run = Run(engine)
    for _ in range(NUM_KILLS):
        run.go_on(randomness.choice([1, 3, 20, 60]))
        if not engine.has_unfinished_requests():
            assert run.done == undisturbed
            run = Run(engine)
            run.go_on(2)
        core_of(engine).kill()
    assert run.finish() == undisturbed and not run.errors
    assert engine.front_end.stats.num_restarts == before + NUM_KILLS
    assert engine.front_end.stats.num_replayed_requests > NUM_KILLS
    assert_idle(engine)


def test_aborted_and_new_requests_while_there_is_no_engine_core(
    engine: LLMEngine, undisturbed: dict[str, list[Any]]
) -> None:
    run = Run(engine)
    run.go_on(20)
    core_of(engine).kill()
    core_of(engine).wait(5)
    engine.abort_request(["greedy", "choices"])
    engine.add_request("new", {"prompt_token_ids": KINDS["greedy"][0]}, KINDS["greedy"][1])
    done = run.finish()
    assert done.pop("new") == undisturbed["greedy"]
    left = {name: end for name, end in undisturbed.items() if name not in ("greedy", "choices")}
    assert done == left
    assert_idle(engine)


def test_streams_of_the_asynchronous_engine(
    tiny_model: Path, engine: LLMEngine, undisturbed: dict[str, list[Any]]
) -> None:
    args = AsyncEngineArgs(str(tiny_model), **arguments(), **MANY)
    streams = AsyncLLMEngine.from_engine_args(args)
    names = [name for name in KINDS if name != "best"]

    async def read(name: str, counts: dict[str, int]) -> tuple[list[list[int]], list[str]]:
        prompt, sampling = KINDS[name]
        sampling = sampling.clone()
        sampling.output_kind = RequestOutputKind.DELTA
        ids: list[list[int]] = [[] for _ in range(sampling.n)]
        texts = [""] * sampling.n
        async for output in streams.generate({"prompt_token_ids": prompt}, sampling, name):
            counts[name] = counts.get(name, 0) + 1
            for choice in output.outputs:
                ids[choice.index] += choice.token_ids
                texts[choice.index] += choice.text
        return ids, texts

    async def go() -> None:
        counts: dict[str, int] = {}
        reading = [asyncio.create_task(read(name, counts)) for name in names]
        assert streams.engine._client is not None
        for num_outputs in (1, 10):
            while sum(counts.values()) < num_outputs * len(names):
                await asyncio.sleep(0.005)
            os.kill(streams.engine._client.ready.pid, signal.SIGKILL)
            while streams.engine.is_up:
                await asyncio.sleep(0.005)
            await streams.check_health()
            while not streams.engine.is_up:
                await asyncio.sleep(0.005)
        for name, (ids, texts) in zip(names, await asyncio.gather(*reading), strict=True):
            choices = undisturbed[name][0]
            assert (ids, texts) == ([c[0] for c in choices], [c[1] for c in choices]), name

    asyncio.run(go())
    streams.close()


def test_a_hung_engine_core_is_replaced(
    tiny_model: Path, undisturbed: dict[str, list[Any]]
) -> None:
    engine = make_engine(tiny_model, step_timeout=1.0, **MANY)
    run = Run(engine)
    run.go_on(50)
    core_of(engine).suspend()
    assert run.finish() == undisturbed and not run.errors
    assert engine.front_end.stats.num_restarts == 1
    engine.close()


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_lost_worker(tiny_model: Path, undisturbed: dict[str, list[Any]], how: str) -> None:
    """Its engine core goes with it, and a stopped one is not left behind."""
    engine = make_engine(tiny_model, distributed_executor_backend="mp", step_timeout=1.5, **MANY)
    run = Run(engine)
    run.go_on(50)
    (worker,) = core_of(engine).children()
    worker.kill() if how == "killed" else worker.suspend()
    assert run.finish() == undisturbed and not run.errors
    wait_until(lambda: not worker.is_running(), 5, "the worker is gone")
    engine.close()


@pytest.mark.parametrize("token", [POISON, STUCK])
def test_a_request_that_kills_the_engine_core_fails_alone(
    tiny_model: Path, undisturbed: dict[str, list[Any]], token: int
) -> None:
    """Its deaths do not count among those that the engine may have."""
    engine = make_engine(tiny_model, PoisonedWorker, max_restarts=1, step_timeout=1.0)
    for _ in range(2):
        run = Run(engine)
        run.go_on(30)
        engine.add_request("bad", {"prompt_token_ids": [256, token]}, params())
        assert run.finish() == undisturbed
        (error,) = run.errors
        assert isinstance(error, EngineCrashError)
    assert engine.front_end.stats.num_restarts == 4
    assert_idle(engine)
    engine.close()


def test_restarts_that_fail_end_with_the_first_cause(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "marker"
    monkeypatch.setenv(MARKER, str(marker))
    engine = make_engine(tiny_model, StartsOnce, max_restarts=1)
    run = Run(engine)
    run.go_on(10)
    marker.touch()
    core_of(engine).kill()
    run.finish()
    (error,) = run.errors
    assert isinstance(error, EngineDeadError)
    assert "2 times" in str(error) and "SIGKILL" in str(error)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        engine.add_request("late", "a", params())
    engine.close()


@pytest.mark.parametrize("allowed", [False, True])
def test_a_worker_that_was_changed_is_not_continued(
    tiny_model: Path, undisturbed: dict[str, list[Any]], allowed: bool
) -> None:
    """Unless that is wanted. The next engine core is as good as new."""
    engine = make_engine(tiny_model, allow_replay_after_rpc=allowed, **MANY)
    engine.collective_rpc(lambda worker: None)
    run = Run(engine)
    run.go_on(20)
    core_of(engine).kill()
    run.finish()
    if allowed:
        assert run.done == undisturbed and not run.errors
    else:
        assert len(run.errors) == len(KINDS) - len(run.done)
        assert all(isinstance(error, EngineChangedError) for error in run.errors)
    core_of(engine).kill()
    assert Run(engine).finish() == undisturbed
    engine.close()


def test_config_of_recovery(tiny_model: Path) -> None:
    args = EngineArgs(str(tiny_model), max_restarts=3, restart_window=5, step_timeout=7)
    config = replace(args).create_engine_config().recovery_config
    assert (config.max_restarts, config.restart_window_s, config.step_timeout_s) == (3, 5, 7)
