"""`AsyncLLMEngine` and the `AsyncEngine` under it, on a tiny model: states, streams, ends."""

import asyncio
import gc
import os
import pickle
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace import AsyncEngineArgs, AsyncLLMEngine, RequestOutput, SamplingParams
from headrace.configs.errors import (
    ConfigurationError,
    EngineDeadError,
    HeadraceError,
    InvalidRequestError,
    ModelFileError,
    RequestAbortedError,
    UnsupportedFeatureError,
)
from headrace.engine.async_llm_engine import AsyncEngineDeadError
from headrace.engine_core.client import AsyncClient
from headrace.engine_core.supervisor import SupervisorThread
from headrace.frontend.async_engine import AsyncEngine
from headrace.frontend.stats import StatLoggerBase, Stats
from headrace.sampling_params import RequestOutputKind
from tests.e2e.tiny_model import ENGINE_ARGUMENTS, MAX_MODEL_LEN

pytestmark = pytest.mark.slow

FOUR = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(max_tokens=100, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


def make_engine(path: Path, **arguments: Any) -> AsyncLLMEngine:
    args = AsyncEngineArgs(str(path), **ENGINE_ARGUMENTS)
    return AsyncLLMEngine.from_engine_args(args, **arguments)


@pytest.fixture(scope="module")
def shared(tiny_model: Path) -> Iterator[AsyncLLMEngine]:
    engine = make_engine(tiny_model)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared: AsyncLLMEngine) -> Iterator[AsyncLLMEngine]:
    """The shared engine before any loop was started; afterwards nothing may be left in it."""
    yield shared
    if not shared.errored:
        asyncio.run(assert_idle(shared))
    shared.shutdown_background_loop()


async def assert_idle(engine: AsyncLLMEngine) -> None:
    assert len(engine.engine.front_end) == 0 and not engine.engine._streams
    if not engine.is_running:
        engine.start_background_loop()
    names = ["step", "running", "waiting", "free", "blocks", "requests"]
    stats = dict(zip(names, await engine.engine.call("stats"), strict=False))
    assert stats["requests"] == 0 and stats["free"] == stats["blocks"]


def state(engine: AsyncLLMEngine) -> tuple[bool, bool, bool]:
    return engine.is_running, engine.is_stopped, engine.errored


async def all_of(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


def test_states(engine: AsyncLLMEngine) -> None:
    async def go() -> None:
        assert state(engine) == (False, False, False)
        await engine.check_health()  # an engine that never started is healthy
        engine.start_background_loop()
        assert state(engine) == (True, False, False)
        with pytest.raises(RuntimeError, match="running already"):
            engine.start_background_loop()
        await engine.check_health()
        engine.shutdown_background_loop()
        engine.shutdown_background_loop()
        assert state(engine) == (False, False, False)
        assert engine.background_loop is None
        with pytest.raises(AsyncEngineDeadError):
            await engine.abort("any")
        assert (await all_of(engine.generate("a", FOUR, "r")))[-1].finished
        assert state(engine) == (True, False, False)

    asyncio.run(go())
    assert state(engine) == (False, True, False)  # the event loop has ended it
    asyncio.run(all_of(engine.generate("a", FOUR, "r")))  # another one goes on


def test_outputs_of_each_kind(engine: AsyncLLMEngine) -> None:
    async def go() -> dict[RequestOutputKind, list[RequestOutput]]:
        found = {}
        for kind in RequestOutputKind:
            params = FOUR.clone()
            params.output_kind = kind
            found[kind] = await all_of(engine.generate("a", params, "r"))
        return found

    found = asyncio.run(go())
    (final,) = found[RequestOutputKind.FINAL_ONLY]
    whole = list(final.outputs[0].token_ids)
    deltas = found[RequestOutputKind.DELTA]
    assert [token for output in deltas for token in output.outputs[0].token_ids] == whole
    assert found[RequestOutputKind.CUMULATIVE][-1].outputs[0].token_ids == whole
    assert [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]
    assert final.request_id == "r" and len(whole) == 4


def test_many_at_once(engine: AsyncLLMEngine) -> None:
    async def go() -> list[list[RequestOutput]]:
        return await asyncio.gather(
            *(all_of(engine.generate(f"prompt {i}", FOUR, str(i))) for i in range(20))
        )

    outputs = asyncio.run(go())
    assert [output[-1].prompt for output in outputs] == [f"prompt {i}" for i in range(20)]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"request_id": 1}, TypeError),
        ({"priority": 1}, ValueError),
        ({"data_parallel_rank": 0}, ValueError),
        ({"lora_request": 1}, UnsupportedFeatureError),
        ({"trace_headers": {}}, UnsupportedFeatureError),
        ({"prompt_adapter_request": 1}, UnsupportedFeatureError),
    ],
)
def test_refused_at_once(
    engine: AsyncLLMEngine, arguments: dict[str, Any], error: type[Exception]
) -> None:
    async def go() -> None:
        request = {"request_id": "r", "prompt": "a", "params": FOUR, **arguments}
        with pytest.raises(error):
            await engine.add_request(**request)

    asyncio.run(go())


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        (3, FOUR, TypeError),
        ([300], FOUR, InvalidRequestError),
        ({"prompt_token_ids": []}, FOUR, InvalidRequestError),
        ([1] * MAX_MODEL_LEN, FOUR, InvalidRequestError),
        ("a", object(), ValueError),
        ("a", SamplingParams(logprobs=21), InvalidRequestError),
    ],
)
def test_refused_in_the_stream(
    engine: AsyncLLMEngine, prompt: Any, params: Any, error: type[Exception]
) -> None:
    async def go() -> None:
        stream = await engine.add_request("r", prompt, params)
        with pytest.raises(error):
            await anext(stream)
        assert (await all_of(engine.generate("a", FOUR, "r")))[-1].finished

    asyncio.run(go())


