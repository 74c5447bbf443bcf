"""Both clients against a scripted supervisor and engine core: calls, timeouts, losses, loops."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from headrace.configs.errors import CallLostError, EngineDeadError, ModelFileError
from headrace.engine_core.client import AsyncClient, SyncClient
from headrace.engine_core.control_messages import Configure, StartupProgress
from headrace.engine_core.fence import Suspect
from headrace.engine_core.messages import (
    AbortRequest,
    ChoiceState,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineStats,
    UtilityCall,
    UtilityResult,
    WorkerCall,
    WorkerResult,
)
from headrace.workers.protocol import RequestFault
from tests.engine_core.scripted_core import CONFIG, READY, ScriptedCore, make_request, outputs_of

REQUEST = make_request()


@pytest.fixture
def core(tmp_path: Path) -> Iterator[ScriptedCore]:
    core = ScriptedCore(tmp_path)
    yield core
    core.close()


def sync_client(core: ScriptedCore) -> SyncClient:
    client = SyncClient(core.link)
    core.come_up()
    client.wait_ready(lambda phase: None)
    return client


def tokens(message: EngineCoreOutputs) -> list[int]:
    return [token for output in message.outputs for token in output.new_token_ids]


def test_sync_start_reports_phases_and_failures(core: ScriptedCore) -> None:
    client, phases = SyncClient(core.link), []
    client.send_config(CONFIG)
    message = core.channel.receive()
    assert isinstance(message, Configure)
    assert message.hello.config == CONFIG and message.hello.allows_callables
    core.channel.send(StartupProgress("weights"))
    core.give_up("model_file", "no such file")
    with pytest.raises(ModelFileError, match="no such file"):
        client.wait_ready(phases.append)
    assert phases == ["weights"]
    client.close()


def test_sync_requests_outputs_and_close(core: ScriptedCore) -> None:
    client = sync_client(core)
    client.add_request(make_request("a", 2))
    assert core.take() == make_request("a", 2)
    core.send(outputs_of(0))
    assert client.get_outputs().outputs == outputs_of(0).outputs
    client.abort("a", 1)
    assert core.take() == AbortRequest("a", 1)
    client.check_alive()
    client.close()
    client.close()
    assert core.channel.receive() is None  # it is not the client's own
    for use in (client.check_alive, lambda: client.add_request(REQUEST)):
        with pytest.raises(EngineDeadError, match="closed"):
            use()


def test_sync_call_keeps_outputs_that_come_meanwhile(core: ScriptedCore) -> None:
    client = sync_client(core)
    client.add_request(REQUEST)
    core.take()
    core.send(outputs_of(0))
    core.send(UtilityResult(1, [7, 8]))
    core.send(outputs_of(1))
    assert client.call("stats") == [7, 8]
    assert core.take() == UtilityCall(1, "stats")
    assert [client.get_outputs().stats.step for _ in range(2)] == [0, 1]
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


def test_sync_requests_outlive_the_engine_core(core: ScriptedCore) -> None:
    """Each token comes once, the engine core's last words included."""
    client = sync_client(core)
    client.add_request(make_request("a", 2))
    core.take()
    core.send(outputs_of(0, 1))
    core.die([Suspect("a", 0, 2, 3)])
    assert tokens(client.get_outputs()) == [0, 1]
    waiting = client.get_outputs()
    assert not waiting.outputs and waiting.stats.num_waiting == 2
    client.add_request(make_request("b"))
    core.come_up()
    first = client.get_outputs()
    assert first.stats.num_restarts == 1 and first.stats.recovery_s > 0
    assert first.stats.num_replayed_requests == 1
    assert core.take() == make_request("b")  # suspects come last
    replay = make_request("a", 2)
    replay.choices = [ChoiceState(0, [0, 1], 3), ChoiceState(1)]
    assert core.take() == replay
    core.send(outputs_of(1, 2))
    second = client.get_outputs()
    assert tokens(second) == [2] and second.outputs[0].start == 2
    assert second.stats.step == 3  # the first engine core's 1, and 2
    client.close()


