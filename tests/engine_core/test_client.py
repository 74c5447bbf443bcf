"""Both clients against a scripted engine core on a real socket: calls, timeouts, deaths, loops."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from headrace.configs.config import EngineConfig, ModelConfig
from headrace.configs.errors import EngineDeadError, ModelFileError
from headrace.configs.sampling_params import SamplingParams
from headrace.engine_core.client import AsyncClient, SyncClient
from headrace.engine_core.messages import (
    AbortRequest,
    ChoiceState,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDied,
    EngineStats,
    Hello,
    Ready,
    Shutdown,
    StartupFailed,
    StartupProgress,
    UtilityCall,
    UtilityResult,
    WorkerCall,
    WorkerResult,
)
from headrace.engine_core.server import SocketThread
from headrace.engine_core.supervisor import EngineCoreProcess
from headrace.workers.protocol import RequestFault

CONFIG = EngineConfig(
    ModelConfig("m", "p", "p", ("m",), "LlamaForCausalLM", {}, "float32", 64, 32, 1)
)
READY = Ready(8, 16, 128, "contract", {}, {}, 1, 1)
REQUEST = EngineCoreRequest("a", [1], SamplingParams(), None, 0.0, [ChoiceState(0)])


class ScriptedCore:
    """Stands for process and engine core. Its sentinel is a pipe; closing that is its death."""

    epoch, pid = 1, 4711

    def __init__(self, directory: Path) -> None:
        self.socket_path = directory / "core.sock"
        self.sockets = SocketThread(self.socket_path, self.epoch)
        self.sentinel, self._alive = os.pipe()
        self.exit_code: int | None = None
        self.ended: list[str] = []
        self._client = b""

    def take(self) -> Any:
        self._client, message = self.sockets.incoming.get(timeout=5)
        return message

    def send(self, message: Any) -> None:
        self.sockets.send(self._client, message)

    def be_ready(self) -> Hello:
        hello = self.take()
        assert isinstance(hello, Hello)
        self.send(READY)
        return hello

    def die(self) -> None:
        if self.exit_code is None:
            self.exit_code = -9
            os.close(self._alive)

    def describe_exit(self) -> str:
        return "it was killed"

    def kill(self) -> None:
        self.ended.append("kill")
        self.die()

    def stop(self) -> None:
        self.ended.append("stop")

    def close(self) -> None:
        self.die()
        self.sockets.close()
        os.close(self.sentinel)

    @property
    def process(self) -> EngineCoreProcess:
        return cast(EngineCoreProcess, self)


@pytest.fixture
def core(tmp_path: Path) -> Iterator[ScriptedCore]:
    core = ScriptedCore(tmp_path)
    yield core
    core.close()


def outputs_of(step: int) -> EngineCoreOutputs:
    return EngineCoreOutputs([EngineCoreOutput("a", 0, step, [step])], EngineStats(step=step), 1.0)


def sync_client(core: ScriptedCore) -> SyncClient:
    client = SyncClient(core.process)
    client.send_config(CONFIG)
    assert core.be_ready().allows_callables
    client.wait_ready(lambda phase: None)
    return client


def test_sync_start_reports_phases_and_failures(core: ScriptedCore) -> None:
    client, phases = SyncClient(core.process), []
    client.send_config(CONFIG)
    assert core.take().config == CONFIG
    core.send(StartupProgress("weights"))
    core.send(StartupFailed(RequestFault("model_file", "no such file")))
    with pytest.raises(ModelFileError, match="no such file"):
        client.wait_ready(phases.append)
    assert phases == ["weights"]
    client.close()
    assert core.ended == ["kill", "stop"]  # it was still loading: there is nothing to finish


def test_sync_requests_outputs_and_close(core: ScriptedCore) -> None:
    client = sync_client(core)
    client.add_request(REQUEST)
    assert core.take() == REQUEST
    client.abort("a", 1)
    assert core.take() == AbortRequest("a", 1)
    core.send(outputs_of(1))
    assert client.get_outputs() == outputs_of(1)
    client.check_alive()
    client.close()
    client.close()
    assert isinstance(core.take(), Shutdown)
    assert core.ended == ["stop"]
    for use in (client.check_alive, lambda: client.add_request(REQUEST)):
        with pytest.raises(EngineDeadError, match="closed"):
            use()


def test_sync_call_keeps_outputs_that_come_meanwhile(core: ScriptedCore) -> None:
    client = sync_client(core)
    core.send(outputs_of(1))
    core.send(UtilityResult(1, [7, 8]))
    core.send(outputs_of(2))
    assert client.call("stats") == [7, 8]
    assert core.take() == UtilityCall(1, "stats")
    assert [client.get_outputs().stats.step for _ in range(2)] == [1, 2]
    client.close()


def test_sync_timeout_and_the_late_answer(core: ScriptedCore) -> None:
    client = sync_client(core)
    with pytest.raises(TimeoutError, match=r"slow did not answer within 0\.05 s"):
        client.call_workers("slow", timeout=0.05)
    assert core.take() == WorkerCall(1, "slow")
    core.send(UtilityResult(1, workers=[WorkerResult("late")]))
    core.send(UtilityResult(2, workers=[WorkerResult("in time")]))
    assert client.call_workers("quick", ("x",), {"y": 1}, timeout=5) == ["in time"]
    assert core.take() == WorkerCall(2, "quick", ["x"], {"y": 1})
    client.close()


def test_sync_death_comes_after_the_last_words(core: ScriptedCore) -> None:
    client = sync_client(core)
    core.send(outputs_of(1))
    core.die()
    assert client.get_outputs() == outputs_of(1)
    with pytest.raises(EngineDeadError, match=r"4711.*it was killed"):
        client.get_outputs()
    with pytest.raises(EngineDeadError, match="it was killed"):
        client.add_request(REQUEST)
    client.close()


def test_sync_engine_died_message(core: ScriptedCore) -> None:
    client = sync_client(core)
    core.send(EngineDied(RequestFault("engine_dead", "the step loop failed")))
    with pytest.raises(EngineDeadError, match="the step loop failed"):
        client.get_outputs()
    client.close()


async def async_client(core: ScriptedCore) -> AsyncClient:
    client = AsyncClient(core.process)
    client.attach()
    client.send_config(CONFIG, allows_callables=False)
    assert not (await asyncio.to_thread(core.be_ready)).allows_callables
    await client.wait_ready(lambda phase: None)
    return client


def test_async_calls_outputs_and_timeouts(core: ScriptedCore) -> None:
    async def go() -> None:
        client = await async_client(core)
        client.add_request(REQUEST)
        assert await asyncio.to_thread(core.take) == REQUEST
        core.send(outputs_of(1))
        assert await client.get_outputs() == outputs_of(1)
        receiving = asyncio.create_task(client.get_outputs())
        with pytest.raises(TimeoutError, match="slow"):
            await client.call_workers("slow", timeout=0.05)
        call = asyncio.create_task(client.call("stats"))
        await asyncio.to_thread(core.take)
        assert await asyncio.to_thread(core.take) == UtilityCall(2, "stats")
        core.send(UtilityResult(1, workers=[WorkerResult("late")]))
        core.send(UtilityResult(2, fault=RequestFault("model_file", "why")))
        with pytest.raises(ModelFileError, match="why"):
            await call
        assert not receiving.done()
        receiving.cancel()
        await client.close()
        await client.close()

    asyncio.run(go())
    assert core.ended == ["stop"]


def test_async_burst_is_not_missed(core: ScriptedCore) -> None:
    """The socket's descriptor signals once: everything that is there must be taken."""

    async def go() -> None:
        client = await async_client(core)
        for step in range(500):
            core.send(outputs_of(step))
            if step % 7 == 0:
                client.abort("a")
        for step in range(500):
            assert (await asyncio.wait_for(client.get_outputs(), 5)).stats.step == step
        await client.close()

    asyncio.run(go())