def test_an_id_in_use(engine: AsyncLLMEngine) -> None:
    async def go() -> None:
        first = await engine.add_request("same", "a", FOUR)
        with pytest.raises(ValueError, match="'same' is in use"):
            await engine.add_request("same", "b", FOUR)
        assert (await all_of(first))[-1].prompt == "a"
        both = [all_of(engine.generate(text, FOUR, "same")) for text in ("c", "d")]
        results = await asyncio.gather(*both, return_exceptions=True)
        assert {type(result) for result in results} == {list, ValueError}

    asyncio.run(go())


def test_a_request_runs_whether_somebody_reads_or_not(engine: AsyncLLMEngine) -> None:
    async def go() -> None:
        stream = await engine.add_request("r", "a", FOUR, arrival_time=0.0)
        while engine.engine.num_requests:
            await asyncio.sleep(0.01)
        await engine.add_request("r", "b", FOUR)  # the id is free
        outputs = await all_of(stream)
        assert outputs[-1].finished and outputs[-1].metrics is not None
        assert outputs[-1].metrics.arrival_time > 1e9  # 0.0 stands for now
        while engine.engine.num_requests:
            await asyncio.sleep(0.01)

    asyncio.run(go())


def test_leaving_early_aborts(engine: AsyncLLMEngine) -> None:
    async def go() -> None:
        async with aclosing(engine.generate("a", LONG, "closed")) as outputs:
            await anext(outputs)
        task = asyncio.create_task(all_of(engine.generate("b", LONG, "cancelled")))
        while not engine.engine.num_requests:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.engine.num_requests == 0
        await assert_idle(engine)

    asyncio.run(go())


def test_abort_by_id(engine: AsyncLLMEngine) -> None:
    async def go() -> None:
        task = asyncio.create_task(all_of(engine.generate("a", LONG, "r")))
        while not engine.engine.num_requests:
            await asyncio.sleep(0.01)
        await engine.abort("unknown")
        await engine.abort("r")
        await engine.abort("r")
        with pytest.raises(asyncio.CancelledError):
            await task
        await assert_idle(engine)
        await engine.abort("r")

    asyncio.run(go())


def test_a_failed_request_fails_alone(engine: AsyncLLMEngine) -> None:
    def poison(model: Any) -> None:
        model.embedding.weight[7] = float("nan")

    def heal(model: Any) -> None:
        model.embedding.weight[7] = model.embedding.weight[6]

    async def go() -> None:
        await engine.collective_rpc("apply_model", args=(poison,))
        good = all_of(engine.generate([3, 4], FOUR, "good"))
        bad = all_of(engine.generate([7, 7], FOUR, "bad"))
        outputs, failure = await asyncio.gather(good, bad, return_exceptions=True)
        assert isinstance(outputs, list) and outputs[-1].finished
        assert "NonFinite" in type(failure).__name__
        await engine.collective_rpc("apply_model", args=(heal,))
        assert engine.is_running

    asyncio.run(go())