def test_sync_a_loss_for_good_is_an_error_after_the_last_words(core: ScriptedCore) -> None:
    client = sync_client(core)
    client.add_request(REQUEST)
    core.take()
    core.send(outputs_of(0))
    core.die()
    core.give_up()
    assert tokens(client.get_outputs()) == [0]
    client.get_outputs()
    with pytest.raises(EngineDeadError, match="it was killed"):
        client.get_outputs()
    for use in (client.check_alive, lambda: client.add_request(REQUEST)):
        with pytest.raises(EngineDeadError, match="it was killed"):
            use()
    client.close()


def test_sync_calls_are_not_repeated_but_wait(core: ScriptedCore) -> None:
    client = sync_client(core)
    core.send(outputs_of(0))  # of nobody
    death = threading.Timer(0.1, core.die)
    death.start()
    with pytest.raises(CallLostError, match="stats"):
        client.call("stats")
    death.join()
    with pytest.raises(TimeoutError):
        client.call("stats", timeout=0.05)
    core.come_up()
    client.check_alive()  # it connects
    core.send(UtilityResult(3, 1))
    assert client.call("stats", timeout=5) == 1
    assert core.take() == UtilityCall(3, "stats")
    client.close()


def failure_of(client: SyncClient) -> RequestFault | None:
    while not (outputs := client.get_outputs().outputs):
        pass
    return outputs[0].fault


def test_the_request_to_blame_fails_alone(core: ScriptedCore) -> None:
    client = sync_client(core)
    client.add_request(REQUEST)
    client.add_request(make_request("b"))
    core.take()
    core.die([Suspect("a", 0, 1, 2)], blamed="a")
    fault = failure_of(client)
    assert fault is not None and fault.code == "engine_crash" and "killed" in fault.message
    core.come_up()
    client.get_outputs()
    assert core.take() == make_request("b")
    client.close()


@pytest.mark.parametrize("what", ["weights", "numerics", "rpc"])
def test_another_engine_does_not_go_on_with_a_text(core: ScriptedCore, what: str) -> None:
    client = sync_client(core)
    client.add_request(REQUEST)
    core.take()
    core.send(outputs_of(0))
    client.get_outputs()
    client.add_request(make_request("b"))
    core.take()
    core.die(was_modified=what == "rpc")
    changes = {"weights": {"weight_version": "2"}, "numerics": {"contract_id": "2"}, "rpc": {}}
    core.come_up(msgspec.structs.replace(READY, **changes[what]))
    fault = failure_of(client)
    assert fault is not None and fault.code == "engine_changed" and what in fault.message
    if what != "rpc":  # nothing was seen of this one
        assert core.take() == make_request("b")
    client.close()


async def async_client(core: ScriptedCore) -> AsyncClient:
    client = AsyncClient(core.link)
    client.attach()
    client.send_config(CONFIG, allows_callables=False)
    message = core.channel.receive()
    assert isinstance(message, Configure) and not message.hello.allows_callables
    core.come_up()
    await client.wait_ready(lambda phase: None)
    return client


def test_async_calls_outputs_and_timeouts(core: ScriptedCore) -> None:
    async def go() -> None:
        client = await async_client(core)
        client.add_request(REQUEST)
        assert await asyncio.to_thread(core.take) == REQUEST
        core.send(outputs_of(0))
        assert (await client.get_outputs()).outputs == outputs_of(0).outputs
        with pytest.raises(TimeoutError, match="slow"):
            await client.call_workers("slow", timeout=0.05)
        call = asyncio.create_task(client.call("stats"))
        await asyncio.to_thread(core.take)
        assert await asyncio.to_thread(core.take) == UtilityCall(2, "stats")
        core.send(UtilityResult(1, workers=[WorkerResult("late")]))
        core.send(UtilityResult(2, fault=RequestFault("model_file", "why")))
        with pytest.raises(ModelFileError, match="why"):
            await call
        await client.close()
        await client.close()

    asyncio.run(go())
    assert core.channel.receive() is None


