"""Engine-core processes of several replicas under a real supervisor, without a model."""

import dataclasses
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from headrace.configs.config import EngineConfig
from headrace.engine_core.client import SyncClient
from headrace.engine_core.control_messages import Stop
from headrace.engine_core.messages import EngineCoreRequest
from headrace.engine_core.supervisor import Supervisor, SupervisorLink, SupervisorThread
from tests.engine_core.factories import expected_output, make_config, make_request
from tests.engine_core.fake_executor import NAME, POISON

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

NUM_REQUESTS = 24
MAX_TOKENS = 40


def config_of(num_replicas: int, num_local: int, first: int) -> EngineConfig:
    config = make_config(max_num_seqs=8, max_num_batched_tokens=64)
    parallel = dataclasses.replace(
        config.parallel_config,
        data_parallel_size=num_replicas,
        data_parallel_size_local=num_local,
        data_parallel_start_rank=first,
        distributed_executor_backend=NAME,
    )
    recovery = dataclasses.replace(
        config.recovery_config, allow_replay_after_rpc=True, max_restarts=100
    )
    return dataclasses.replace(config, parallel_config=parallel, recovery_config=recovery)


@pytest.fixture(scope="module", autouse=True)
def importable_executor() -> Iterator[None]:
    """Engine cores get this process's `sys.path`."""
    root = str(Path(__file__).parent.parent.parent)
    sys.path.append(root)
    yield
    sys.path.remove(root)


def start(config: EngineConfig) -> SyncClient:
    client = SyncClient(SupervisorThread(has_worker=False))
    try:
        client.send_config(config)
        client.wait_ready(lambda phase: None)
    except BaseException:
        client.close()
        raise
    return client


@pytest.fixture(scope="module")
def client() -> Iterator[SyncClient]:
    client = start(config_of(2, 2, 0))
    yield client
    client.close()


def make_requests(name: str) -> list[EngineCoreRequest]:
    return [
        make_request(f"{name}-{i}", [1 + i % 30, 2, 3 + i % 7], max_tokens=MAX_TOKENS, n=1 + i % 2)
        for i in range(NUM_REQUESTS)
    ]


def run(
    client: SyncClient, requests: list[EngineCoreRequest], kill: tuple[int, int] | None = None
) -> dict[tuple[str, int], tuple[list[int], str | None]]:
    """Outputs and finish reasons by choice. `kill`: the engine core of that rank, after so many
    messages.
    """
    for request in requests:
        client.add_request(request)
    tokens: dict[tuple[str, int], list[int]] = {}
    ends: dict[tuple[str, int], str | None] = {}
    num_choices, num_messages = sum(len(request.choices) for request in requests), 0
    while len(ends) < num_choices:
        message = client.get_outputs()
        num_messages += 1
        if kill is not None and num_messages == kill[1]:
            psutil.Process(pids(client)[kill[0]]).kill()
        for output in message.outputs:
            key = (output.request_id, output.index)
            known = tokens.setdefault(key, [])
            assert output.start == len(known), "exactly once"
            known += output.new_token_ids
            if output.finish_reason is not None:
                ends[key] = output.finish_reason
    return {key: (tokens[key], end) for key, end in ends.items()}


def expected(requests: list[EngineCoreRequest]) -> dict[tuple[str, int], tuple[list[int], str]]:
    return {
        (request.request_id, choice.index): expected_output(request, choice.index, 64)[:2]
        for request in requests
        for choice in request.choices
    }


def pids(client: SyncClient) -> dict[int, int]:
    replicas = client._session.replicas
    return {rank: view.ready.pid for rank, view in replicas.items() if view.ready is not None}