def test_coroutines_and_properties(engine: AsyncLLMEngine) -> None:
    class Recorder(StatLoggerBase):
        records: list[Stats] = []  # noqa: RUF012

        def log(self, stats: Stats) -> None:
            self.records.append(stats)

    async def go() -> None:
        assert engine.config is engine.vllm_config is await engine.get_vllm_config()
        for name in ("model", "parallel", "scheduler", "decoding", "lora"):
            config = await getattr(engine, f"get_{name}_config")()
            assert config is getattr(engine, f"{name}_config")
        assert await engine.get_tokenizer() is engine.engine.tokenizer
        assert await engine.get_input_preprocessor() is engine.renderer
        assert not await engine.is_tracing_enabled() and not await engine.is_sleeping()
        assert await engine.reset_mm_cache() is None  # type: ignore[func-returns-value]
        assert await engine.reset_prefix_cache() is None  # type: ignore[func-returns-value]
        for use in (engine.sleep(), engine.wake_up()):
            with pytest.raises(AssertionError, match="enable_sleep_mode"):
                await use
        for refused in (engine.add_lora(1), engine.encode("a"), engine.get_tokenizer(1)):
            with pytest.raises(UnsupportedFeatureError):
                await refused
        for use in (engine.start_profile(), engine.stop_profile()):
            with pytest.raises(ConfigurationError, match="torch_profiler_dir"):
                await use
        assert set(engine.stat_loggers) == {"logging", "prometheus"}
        engine.add_logger("mine", Recorder())
        with pytest.raises(KeyError):
            engine.add_logger("mine", Recorder())
        await engine.do_log_stats()
        assert Recorder.records
        engine.remove_logger("mine")
        with pytest.raises(KeyError):
            engine.remove_logger("mine")
        assert await engine.collective_rpc(lambda worker, x: x, args=((1, 2),)) == [(1, 2)]
        with pytest.raises(TimeoutError, match="slow"):
            await engine.collective_rpc(slow, timeout=0.02)
        assert not engine.log_requests and engine.start_engine_loop and engine.log_stats

    def slow(worker: Any) -> None:
        import time

        time.sleep(0.2)

    asyncio.run(go())
    with pytest.raises(RuntimeError, match="cannot be pickled"):
        pickle.dumps(engine)


def test_a_recorded_error_ends_everything(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, start_engine_loop=False)
    error = ValueError("something broke")

    async def go() -> None:
        with pytest.raises(AsyncEngineDeadError):
            await engine.add_request("r", "a", FOUR)
        with pytest.raises(AsyncEngineDeadError):
            await engine.reset_prefix_cache()
        engine.start_background_loop()
        task = asyncio.create_task(all_of(engine.generate("a", LONG, "r")))
        while not engine.engine.num_requests:
            await asyncio.sleep(0.01)
        engine.set_errored(error)
        with pytest.raises(ValueError, match="something broke"):
            await task
        assert state(engine) == (True, True, True)
        with pytest.raises(AsyncEngineDeadError) as raised:
            await engine.check_health()
        assert raised.value.__cause__ is error and isinstance(raised.value, RuntimeError)
        assert engine.dead_error is not engine.dead_error
        for use in (all_of(engine.generate("a", FOUR, "s")), engine.collective_rpc("get_model")):
            with pytest.raises(AsyncEngineDeadError):
                await use
        engine.shutdown_background_loop()
        assert state(engine) == (False, True, True)
        with pytest.raises(AsyncEngineDeadError):
            engine.start_background_loop()

    asyncio.run(go())
    engine.close()


def children() -> set[int]:
    """Processes that this one has started and that run."""
    return {child.pid for child in psutil.Process().children()}