def test_async_burst_is_not_missed(core: ScriptedCore) -> None:
    """The socket's descriptor signals once: everything that is there must be taken."""

    async def go() -> None:
        client = await async_client(core)
        for step in range(500):
            core.send(EngineCoreOutputs([], EngineStats(step=step)))
            if step % 7 == 0:
                client.add_request(make_request(str(step)))
        for step in range(500):
            assert (await asyncio.wait_for(client.get_outputs(), 5)).stats.step == step
        await client.close()

    asyncio.run(go())


def test_async_client_moves_to_another_event_loop(core: ScriptedCore) -> None:
    """Also past a loss that happens while nobody listens."""
    clients: list[AsyncClient] = []

    async def first() -> None:
        clients.append(await async_client(core))
        clients[0].add_request(REQUEST)
        await asyncio.to_thread(core.take)
        clients[0].detach()

    async def second() -> None:
        clients[0].attach()
        core.send(outputs_of(1))
        assert [tokens(await clients[0].get_outputs()) for _ in range(2)] == [[0], [1]]
        clients[0].detach()

    async def third() -> None:
        clients[0].attach()
        assert [tokens(await clients[0].get_outputs()) for _ in range(3)] == [[2], [], []]
        replay = await asyncio.to_thread(core.take)
        assert isinstance(replay, EngineCoreRequest)
        assert replay.choices == [ChoiceState(0, [0, 1, 2])]
        core.send(outputs_of(3))
        assert tokens(await clients[0].get_outputs()) == [3]
        await clients[0].close()

    asyncio.run(first())
    core.send(outputs_of(0))  # while nobody listens
    asyncio.run(second())
    core.send(outputs_of(2))
    time.sleep(0.05)
    core.die()
    core.come_up()
    asyncio.run(third())


def test_async_loss_ends_calls_and_nothing_else(core: ScriptedCore) -> None:
    async def go() -> None:
        client = await async_client(core)
        client.add_request(REQUEST)
        call = asyncio.create_task(client.call("stats"))
        await asyncio.to_thread(core.take)
        core.send(outputs_of(0))
        core.die()
        with pytest.raises(CallLostError):
            await call
        assert not client.is_up
        client.check_alive()
        late = asyncio.create_task(client.call("stats"))
        core.come_up()
        assert [tokens(await client.get_outputs()) for _ in range(3)] == [[0], [], []]
        replay = await asyncio.to_thread(core.take)
        assert replay.choices == [ChoiceState(0, [0])]
        assert await asyncio.to_thread(core.take) == UtilityCall(2, "stats")
        core.send(UtilityResult(2, "here"))
        assert await late == "here" and client.is_up
        core.send(outputs_of(0, 1))
        assert tokens(await client.get_outputs()) == [1]
        core.die()
        core.give_up()
        await client.get_outputs()
        with pytest.raises(EngineDeadError, match="it was killed"):
            await client.get_outputs()
        with pytest.raises(EngineDeadError, match="it was killed"):
            client.check_alive()
        with pytest.raises(EngineDeadError, match="it was killed"):
            await client.call("stats")
        await client.close()

    asyncio.run(go())


def test_a_supervisor_that_is_gone_is_an_error(core: ScriptedCore) -> None:
    async def go() -> None:
        client = await async_client(core)
        core.channel.close()
        with pytest.raises(EngineDeadError, match="supervisor"):
            await client.get_outputs()
        await client.close()

    asyncio.run(go())


def test_calls_end_with_the_reason_that_the_front_end_gives(core: ScriptedCore) -> None:
    async def go() -> None:
        client = await async_client(core)
        call = asyncio.create_task(client.call("stats"))
        await asyncio.sleep(0)
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
    assert core.channel.receive() is None
