"""Replicas on the nodes of a Ray cluster: the texts of one replica, whatever is lost meanwhile."""

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from headrace import EngineArgs, LLMEngine, SamplingParams
from headrace.configs.errors import ConfigurationError
from tests.e2e.server_process import wait_until
from tests.e2e.tiny_model import ENGINE_ARGUMENTS, save_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

TWO = {"data_parallel_size": 2, "data_parallel_backend": "ray", "max_restarts": 1000}
PROMPTS = [[256, 10 + i, 20 + i, 30] for i in range(16)]
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with a CPU each, both on this machine. This process does not connect to it."""
    pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)")
    from ray.cluster_utils import Cluster

    directory = tempfile.mkdtemp(prefix="hr-")  # a short name: sockets are in it
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "temp_dir": directory})
    cluster.second = cluster.add_node(**NODE)
    yield cluster
    cluster.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


def make_engine(path: Path, **fields: Any) -> LLMEngine:
    return LLMEngine.from_engine_args(EngineArgs(str(path), **{**ENGINE_ARGUMENTS, **fields}))


@pytest.fixture(scope="module")
def engine(tiny_model: Path, cluster: Any) -> Iterator[LLMEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", cluster.address)
        engine = make_engine(tiny_model, **TWO)
        yield engine
        engine.close()


def replicas(engine: LLMEngine) -> dict[int, Any]:
    return engine._client._session.replicas  # type: ignore[union-attr]


def core_of(engine: LLMEngine, rank: int) -> psutil.Process:
    return psutil.Process(replicas(engine)[rank].ready.pid)


def run(engine: LLMEngine, disturb: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """What each request gave; `disturb` is called while they run, on both replicas."""
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(
            max_tokens=80, ignore_eos=True, seed=i, temperature=i % 2, logprobs=i % 3
        )
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    ledger = engine._client._session.ledger  # type: ignore[union-attr]
    ranks = {entry.rank for entry in ledger.entries()}
    assert ranks == set(engine._client._session.ranks)  # type: ignore[union-attr]
    done: dict[str, Any] = {}
    num_outputs = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            num_outputs += 1
            if num_outputs == 100:
                disturb()
            if output.finished:
                done[output.request_id] = [
                    (c.token_ids, c.text, c.logprobs, c.finish_reason) for c in output.outputs
                ]
    return done


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path) -> dict[str, Any]:
    engine = make_engine(tiny_model)
    try:
        return run(engine)
    finally:
        engine.close()


def test_a_cluster_of_our_own(
    tiny_model: Path, undisturbed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is none, one is started for the replicas; it outlives each, and ends with all."""
    pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before, files = ray_processes(), ray_files()
    engine = make_engine(tiny_model, **TWO)
    try:
        own = psutil.Process().children()
        first = next(p for p in own if "headrace.engine_core" in p.cmdline())
        assert run(engine, first.kill) == undisturbed
        assert len(ray_files() - files) == 1
    finally:
        engine.close()
    wait_until(lambda: not ray_processes() - before, 10, "no process of Ray is left")
    wait_until(lambda: not ray_files() - files, 5, "no file is left")


def test_replicas_are_on_both_nodes(engine: LLMEngine, undisturbed: dict[str, Any]) -> None:
    """The one beside us is reached by a Unix socket, the other one at its node's address."""
    endpoints = [
        view.connection.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        for _, view in sorted(replicas(engine).items())
    ]
    assert [endpoint.partition(":")[0] for endpoint in endpoints] == ["ipc", "tcp"]
    listening = {
        connection.laddr.ip
        for connection in core_of(engine, 1).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {endpoints[1].removeprefix("tcp://").rpartition(":")[0]}
    assert run(engine) == undisturbed


def test_too_few_cpus(tiny_model: Path, engine: LLMEngine, cluster: Any) -> None:
    arguments = {**ENGINE_ARGUMENTS, **TWO, "tensor_parallel_size": 2}
    config = EngineArgs(str(tiny_model), **arguments).create_engine_config()
    parallel = dataclasses.replace(config.parallel_config, start_timeout_s=0.5)
    config = dataclasses.replace(config, parallel_config=parallel)
    with pytest.raises(ConfigurationError, match=r"needs 2 CPUs on one node; there are 2 CPUs"):
        LLMEngine(config)


@pytest.mark.parametrize(("rank", "lost"), [(0, "actor"), (1, "core"), (1, "node")])
def test_what_is_lost_costs_no_text(
    engine: LLMEngine, cluster: Any, undisturbed: dict[str, Any], rank: int, lost: str
) -> None:
    core = core_of(engine, rank)
    actor = core.parent()
    assert actor is not None

    def lose() -> None:
        if lost == "node":
            cluster.remove_node(cluster.second, allow_graceful=False)
        else:
            (core if lost == "core" else actor).kill()

    before = engine.front_end.stats.num_replayed_requests
    assert run(engine, lose) == undisturbed
    assert engine.front_end.stats.num_replayed_requests > before
    if lost == "node":
        cluster.second = cluster.add_node(**NODE)
    wait_until(lambda: engine._client.call("reset_prefix_cache"), 30, "both are there")
    wait_until(lambda: not core.is_running() and not actor.is_running(), 10, "the old one is gone")
    assert core_of(engine, rank).pid != core.pid


def test_nothing_is_left(engine: LLMEngine, cluster: Any) -> None:
    """Of engine cores and actors in a cluster that goes on."""
    cores = [core_of(engine, rank) for rank in (0, 1)]
    everyone = [*cores, *(core.parent() for core in cores)]
    directories = [Path(core.cmdline()[core.cmdline().index("--socket") + 1]) for core in cores]
    engine.close()
    wait_until(lambda: not any(p and p.is_running() for p in everyone), 5, "the end of all")
    assert not any(path.parent.exists() for path in directories)


def ray_files() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("headrace-ray-*"))


def ray_processes() -> set[int]:
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any("raylet" in word or "gcs_server" in word or "ray_keeper" in word for word in words):
            found.add(process.pid)
    return found