def test_a_dead_engine_core_and_a_collected_engine(tiny_model: Path) -> None:
    """Where no other may come, every open stream gets the error; when the object goes, all that
    belongs to it goes.
    """

    async def until_killed(engine: AsyncLLMEngine) -> int:
        streams = [
            asyncio.create_task(all_of(engine.generate("a", LONG, str(i)))) for i in range(3)
        ]
        (pid,) = await engine.collective_rpc(lambda worker: __import__("os").getpid())
        os.kill(pid, signal.SIGKILL)
        for result in await asyncio.gather(*streams, return_exceptions=True):
            assert isinstance(result, EngineDeadError) and "SIGKILL" in str(result)
        assert state(engine) == (False, True, True)
        with pytest.raises(AsyncEngineDeadError):
            await all_of(engine.generate("a", FOUR, "r"))
        return int(pid)

    async def until_collected(engine: AsyncLLMEngine) -> int:
        await all_of(engine.generate("a", FOUR, "r"))
        (pid,) = await engine.collective_rpc(lambda worker: __import__("os").getpid())
        return int(pid)

    async def collect() -> None:
        engine = AsyncLLMEngine.from_vllm_config(config, disable_log_requests=True)
        pid = await until_collected(engine)
        task = engine._task
        del engine
        gc.collect()
        assert not os.path.exists(f"/proc/{pid}")
        assert task is not None
        await asyncio.wait([task], timeout=5)
        assert task.cancelled()

    args = AsyncEngineArgs(str(tiny_model), enable_log_requests=True, **ENGINE_ARGUMENTS)
    config = args.create_engine_config()
    dying = AsyncLLMEngine.from_engine_args(replace(args, max_restarts=0))
    assert dying.log_requests
    asyncio.run(until_killed(dying))
    dying.close()
    asyncio.run(collect())


def test_a_start_that_fails(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelFileError):
        AsyncLLMEngine.from_engine_args(AsyncEngineArgs(str(tmp_path)))
    args = AsyncEngineArgs(
        str(tiny_model), **{**ENGINE_ARGUMENTS, "worker_extension_cls": "no.Such"}
    )
    with pytest.raises(ConfigurationError, match=r"no\.Such"):
        AsyncLLMEngine.from_engine_args(args)
    monkeypatch.setenv("HEADRACE_MULTIPROCESSING", "0")
    with pytest.raises(ConfigurationError, match="needs a process"):
        AsyncLLMEngine.from_engine_args(args)


def test_ctrl_c_during_the_start(tiny_model: Path) -> None:
    """Neither the thread that loads nor the engine core is left."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    config = AsyncEngineArgs(str(tiny_model), **ENGINE_ARGUMENTS).create_engine_config()
    running = children()
    supervisor = SupervisorThread()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)  # the engine core still imports torch then
        with pytest.raises(KeyboardInterrupt):
            AsyncLLMEngine(config, supervisor=supervisor)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert "engine-start" not in [thread.name for thread in threading.enumerate()]
    assert children() == running


def test_a_broken_tokenizer_ends_the_start(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for the engine core, which may have much to load."""

    async def never(client: AsyncClient, progress: Any) -> None:
        await asyncio.Event().wait()

    def broken(*arguments: Any) -> None:
        raise ModelFileError("no tokenizer")

    monkeypatch.setattr(AsyncClient, "wait_ready", never)
    monkeypatch.setattr("headrace.frontend.start_engine.load_renderer", broken)
    running = children()
    supervisor = SupervisorThread()
    args = AsyncEngineArgs(str(tiny_model), **ENGINE_ARGUMENTS)

    async def go() -> None:
        engine = AsyncEngine(args, supervisor=supervisor)
        for _ in range(2):  # the second time, it has been stopped
            with pytest.raises(HeadraceError):
                await asyncio.wait_for(engine.start(), 20)

    asyncio.run(go())
    assert children() == running


