"""Workers as processes, with a worker class that only records: messages, deaths, deadlines."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.configs.config import EngineConfig, ModelConfig, ParallelConfig
from headrace.configs.errors import ConfigurationError, EngineDeadError, InvalidRequestError
from headrace.executors.multiproc import MultiprocExecutor
from headrace.executors.worker_calls import decode_results, encode_call
from headrace.workers.protocol import NewRequestData, SchedulerOutput

WORKER = """
import os, signal, time
from headrace.configs.errors import ConfigurationError
from headrace.workers.protocol import KVCacheSpec, ModelRunnerOutput, WorkerInfo

class Worker:
    fails_at = slow_at = None
    def __init__(self, config, setup):
        self.config, self.setup, self.steps = config, setup, []
    def init_device(self):
        if self.config.model_config.model == "fails" and self.setup.rank == 1:
            raise ConfigurationError("rank 1 will not start")
        if self.config.model_config.model == "hangs" and self.setup.rank == 1:
            time.sleep(60)
    def load_model(self, progress):
        progress("shard 1 of 1")
    def init_kv_cache(self):
        return WorkerInfo(KVCacheSpec((), 1, 16, 1, 8, 2), 7, "contract", {"load": 0.1}, {})
    def warm_up(self):
        pass
    def execute_model(self, step):
        if step.new_requests and step.new_requests[0].token_ids == [self.setup.rank]:
            raise RuntimeError("this step cannot be run")
        self.steps.append(step.step)
        return ModelRunnerOutput(step.step, {}, {}, {})
    def shutdown(self):
        pass
    def seen(self, extra=0):
        return [self.setup.rank, self.steps, extra, os.getpid()]
    def wrong(self):
        raise KeyError(self.setup.rank)
    def wait(self, seconds):
        time.sleep(seconds)
    def big(self, size):
        return b"x" * size