def test_async_client_moves_to_another_event_loop(core: ScriptedCore) -> None:
    clients: list[AsyncClient] = []

    async def first() -> None:
        clients.append(await async_client(core))
        clients[0].detach()

    async def second() -> None:
        clients[0].attach()
        core.send(outputs_of(2))
        assert [(await clients[0].get_outputs()).stats.step for _ in range(2)] == [1, 2]
        await clients[0].close()

    asyncio.run(first())
    core.send(outputs_of(1))  # while nobody listens
    asyncio.run(second())


def test_async_death_ends_calls_and_outputs(core: ScriptedCore) -> None:
    async def go() -> None:
        client = await async_client(core)
        call = asyncio.create_task(client.call("stats"))
        await asyncio.sleep(0)
        core.send(outputs_of(1))
        core.die()
        assert await client.get_outputs() == outputs_of(1)
        with pytest.raises(EngineDeadError, match="it was killed"):
            await client.get_outputs()
        with pytest.raises(EngineDeadError, match="it was killed"):
            await call
        with pytest.raises(EngineDeadError, match="it was killed"):
            client.check_alive()
        await client.close()

    asyncio.run(go())


def test_calls_end_with_the_reason_that_the_front_end_gives(core: ScriptedCore) -> None:
    async def go() -> None:
        client = await async_client(core)
        call = asyncio.create_task(client.call("stats"))
        await asyncio.sleep(0)
        client.fail_calls(EngineDeadError("closed"))
        with pytest.raises(EngineDeadError, match="closed"):
            await call
        await client.close()

    asyncio.run(go())


def test_async_client_can_be_closed_without_an_event_loop(core: ScriptedCore) -> None:
    clients: list[AsyncClient] = []

    async def go() -> None:
        clients.append(await async_client(core))

    asyncio.run(go())
    clients[0].close_blocking()
    assert core.ended == ["stop"]
