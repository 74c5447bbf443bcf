"""`AsyncLLMEngine`: rules of the Python API that its own tests leave out."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import AsyncEngineArgs, AsyncLLMEngine, LLMEngine, RequestOutput, SamplingParams
from headrace.configs.errors import UnsupportedFeatureError
from tests.e2e.tiny_model import ENGINE_ARGUMENTS

pytestmark = pytest.mark.slow

FOUR = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[AsyncLLMEngine]:
    args = AsyncEngineArgs(str(tiny_model), scheduling_policy="priority", **ENGINE_ARGUMENTS)
    engine = AsyncLLMEngine.from_vllm_config(vllm_config=args.create_engine_config())
    yield engine
    engine.close()


async def all_of(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


def run(engine: AsyncLLMEngine, work: Any) -> Any:
    async def go() -> Any:
        try:
            return await work()
        finally:
            engine.shutdown_background_loop()

    return asyncio.run(go())


def test_plain_attributes(engine: AsyncLLMEngine) -> None:
    """Those of an engine that was made from a configuration, with everything on."""
    assert engine.log_requests is True and engine.start_engine_loop is True
    assert engine.log_stats is True and engine.background_loop is None
    assert engine.engine is not None


def test_lines_for_each_request(engine: AsyncLLMEngine, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        with caplog.at_level(logging.INFO, logger="headrace"):
            await all_of(engine.generate("secret", FOUR, "mine"))
            stream = engine.generate("secret", SamplingParams(max_tokens=100), "other")
            await anext(stream)
            await stream.aclose()

    run(engine, work)
    lines = [record.getMessage() for record in caplog.records if "request" in record.getMessage()]
    said = [(line.split()[0], line[line.index("(") :].split(")")[0] + ")") for line in lines]
    assert said == [
        ("added", "(mine)"), ("finished", "(mine)"), ("added", "(other)"), ("aborted", "(other)"),
    ]  # fmt: skip
    assert "secret" not in caplog.text


def test_priorities_with_their_policy(engine: AsyncLLMEngine) -> None:
    async def work() -> list[RequestOutput]:
        return await all_of(engine.generate("a", FOUR, "r", priority=3))

    assert run(engine, work)[-1].finished


def test_outputs_are_validated_where_that_is_on(
    engine: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        with LLMEngine.enable_output_validation():
            assert (await all_of(engine.generate("a", FOUR, "r")))[-1].finished
            monkeypatch.setattr("headrace.frontend.async_llm_engine.RequestOutput", int)
            with pytest.raises(TypeError, match="expected int, found RequestOutput"):
                await all_of(engine.generate("a", FOUR, "r"))

    run(engine, work)


def test_a_slow_step_ends_nothing(engine: AsyncLLMEngine) -> None:
    """There is no time limit for a step: it is reported as long as it lasts."""

    def slow(worker: Any) -> None:
        time.sleep(0.5)

    async def work() -> tuple[list[RequestOutput], float]:
        stream = engine.generate("a", SamplingParams(max_tokens=30, ignore_eos=True), "r")
        outputs = [await anext(stream)]
        call = asyncio.create_task(engine.collective_rpc(slow))
        age = 0.0
        while not call.done():
            age = max(age, engine.engine.progress()["age_s"])
            await asyncio.sleep(0.05)
        return outputs + await all_of(stream), age

    outputs, age = run(engine, work)
    assert len(outputs[-1].outputs[0].token_ids) == 30 and age > 0.2
    assert not engine.errored


def test_everything_of_later_versions_is_refused(engine: AsyncLLMEngine) -> None:
    for name in ("encode", "add_lora"):
        with pytest.raises(UnsupportedFeatureError):
            run(engine, lambda name=name: getattr(engine, name)("a"))