"""
MODEL = ModelConfig("m", "p", "p", ("m",), "LlamaForCausalLM", {}, "float32", 64, 32, 1)

Start = Callable[..., MultiprocExecutor]


@pytest.fixture
def deaths() -> threading.Event:
    return threading.Event()


@pytest.fixture
def start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: threading.Event
) -> Iterator[Start]:
    (tmp_path / "recording_worker.py").write_text(WORKER)
    monkeypatch.syspath_prepend(str(tmp_path))
    executors: list[MultiprocExecutor] = []

    def start_executor(
        tensor: int = 2, pipeline: int = 1, model: str = "m", timeout: float = 30.0
    ) -> MultiprocExecutor:
        parallel = ParallelConfig(
            tensor_parallel_size=tensor, pipeline_parallel_size=pipeline,
            distributed_executor_backend="mp", worker_cls="recording_worker.Worker",
            start_timeout_s=timeout,
        )  # fmt: skip
        config = EngineConfig(replace(MODEL, model=model), parallel_config=parallel)
        executors.append(MultiprocExecutor(config, True, deaths.set))
        executors[-1].start(lambda phase: None)
        return executors[-1]

    yield start_executor
    for executor in executors:
        executor.shutdown()


def step(number: int, token_ids: list[int] | None = None) -> SchedulerOutput:
    from headrace.configs.sampling_params import SamplingParams
    from headrace.workers.protocol import ChoiceId

    new = []
    if token_ids is not None:
        new = [NewRequestData(ChoiceId("a"), token_ids, 1, SamplingParams(), [[1]], 0)]
    return SchedulerOutput(number, new, [], {}, [])


def call(executor: MultiprocExecutor, method: Any, *args: Any) -> list[Any]:
    return decode_results(executor.call_workers(encode_call(1, method, args, None)))


def pids(executor: MultiprocExecutor) -> list[int]:
    return [result[3] for result in call(executor, "seen")]


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_all_get_every_step_and_one_answers(start: Start) -> None:
    executor = start(tensor=2, pipeline=2)
    assert executor.max_in_flight == 2
    executor.submit(step(1))
    executor.submit(step(2))
    assert [executor.collect().step, executor.collect().step] == [1, 2]
    results = call(executor, "seen", 5)
    assert [result[:3] for result in results] == [[rank, [1, 2], 5] for rank in range(4)]
    assert len({result[3] for result in results} | {os.getpid()}) == 5
    executor.submit(step(3))
    assert [r[1] for r in call(executor, "seen")] == [[1, 2, 3]] * 4  # in order with the steps
    assert executor.collect().step == 3


def test_calls(start: Start) -> None:
    executor = start()
    assert call(executor, lambda worker, x: worker.setup.rank + x, 10) == [10, 11]
    with pytest.raises(InvalidRequestError, match="no method 'nothing'"):
        call(executor, "nothing")
    with pytest.raises(KeyError) as raised:
        call(executor, "wrong")
    assert "raised by worker 0" in raised.value.__notes__[0] and "def" not in str(raised.value)
    assert call(executor, "seen")[1][0] == 1  # they go on


def test_large_messages_both_ways(start: Start) -> None:
    """Neither side waits for the other to read: 8 MB fill every buffer between them."""
    executor = start(tensor=1, pipeline=2)
    size = 8 << 20
    assert [len(part) for part in call(executor, "big", size)] == [size, size]
    many = list(range(2, 1_000_000))
    for number in (1, 2):
        executor.submit(step(number, many))
    assert [executor.collect().step for _ in range(2)] == [1, 2]


def test_a_failed_step_ends_a_group_but_not_a_single_worker(start: Start) -> None:
    alone = start(tensor=1)
    alone.submit(step(1, [0]))
    with pytest.raises(Exception, match="this step cannot be run"):
        alone.collect()
    alone.submit(step(2))
    assert alone.collect().step == 2
    group = start(tensor=2)
    running = pids(group)
    group.submit(step(1, [1]))
    with pytest.raises(EngineDeadError, match=r"worker 1.*this step cannot be run"):
        group.collect()
        group.collect()
    group.shutdown()
    assert not any(map(is_running, running))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_is_noticed(start: Start, deaths: threading.Event, rank: int) -> None:
    """Within 100 ms while nothing is asked of it: the margin is for a busy machine."""
    executor = start()
    running = pids(executor)
    os.kill(running[rank], signal.SIGKILL)
    assert deaths.wait(5.0)
    with pytest.raises(EngineDeadError, match=rf"worker {rank} .*killed by SIGKILL"):
        executor.check()
    with pytest.raises(EngineDeadError, match=rf"worker {rank} .*killed by SIGKILL"):
        executor.submit(step(1))
    executor.shutdown()
    assert not any(map(is_running, running))


def test_a_worker_killed_in_a_call(start: Start) -> None:
    executor = start()
    victim = pids(executor)[1]
    timer = threading.Timer(0.2, os.kill, (victim, signal.SIGKILL))
    timer.start()
    with pytest.raises(EngineDeadError, match=r"worker 1 .*killed by SIGKILL"):
        call(executor, "wait", 20)


def test_a_start_that_fails(start: Start) -> None:
    with pytest.raises(ConfigurationError, match="rank 1 will not start"):
        start(model="fails")


def test_a_start_that_takes_too_long(start: Start) -> None:
    with pytest.raises(EngineDeadError) as raised:
        start(model="hangs", timeout=2.0)
    message = str(raised.value)
    assert "1 of 2 workers were not ready within 2 s" in message
    assert "worker 1 (pid" in message and "was at 'device'" in message
    assert "interface" in message


def test_nothing_is_left_when_the_program_is_killed(tmp_path: Path) -> None:
    import subprocess

    (tmp_path / "recording_worker.py").write_text(WORKER)
    program = f"""
import sys, time
sys.path.insert(0, {str(tmp_path)!r})
from headrace.configs.config import EngineConfig, ModelConfig, ParallelConfig
from headrace.executors.multiproc import MultiprocExecutor
from headrace.executors.worker_calls import encode_call
model = ModelConfig("m", "p", "p", ("m",), "LlamaForCausalLM", {{}}, "float32", 64, 32, 1)
parallel = ParallelConfig(tensor_parallel_size=2, worker_cls="recording_worker.Worker")
executor = MultiprocExecutor(EngineConfig(model, parallel_config=parallel), True, lambda: None)
executor.start(lambda phase: None)
print([r.value[3] for r in executor.call_workers(encode_call(1, "seen", (), None))], flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        running = [int(word) for word in parent.stdout.readline().decode().strip("[]\n").split(",")]
        assert all(map(is_running, running))
        parent.kill()
    deadline = time.monotonic() + 5
    while any(map(is_running, running)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, running))
