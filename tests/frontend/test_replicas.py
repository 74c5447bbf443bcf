"""The asynchronous front end over two real engine-core processes without a model."""

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from prometheus_client import generate_latest

from headrace.configs.errors import InvalidRequestError
from headrace.configs.sampling_params import SamplingParams
from headrace.engine_core.supervisor import SupervisorThread
from headrace.frontend.admission import RenderedPrompt
from headrace.frontend.async_engine import AsyncEngine
from headrace.frontend.prometheus_logger import PrometheusStatLogger
from tests.engine_core.factories import make_config
from tests.engine_core.fake_executor import NAME

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

PARAMS = SamplingParams(max_tokens=30, ignore_eos=True, seed=1)


@pytest.fixture(scope="module", autouse=True)
def importable_executor() -> Iterator[None]:
    """Engine cores get this process's `sys.path`."""
    root = str(Path(__file__).parent.parent.parent)
    sys.path.append(root)
    yield
    sys.path.remove(root)


def make_engine() -> AsyncEngine:
    config = make_config(max_num_seqs=8, max_num_batched_tokens=64, num_replicas=2)
    parallel = replace(config.parallel_config, distributed_executor_backend=NAME)
    model = replace(config.model_config, skip_tokenizer_init=True)
    return AsyncEngine(
        replace(config, parallel_config=parallel, model_config=model),
        supervisor=SupervisorThread(has_worker=False),
    )


async def tokens_of(engine: AsyncEngine, number: int, rank: int | None = None) -> list[int]:
    prompt = RenderedPrompt(None, [1 + number, 2, 3])
    outputs = engine.generate(prompt, PARAMS, f"r{number}", data_parallel_rank=rank)
    final = [output async for output in outputs][-1]
    assert final.finished
    return list(final.outputs[0].token_ids)


def test_streams_go_on_when_a_replica_is_killed() -> None:
    """It is up all the time, and metrics tell both apart."""

    async def go() -> None:
        engine = make_engine()
        await engine.start()
        try:
            assert engine.front_end.stats.num_blocks == 400
            wanted = [await tokens_of(engine, i, rank=i % 2) for i in range(10)]
            with pytest.raises(InvalidRequestError, match=r"out of range \[0, 2\)"):
                await tokens_of(engine, 0, rank=2)
            running = [asyncio.create_task(tokens_of(engine, i)) for i in range(10)]
            await asyncio.sleep(0.03)
            assert engine._client is not None
            first = engine._client._session.replicas[0].ready
            assert first is not None
            psutil.Process(first.pid).kill()
            while engine._client._session.is_whole:
                await asyncio.sleep(0.001)
                assert engine.is_up
            assert await asyncio.gather(*running) == wanted
            assert await engine.call("reset_prefix_cache") is True
            assert await engine.collective_rpc("anything") == [0, 1]
            assert engine.num_requests == 0
            text = metrics(engine)
        finally:
            await engine.stop()
        assert 'routed_requests_total{engine="0",model_name="tiny",reason="pinned"} 5.0' in text
        assert 'routed_requests_total{engine="1",model_name="tiny",reason="pinned"} 5.0' in text
        assert 'engine_restarts_total{engine="0",model_name="tiny"} 1.0' in text
        assert 'engine_restarts_total{engine="1",model_name="tiny"} 0.0' in text

    asyncio.run(go())


def metrics(engine: AsyncEngine) -> str:
    stat_logger = engine.stat_loggers["prometheus"]
    assert isinstance(stat_logger, PrometheusStatLogger)
    engine.front_end.log_stats()
    return generate_latest(stat_logger.registry).decode()