def test_event_loops(tiny_model: Path) -> None:
    """The engine follows to a loop when the last one does not run; two at once are an error."""
    engine = make_engine(tiny_model)
    left = asyncio.new_event_loop()
    left.run_until_complete(all_of(engine.generate("a", FOUR, "r")))
    asyncio.run(asyncio.wait_for(all_of(engine.generate("a", FOUR, "r")), 20))
    left.run_until_complete(asyncio.sleep(0))  # the receiver that was cancelled ends
    left.close()

    ready, errors = threading.Event(), []

    async def until_closed() -> None:
        asyncio.get_running_loop().set_debug(True)  # finds calls from the wrong thread
        engine.front_end.process = lambda message: {}  # type: ignore[method-assign]  # never ends
        stream = await engine.add_request("r", "a", LONG)
        ready.set()
        try:
            while True:
                await anext(stream)
        except EngineDeadError as error:
            errors.append(error)

    thread = threading.Thread(target=lambda: asyncio.run(until_closed()))
    thread.start()
    assert ready.wait(20)
    with pytest.raises(RuntimeError, match="another thread"):
        asyncio.run(all_of(engine.generate("a", FOUR, "s")))
    engine.close()
    thread.join(20)
    assert [str(error) for error in errors] == ["the engine has been closed; make a new one"]


def with_server_engine(path: Path, work: Any, **arguments: Any) -> None:
    async def go() -> None:
        engine = AsyncEngine(AsyncEngineArgs(str(path), **{**ENGINE_ARGUMENTS, **arguments}))
        await engine.start()
        try:
            await work(engine)
        finally:
            threads = renderer_threads() - others
            await engine.stop()
            await engine.stop()
        assert threads  # they were there, and the engine's end is theirs
        for thread in threads:
            thread.join(10)
        assert not renderer_threads() - others

    others = renderer_threads()
    asyncio.run(go())


def renderer_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("renderer")}


def test_a_servers_engine(tiny_model: Path) -> None:
    """One label for many requests (PP47), aborts by label (PP17), no callables (S1)."""

    async def work(engine: AsyncEngine) -> None:
        prompts = await engine.renderer.render_cmpl_async([f"prompt {i}" for i in range(50)])
        one_label = [all_of(engine.generate(prompt, FOUR, "job-7")) for prompt in prompts]
        outputs = await asyncio.gather(*one_label)
        assert [output[-1].prompt for output in outputs] == [prompt.text for prompt in prompts]
        assert {output[-1].request_id for output in outputs} == {"job-7"}
        assert (await all_of(engine.generate(prompts[0], FOUR, "p", priority=3)))[-1].finished
        with pytest.raises(UnsupportedFeatureError, match="no callables"):
            await engine.collective_rpc(lambda worker: None)
        await aborts(engine, prompts[0])
        broken = Broken()
        engine.add_logger("broken", broken)
        assert (await all_of(engine.generate(prompts[0], FOUR, "r")))[-1].finished
        assert broken.num_calls > 0
        samples = engine.stat_loggers["prometheus"].registry.collect()  # type: ignore[attr-defined]
        ended = {
            sample.labels["finished_reason"]: sample.value
            for family in samples
            if family.name == "headrace:request_success"
            for sample in family.samples
            if sample.name.endswith("_total")
        }
        assert ended["length"] == 52 and ended["abort"] == 4  # PP50: all that was submitted

    class Broken(StatLoggerBase):
        num_calls = 0

        def log(self, stats: Stats) -> None:
            self.num_calls += 1
            raise RuntimeError("broken")

    async def aborts(engine: AsyncEngine, prompt: Any) -> None:
        tasks = [asyncio.create_task(all_of(engine.generate(prompt, LONG, "x"))) for _ in range(4)]
        while engine.num_requests < 4:
            await asyncio.sleep(0.01)
        assert engine.abort("x") == 4 and engine.abort("x") == 0 and engine.num_requests == 0
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, RequestAbortedError)
        names = ["step", "running", "waiting", "free", "blocks", "requests"]
        stats = dict(zip(names, await engine.call("stats"), strict=False))
        assert stats["requests"] == 0 and stats["free"] == stats["blocks"]

    with_server_engine(tiny_model, work)


def test_a_servers_engine_without_statistics(tiny_model: Path) -> None:
    async def work(engine: AsyncEngine) -> None:
        assert engine.stat_loggers == {}
        with pytest.raises(RuntimeError, match="disabled"):
            engine.remove_logger("logging")
        assert engine.progress()["running"] == 0 and engine.state == "ready"
        prompts = await engine.renderer.render_cmpl_async(["a"])
        assert (await all_of(engine.generate(prompts[0], FOUR, "r")))[-1].finished

    with_server_engine(tiny_model, work, disable_log_stats=True)
