"""Workers as actors of a real Ray cluster on this machine."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import headrace
from headrace.configs import environment
from headrace.configs.config import ParallelConfig
from headrace.configs.errors import ConfigurationError, EngineDeadError
from headrace.executors.ray_cluster import check_group
from headrace.executors.ray_executor import RayExecutor, worker_environ
from headrace.executors.worker_calls import decode_results, encode_call
from tests.executors.recording_worker import FAILING_STEP, FAILS_TO_LOAD, NEVER_LOADS
from tests.executors.remote_cases import Started, make_config, make_step

NUM_CPUS = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """This process is connected to a cluster of its own."""
    ray = pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)")
    from headrace.executors import ray_cluster

    ray_cluster.connect(ray, NUM_CPUS, None)
    yield ray
    ray_cluster.disconnect()


@pytest.fixture
def started(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Started]]:
    """Executors that tests have started, to be shut down. Their workers can import the tests."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    executors: list[Started] = []
    yield executors
    for entry in executors:
        entry.executor.shutdown()


pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning"),  # Ray's
]


def pids(executor: RayExecutor) -> list[int]:
    return [worker.facts.pid for worker in executor._workers if worker.facts is not None]


def wait_gone(processes: list[int], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while any(map(psutil.pid_exists, processes)):
        assert time.monotonic() < deadline, "processes are left behind"
        time.sleep(0.02)


@pytest.mark.slow
def test_steps_calls_and_places(started: list[Started], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker sees every step in order, one answers; calls give results by rank."""
    monkeypatch.setenv("HF_TEST_OF_COPYING", "yes")
    monkeypatch.setenv("MY_OWN", "too")
    monkeypatch.setenv("NOT_MY_OWN", "no")
    monkeypatch.setenv(environment.RAY_EXTRA_ENV_VARS.name, "A, MY_OWN")
    read_end, write_end = os.pipe()
    started.append(Started(RayExecutor, make_config(tp=2, pp=2), read_end))
    executor, info = started[0].executor, started[0].info
    assert info.num_blocks == 10, "the first worker's"
    assert started[0].phases[0] == "workers" and executor.max_in_flight == 2
    for number in range(1, 6):
        executor.submit(make_step(number))
        if number > 1:
            assert executor.collect().step == number - 1
    assert executor.collect().step == 5

    def call(method: str, *args: Any) -> list[Any]:
        return decode_results(executor.call_workers(encode_call(1, method, args, None)))

    assert call("seen") == [[1, 2, 3, 4, 5]] * 4
    places = call("place")
    assert [place["rank"] for place in places] == [0, 1, 2, 3]
    assert [place["local"] for place in places] == [[rank, 4] for rank in range(4)]
    assert [place["answers"] for place in places] == [False, False, True, False]
    assert call("variable", "HF_TEST_OF_COPYING") == ["yes"] * 4
    assert call("variable", "MY_OWN") == ["too"] * 4
    assert call("variable", "NOT_MY_OWN") == [None] * 4
    with pytest.raises(LookupError) as caught:
        call("fail_on", 1)
    assert "raised by worker 1" in caught.value.__notes__[0]
    os.close(read_end)
    os.write(write_end, b"x")  # the workers keep the other end open
    processes = pids(executor)
    executor.shutdown()
    executor.shutdown()
    wait_gone(processes)
    with pytest.raises(BrokenPipeError):
        os.write(write_end, b"x")
    os.close(write_end)
    with pytest.raises(EngineDeadError, match="shut down"):
        executor.submit(make_step(6))


@pytest.mark.slow
@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_killed_actor_is_seen(started: list[Started], is_waited_for: bool) -> None:
    """Whether or not somebody waits for an answer; the other actors end, too."""
    started.append(Started(RayExecutor, make_config(tp=2)))
    executor, processes = started[0].executor, pids(started[0].executor)  # type: ignore[arg-type]
    os.kill(processes[1], signal.SIGKILL)
    if is_waited_for:
        with pytest.raises(EngineDeadError, match=rf"worker 1 \(pid {processes[1]} on .*is gone"):
            executor.collect()
    else:
        assert started[0].death.wait(10)
    with pytest.raises(EngineDeadError, match="worker 1"):
        executor.check()
    wait_gone(processes)


@pytest.mark.slow
def test_failures(started: list[Started], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that raises ends one worker's executor never, and two workers' always."""
    started.append(Started(RayExecutor, make_config()))
    alone = started[0].executor
    alone.submit(make_step(FAILING_STEP))
    with pytest.raises(EngineDeadError, match="an unlucky number"):
        alone.collect()
    alone.submit(make_step(FAILING_STEP + 1))
    assert alone.collect().step == FAILING_STEP + 1
    alone.shutdown()
    started.append(Started(RayExecutor, make_config(tp=2)))
    both = started[1].executor
    both.submit(make_step(FAILING_STEP))
    with pytest.raises(EngineDeadError, match="an unlucky number"):
        both.collect()
    with pytest.raises(EngineDeadError, match="an unlucky number"):
        both.check()
    both.shutdown()
    monkeypatch.setenv(environment.RAY_EXTRA_ENV_VARS.name, f"{FAILS_TO_LOAD},{NEVER_LOADS}")
    monkeypatch.setenv(FAILS_TO_LOAD, "1")
    with pytest.raises(EngineDeadError, match="RuntimeError: no weights"):
        Started(RayExecutor, make_config(tp=2))
    monkeypatch.setenv(FAILS_TO_LOAD, "")
    monkeypatch.setenv(NEVER_LOADS, "1")
    with pytest.raises(EngineDeadError) as late:
        Started(RayExecutor, make_config(tp=2, timeout_s=8))
    text = str(late.value)
    assert "1 of 2 workers were not ready within 8 s: worker 1 (pid " in text
    assert "was at 'weights'" in text and "Gloo on the interface" in text


@pytest.mark.slow
def test_placement_groups(cluster: Any, started: list[Started]) -> None:
    """One that is given is used and kept; one that cannot hold the workers is refused."""
    group = cluster.util.placement_group([{"memory": 1}, {"CPU": 1}, {"CPU": 2}], strategy="PACK")
    cluster.get(group.ready(), timeout=30)
    config = make_config(tp=2)
    parallel = replace(config.parallel_config, placement_group=group.id.hex())
    assert headrace.initialize_ray_cluster(parallel) is None
    assert parallel.placement_group == group.id.hex() and parallel.ray_address
    started.append(Started(RayExecutor, replace(config, parallel_config=parallel)))
    started[0].executor.shutdown()
    assert cluster.util.placement_group_table(group)["state"] == "CREATED"
    with pytest.raises(ValueError, match="need 4 bundles with a CPU, but the placement group has"):
        headrace.initialize_ray_cluster(replace(parallel, tensor_parallel_size=4))
    with pytest.raises(ValueError, match="has no GPUs"):
        headrace.initialize_ray_cluster(replace(parallel, ray_resource="GPU"))
    cluster.util.remove_placement_group(group)
    with pytest.raises(ValueError, match=r"had no room for .* within 1 s"):
        headrace.initialize_ray_cluster(
            ParallelConfig(tensor_parallel_size=NUM_CPUS + 1, start_timeout_s=1)
        )


def test_bundles_of_gpus_hold_one() -> None:
    config = ParallelConfig(tensor_parallel_size=2, ray_resource="GPU")
    with pytest.raises(ConfigurationError, match="has 2 GPUs"):
        check_group([{"GPU": 2.0}, {"GPU": 1.0}], config)
    check_group([{"GPU": 1.0}, {"CPU": 4.0}, {"GPU": 1.0}], config)


def test_what_actors_get_of_the_environment() -> None:
    environ = {"HEADRACE_CACHE": "c", "HEADRACE_API_KEY": "secret", "PATH": "p", "NCCL_DEBUG": "1"}
    copied = worker_environ(environ)
    assert copied.pop("GOMP_SPINCOUNT")
    assert copied == {"HEADRACE_CACHE": "c", "NCCL_DEBUG": "1"}


@pytest.mark.slow
def test_an_engine_inside_a_placement_group(cluster: Any, tmp_path: Path) -> None:
    """It finds the group, and its workers take the bundles."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from tests.e2e.tiny_engine import save_tiny_model

    def generate(model: str) -> tuple[Any, ...]:
        from headrace import LLM, SamplingParams

        llm = LLM(
            model, skip_tokenizer_init=True, dtype="float32", tensor_parallel_size=2,
            num_gpu_blocks_override=16, max_model_len=64,
        )  # fmt: skip
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
        ranks = llm.collective_rpc(lambda worker: worker.setup.rank)
        parallel = llm.llm_engine.config.parallel_config
        llm.close()
        backend, group = parallel.distributed_executor_backend, parallel.placement_group
        return len(output.outputs[0].token_ids), ranks, backend, group

    model = str(save_tiny_model("llama", tmp_path / "model"))
    group = cluster.util.placement_group([{"CPU": 1}, {"CPU": 1}], strategy="PACK")
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    task = cluster.remote(generate).options(num_cpus=0, scheduling_strategy=strategy)
    found = cluster.get(task.remote(model), timeout=90)
    assert found == (3, [0, 1], "ray", group.id.hex())
    cluster.util.remove_placement_group(group)
