"""Clients of several replicas: routing, losses that others make up for, calls to all."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from headrace.configs.config import EngineConfig
from headrace.configs.errors import CallLostError
from headrace.engine_core.client import AsyncClient, SyncClient
from headrace.engine_core.control_messages import Configure, EngineDown
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
from tests.engine_core.scripted_core import (
    READY,
    ScriptedCore,
    config_of,
    make_request,
    outputs_of,
)

OTHER_NUMERICS = msgspec.structs.replace(READY, contract_id="2")


@pytest.fixture
def core(tmp_path: Path) -> Iterator[ScriptedCore]:
    core = ScriptedCore(tmp_path)
    yield core
    core.close()


def sync_client(core: ScriptedCore, config: EngineConfig | None = None) -> SyncClient:
    client = SyncClient(core.link)
    client.send_config(config or config_of(2))
    assert isinstance(core.channel.receive(), Configure)
    core.come_up()
    core.come_up(rank=1)
    client.wait_ready(lambda phase: None)
    return client


def tokens(message: EngineCoreOutputs) -> list[int]:
    return [token for output in message.outputs for token in output.new_token_ids]


def names(core: ScriptedCore, rank: int, count: int) -> list[str]:
    messages = [core.take(rank) for _ in range(count)]
    assert all(isinstance(message, EngineCoreRequest) for message in messages)
    return [message.request_id for message in messages]


def test_requests_are_spread_and_outputs_say_where_they_are_from(core: ScriptedCore) -> None:
    client = sync_client(core)
    assert client.num_blocks == {0: 8, 1: 8}
    for name in "abcd":
        client.add_request(make_request(name))
    found = {rank: names(core, rank, 2) for rank in (0, 1)}
    assert sorted(found[0] + found[1]) == ["a", "b", "c", "d"]
    for rank in (0, 1):
        core.send(outputs_of(0, name=found[rank][0]), rank)
    messages = [client.get_outputs() for _ in range(2)]
    assert sorted((message.rank, *tokens(message)) for message in messages) == [(0, 0), (1, 0)]
    assert all(sum(message.stats.routed.values()) == 2 for message in messages)
    client.abort(found[1][1])
    assert core.take(1) == AbortRequest(found[1][1])
    client.close()


def test_a_pinned_request_stays_where_it_is(core: ScriptedCore) -> None:
    """It waits for its replica, whatever others could do."""
    client = sync_client(core)
    for name in "abc":
        client.add_request(make_request(name), rank=1)
    assert names(core, 1, 3) == ["a", "b", "c"]
    core.send(outputs_of(0), 1)
    assert client.get_outputs().stats.routed == {"pinned": 3}
    core.die(rank=1)
    client.get_outputs()
    client.add_request(make_request("d"), rank=1)
    client.add_request(make_request("e"))
    assert names(core, 0, 1) == ["e"]
    core.come_up(rank=1)
    client.get_outputs()
    assert names(core, 1, 4) == ["a", "b", "c", "d"]
    client.close()


def test_others_take_the_requests_of_a_lost_replica_at_once(core: ScriptedCore) -> None:
    client = sync_client(core)
    client.add_request(make_request("a", 2))
    entry = client._session.ledger.get("a")
    assert entry is not None and entry.rank is not None
    lost, kept = entry.rank, 1 - entry.rank
    assert names(core, lost, 1) == ["a"]
    client.add_request(make_request("b"))
    assert names(core, kept, 1) == ["b"]
    core.send(outputs_of(0, 1), lost)
    core.die([Suspect("a", 0, 2, 3)], rank=lost)
    first, own = client.get_outputs(), client.get_outputs()
    assert tokens(first) == [0, 1] and first.rank == own.rank == lost
    assert own.stats.num_waiting == 0 and own.stats.num_replayed_requests == 1
    replay = core.take(kept)
    assert replay.choices == [ChoiceState(0, [0, 1], 3), ChoiceState(1)]
    core.send(outputs_of(1, 2), kept)
    second = client.get_outputs()
    assert tokens(second) == [2] and second.stats.routed["moved"] == 1
    core.come_up(rank=lost)
    back = client.get_outputs()
    assert back.rank == lost and back.stats.num_restarts == 1
    client.add_request(make_request("c"), rank=lost)
    assert names(core, lost, 1) == ["c"]  # and nothing else: it has moved
    client.close()


@pytest.mark.parametrize("what", ["numerics", "rpc"])
def test_what_no_other_may_go_on_with_waits(core: ScriptedCore, what: str) -> None:
    client = SyncClient(core.link)
    client.send_config(config_of(2))
    core.come_up()
    core.come_up(OTHER_NUMERICS if what == "numerics" else READY, rank=1)
    client.wait_ready(lambda phase: None)
    for name in "abcd":
        client.add_request(make_request(name))
    mine = names(core, 0, 2)
    core.send(outputs_of(0, name=mine[0]))
    client.get_outputs()
    core.die(was_modified=what == "rpc")
    waiting = client.get_outputs()
    theirs = names(core, 1, 2)
    if what == "numerics":  # nothing was seen of the other one
        assert names(core, 1, 1) == [mine[1]]
    assert waiting.stats.num_waiting == (1 if what == "numerics" else 2)
    assert not set(theirs) & set(mine)
    core.come_up()
    back = client.get_outputs()
    if what == "numerics":
        assert names(core, 0, 1) == [mine[0]]
    else:
        assert {output.request_id for output in back.outputs} == set(mine)
        assert all(output.fault is not None for output in back.outputs)
    client.close()


def test_new_requests_go_to_those_that_are_up(core: ScriptedCore) -> None:
    client = sync_client(core)
    core.die(rank=1)
    client.get_outputs()
    for name in "ab":
        client.add_request(make_request(name))
    assert names(core, 0, 2) == ["a", "b"]
    core.die()
    client.get_outputs()
    client.add_request(make_request("c"))
    core.come_up(rank=1)
    client.get_outputs()
    assert sorted(names(core, 1, 3)) == ["a", "b", "c"]
    client.close()


def test_stats_of_an_engine_core_count_until_they_say_so(core: ScriptedCore) -> None:
    """What was sent since a report stays on top of it."""
    client = sync_client(core)
    client.add_request(make_request("a"), rank=0)
    core.take(0)
    router = client._session.router
    cost = router.load(0)
    assert cost > 0
    core.send(EngineCoreOutputs([], EngineStats(num_outstanding_tokens=5), num_received=0))
    client.get_outputs()
    assert router.load(0) == 5 + cost
    core.send(EngineCoreOutputs([], EngineStats(num_outstanding_tokens=7), num_received=1))
    client.get_outputs()
    assert router.load(0) == 7
    client.close()


def test_calls_go_to_all_and_results_are_in_order_of_rank(core: ScriptedCore) -> None:
    client = sync_client(core)
    for rank, values in ((1, ["c", "d"]), (0, ["a", "b"])):
        core.send(UtilityResult(1, workers=[WorkerResult(value) for value in values]), rank)
    assert client.call_workers("name", timeout=5) == ["a", "b", "c", "d"]
    assert [core.take(rank) for rank in (0, 1)] == [WorkerCall(1, "name")] * 2
    for call_id, (value, expected) in enumerate(((True, True), (False, False)), start=2):
        core.send(UtilityResult(call_id, True), 0)
        core.send(UtilityResult(call_id, value), 1)
        assert client.call("reset_prefix_cache", timeout=5) is expected
    core.send(UtilityResult(4, [1]), 1)
    core.send(UtilityResult(4, [0]), 0)
    assert client.call("stats", timeout=5) == [[0], [1]]
    for rank in (0, 1):
        core.send(UtilityResult(5, {"weight_version": "v2"}), rank)
    assert client.call("weight_info", timeout=5) == {"weight_version": "v2"}
    client.close()


def test_a_call_waits_for_all_and_is_lost_with_any(core: ScriptedCore) -> None:
    client = sync_client(core)
    core.die(rank=1)
    with pytest.raises(TimeoutError):
        client.call("stats", timeout=0.05)
    core.come_up(rank=1)
    client.check_alive()
    core.send(UtilityResult(2, 0), 0)
    core.die(rank=1)
    with pytest.raises((CallLostError, TimeoutError)):
        client.call("stats", timeout=0.2)
    client.close()


def test_a_client_that_comes_while_one_is_lost(core: ScriptedCore) -> None:
    client = SyncClient(core.link)
    client.send_config(config_of(2))
    core.channel.send(EngineDown(0, 3, "it was lost before"))
    core.come_up(rank=1)
    client.wait_ready(lambda phase: None)
    client.add_request(make_request("a"))
    assert names(core, 1, 1) == ["a"]
    client.close()


def test_async(core: ScriptedCore) -> None:
    """Sockets of both are watched, across losses; calls get both answers."""

    async def go() -> None:
        client = AsyncClient(core.link)
        client.attach()
        client.send_config(config_of(2), allows_callables=False)
        core.come_up()
        waiting = asyncio.create_task(client.wait_ready(lambda phase: None))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        core.come_up(rank=1)
        await waiting
        for rank in (0, 1):
            client.add_request(make_request("ab"[rank]), rank)
        for rank in (0, 1):
            assert (await asyncio.to_thread(core.take, rank)).request_id == "ab"[rank]
            core.send(outputs_of(0, name="ab"[rank]), rank)
        found = [await client.get_outputs() for _ in range(2)]
        assert sorted(message.rank for message in found) == [0, 1]
        client.add_request(make_request("c"))
        core.die(rank=1)
        while not (message := await client.get_outputs()).rank:
            pass
        assert client.is_up and message.stats.num_waiting == 1  # the pinned one
        core.come_up(rank=1)
        await client.get_outputs()
        call = asyncio.create_task(client.call("stats"))
        while not isinstance(await asyncio.to_thread(core.take, 1), UtilityCall):
            pass
        core.send(UtilityResult(1, True), 1)
        core.send(UtilityResult(1, True), 0)
        assert await asyncio.wait_for(call, 5) is True
        core.die()
        core.die(rank=1)
        await client.get_outputs()
        await client.get_outputs()
        assert not client.is_up
        client.check_alive()
        await client.close()

    asyncio.run(go())