def test_both_run_and_results_are_in_order_of_rank(client: SyncClient) -> None:
    requests = make_requests("a")
    assert run(client, requests) == expected(requests)
    decisions = client._session.router.decisions
    assert all(counts.total() >= NUM_REQUESTS // 4 for counts in decisions.values())
    assert client.call_workers("anything", timeout=10) == [0, 1]
    assert client.call("reset_prefix_cache", timeout=10) is True


@pytest.mark.parametrize(("rank", "after"), [(0, 1), (1, 10), (0, 30), (1, 60)])
def test_one_is_killed(client: SyncClient, rank: int, after: int) -> None:
    requests, before = make_requests(f"{rank}-{after}"), pids(client)
    assert run(client, requests, (rank, after)) == expected(requests)
    assert client.call("check_integrity", timeout=20) == []  # it waits for both
    now = pids(client)
    assert now[rank] != before[rank] and now[1 - rank] == before[1 - rank]
    assert client._session.router.load(0) == client._session.router.load(1) == 0


def test_both_are_killed(client: SyncClient) -> None:
    requests = make_requests("both")
    for request in requests:
        client.add_request(request)
    for pid in pids(client).values():
        psutil.Process(pid).kill()
    assert run(client, []) == {}
    found: dict[tuple[str, int], list[int]] = {}
    wanted = expected(requests)
    while sum(map(len, found.values())) < sum(len(ids) for ids, _ in wanted.values()):
        for output in client.get_outputs().outputs:
            found.setdefault((output.request_id, output.index), []).extend(output.new_token_ids)
    assert found == {key: ids for key, (ids, _) in wanted.items()}
    assert client.call("check_integrity", timeout=20) == []  # it waits for both


def test_poison_fails_alone(client: SyncClient) -> None:
    """It takes two replicas down, one after the other, and no third one."""
    requests = make_requests("p")
    before = sum(view.stats.num_restarts for view in client._session.replicas.values())
    bad = make_request("bad", [POISON, 1], max_tokens=5)
    found = run(client, [*requests[:9], bad, *requests[9:]])
    assert found.pop(("bad", 0)) == ([], "error")
    assert found == expected(requests)
    assert client.call("check_integrity", timeout=20) == []
    after = sum(view.stats.num_restarts for view in client._session.replicas.values())
    assert after - before == 2


def test_ranks_of_a_hybrid_server() -> None:
    client = start(config_of(4, 2, 2))
    try:
        assert sorted(pids(client)) == [2, 3]
        assert client.call_workers("anything", timeout=10) == [2, 3]
        requests = make_requests("h")
        assert run(client, requests) == expected(requests)
    finally:
        client.close()


def test_several_clients_see_each_others_requests() -> None:
    """Through the engine cores' reports; each gets its own outputs, also after a loss."""
    supervisor = Supervisor(has_worker=False, ends_with_clients=False)
    links = [
        SupervisorLink(name, Connection(supervisor.connect(name).detach()), 0.0, has_others=True)
        for name in ("first", "second")
    ]
    thread = threading.Thread(target=supervisor.run)
    thread.start()
    first, second = (SyncClient(link) for link in links)
    try:
        first.send_config(config_of(2, 2, 0))
        first.wait_ready(lambda phase: None)
        second._session.config = config_of(2, 2, 0)
        second.wait_ready(lambda phase: None)
        busy = make_requests("first")
        for request in busy:
            first.add_request(request, rank=0)
        router = second._session.router
        while router.load(0) < 500:  # that is what it hears of the other's requests
            second.get_outputs()
        assert router.load(1) == 0
        few = make_requests("second")[:4]
        assert run(second, few) == expected(few)
        assert router.decisions[1].total() == 4 and not router.decisions[0]
        psutil.Process(pids(first)[1]).kill()
        again = make_requests("again")
        assert run(second, again) == expected(again)
        left = {request.request_id for request in busy}
        while left:
            for output in first.get_outputs().outputs:
                assert output.request_id.startswith("first")
                if output.request_id not in first._session.ledger:
                    left.discard(output.request_id)
    finally:
        links[0].channel.send(Stop())
        thread.join(10)
        first.close()
        second.close()
    assert not thread.is_alive()
