"""Engine cores that die under a library: every request ends as if nothing had happened."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace import AsyncEngineArgs, AsyncLLMEngine, EngineArgs, LLMEngine
from headrace.configs.errors import (
    EngineChangedError,
    EngineCrashError,
    EngineDeadError,
)
from headrace.inputs import TokensPrompt
from headrace.sampling_params import RequestOutputKind
from headrace.workers.worker import Worker
from tests.e2e.tiny_model import ENGINE_ARGUMENTS, save_tiny_model
from tests.faults.engine_run import (
    MANY,
    Requests,
    Run,
    assert_idle,
    core_of,
    params,
    restarts_of,
)
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


def tokens(*ids: int) -> TokensPrompt:
    return {"prompt_token_ids": list(ids)}


# The kinds of state that a request can have: prompt, parameters.
KINDS: Requests = {
    "greedy": (tokens(256, 10, 20, 30), params(temperature=0)),
    "random": (tokens(256, 11, 21), params(logprobs=2)),
    "choices": (tokens(256, 12, 22), params(n=3, logprobs=1)),
    "scores": (tokens(256, *range(120, 190)), params(prompt_logprobs=1, max_tokens=40)),
    "stops": (tokens(256, 13, 23), params(stop=["\n", "zq"], temperature=1.3)),
    "penalties": (
        tokens(256, 14, 24),
        params(repetition_penalty=1.4, presence_penalty=0.5, min_p=0.01),
    ),
    "best": (tokens(256, 15, 25), params(n=1, best_of=3, max_tokens=30)),
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


@pytest.fixture(scope="module")
def undisturbed(engine: LLMEngine) -> dict[str, list[Any]]:
    return Run(engine, KINDS).finish()


@pytest.mark.parametrize("num_outputs", [0, 1])
def test_requests_go_on_as_if_nothing_had_happened(
    engine: LLMEngine, undisturbed: dict[str, list[Any]], num_outputs: int
) -> None:
    before = restarts_of(engine)
    run = Run(engine, KINDS)
    run.go_on(num_outputs)
    core_of(engine).kill()
    assert run.finish() == undisturbed and not run.errors
    assert restarts_of(engine) == before + 1
    assert_idle(engine)


def test_aborted_and_new_requests_while_there_is_no_engine_core(
    engine: LLMEngine, undisturbed: dict[str, list[Any]]
) -> None:
    run = Run(engine, KINDS)
    run.go_on(20)
    core_of(engine).kill()
    core_of(engine).wait(5)
    engine.abort_request(["greedy", "choices"])
    engine.add_request("new", *KINDS["greedy"])
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
        async for output in streams.generate(prompt, sampling, name):
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


@pytest.mark.parametrize("token", [POISON, STUCK])
def test_a_request_that_kills_the_engine_core_fails_alone(
    tiny_model: Path, undisturbed: dict[str, list[Any]], token: int
) -> None:
    """Its deaths do not count among those that the engine may have."""
    engine = make_engine(tiny_model, PoisonedWorker, max_restarts=1, step_timeout=1.0)
    for _ in range(2):
        run = Run(engine, KINDS)
        run.go_on(30)
        engine.add_request("bad", {"prompt_token_ids": [256, token]}, params())
        assert run.finish() == undisturbed
        (error,) = run.errors
        assert isinstance(error, EngineCrashError)
    assert restarts_of(engine) == 4
    assert_idle(engine)
    engine.close()


def test_restarts_that_fail_end_with_the_first_cause(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "marker"
    monkeypatch.setenv(MARKER, str(marker))
    engine = make_engine(tiny_model, StartsOnce, max_restarts=1)
    run = Run(engine, KINDS)
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
    run = Run(engine, KINDS)
    run.go_on(20)
    core_of(engine).kill()
    run.finish()
    if allowed:
        assert run.done == undisturbed and not run.errors
    else:
        assert len(run.errors) == len(KINDS) - len(run.done)
        assert all(isinstance(error, EngineChangedError) for error in run.errors)
    core_of(engine).kill()
    assert Run(engine, KINDS).finish() == undisturbed
    engine.close()


def test_config_of_recovery(tiny_model: Path) -> None:
    args = EngineArgs(str(tiny_model), max_restarts=3, restart_window=5, step_timeout=7)
    config = replace(args).create_engine_config().recovery_config
    assert (config.max_restarts, config.restart_window_s, config.step_timeout_s) == (3, 5, 7)
