"""Workers of an agent's, which is another process on this machine, met at a loopback address."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.configs.config import EngineConfig
from headrace.configs.errors import EngineDeadError
from headrace.executors.multinode import MultiNodeExecutor
from headrace.executors.worker_calls import decode_results, encode_call
from headrace.executors.worker_hub import DeploymentKey
from tests.executors.remote_cases import Started, make_config, make_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]
AGENT = """
import sys
from headrace.configs.config import ParallelConfig
from headrace.configs.errors import HeadraceError
from headrace.executors.node_agent import run_agent
sys.path.insert(0, sys.argv[4])
try:
    parallel = ParallelConfig(
        tensor_parallel_size=4, distributed_executor_backend="mp", nnodes=2, node_rank=1,
        master_addr="127.0.0.1", master_port=int(sys.argv[1]), cluster_key_file=sys.argv[2],
        start_timeout_s=float(sys.argv[3]),
    )
    sys.exit(run_agent(parallel))
except HeadraceError as error:
    sys.exit(f"error: {error}")
"""
StartAgent = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = str(tmp_path / "cluster.key")
    DeploymentKey.generate().write(path)
    return path


@pytest.fixture
def start_agent(port: int, key_file: str) -> Iterator[StartAgent]:
    agents: list[subprocess.Popen[str]] = []

    def start(key: str = key_file, timeout_s: float = 60.0) -> "subprocess.Popen[str]":
        agent = subprocess.Popen(
            [sys.executable, "-P", "-c", AGENT, str(port), key, str(timeout_s), str(ROOT)],
            stderr=subprocess.PIPE,
            text=True,
        )
        agents.append(agent)
        return agent

    yield start
    for agent in agents:
        agent.kill()
        agent.communicate()


@pytest.fixture
def config(port: int, key_file: str, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    """Two workers on each of two machines."""
    monkeypatch.syspath_prepend(str(ROOT))
    config = make_config(tp=4)
    parallel = replace(
        config.parallel_config, nnodes=2, master_port=port, cluster_key_file=key_file
    )
    return replace(config, parallel_config=parallel)


def test_steps_and_calls(start_agent: StartAgent, config: EngineConfig) -> None:
    """As on one machine; with the end of the engine, the agent's part ends."""
    agent = start_agent()
    started = Started(MultiNodeExecutor, config)
    executor = started.executor
    for number in range(1, 4):
        executor.submit(make_step(number))
        assert executor.collect().step == number

    def call(method: str, *args: Any) -> list[Any]:
        return decode_results(executor.call_workers(encode_call(1, method, args, None)))

    assert call("seen") == [[1, 2, 3]] * 4
    places = call("place")
    assert [place["local"] for place in places] == [[0, 2], [1, 2], [0, 2], [1, 2]]
    parents = [psutil.Process(place["pid"]).ppid() for place in places]
    assert parents == [os.getpid()] * 2 + [agent.pid] * 2
    with pytest.raises(LookupError):
        call("fail_on", 3)
    executor.shutdown()
    executor.shutdown()
    assert agent.wait(10) == 0
    assert not any(psutil.pid_exists(place["pid"]) for place in places)


@pytest.mark.parametrize("victim", ["agent", "its worker", "our worker"])
def test_a_loss_is_seen_and_survived(
    start_agent: StartAgent, config: EngineConfig, victim: str
) -> None:
    """While nothing is asked of them. An agent that lives waits for the next engine core."""
    agent = start_agent()
    started = Started(MultiNodeExecutor, config)
    call = encode_call(1, "place", (), None)
    places = decode_results(started.executor.call_workers(call))
    pid = {"agent": agent.pid, "its worker": places[3]["pid"], "our worker": places[1]["pid"]}
    os.kill(pid[victim], signal.SIGKILL)
    assert started.death.wait(10)
    words = {"agent": "node 1 .*is lost", "its worker": "worker 3 on node 1 is gone: .*SIGKILL"}
    with pytest.raises(EngineDeadError, match=words.get(victim, "worker 1 .*SIGKILL")):
        started.executor.check()
    started.executor.shutdown()
    if victim == "agent":
        agent = start_agent()
    again = Started(MultiNodeExecutor, config)
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(place["pid"]) for place in places[2:]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    again.executor.submit(make_step(1))
    assert again.executor.collect().step == 1
    again.executor.shutdown()
    assert agent.wait(10) == 0


def test_another_key_is_refused(
    start_agent: StartAgent, config: EngineConfig, tmp_path: Path
) -> None:
    other = str(tmp_path / "other.key")
    DeploymentKey.generate().write(other)
    agent = start_agent(other)
    parallel = replace(config.parallel_config, start_timeout_s=4.0)
    with pytest.raises(EngineDeadError) as late:
        Started(MultiNodeExecutor, replace(config, parallel_config=parallel))
    text = str(late.value)
    assert "node 1 of 2 did not come within 4 s" in text and "--headless" in text
    assert f"listens at 127.0.0.1:{parallel.master_port}" in text
    _, error = agent.communicate(timeout=10)
    assert agent.returncode == 1 and "refuses the key in" in error


def test_nobody_is_there(start_agent: StartAgent, port: int) -> None:
    agent = start_agent(timeout_s=0.5)
    _, error = agent.communicate(timeout=20)
    assert agent.returncode == 1
    assert f"machine 0 was not reached at 127.0.0.1:{port} within 0.5 s" in error
