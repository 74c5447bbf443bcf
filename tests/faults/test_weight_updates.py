"""Weights that change, and engines that sleep, under whole engines: outputs are never a mix."""

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace import LLM, AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from headrace.configs.errors import (
    CallLostError,
    EngineNotReadyError,
    RequestFailedError,
    WrongStateError,
)
from headrace.frontend.outputs import RequestOutput
from headrace.workers.distributed.weight_group import WeightGroup
from headrace.workers.shared_tensors import write_shared
from tests.e2e.tiny_model import ENGINE_ARGUMENTS, save_tiny_model
from tests.faults.faulty_workers import SlowWorker, name_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

PROMPTS = [[256, *range(10 * i, 10 * i + 40)] for i in range(4)]
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1)


def facts(output: RequestOutput) -> list[Any]:
    """Tokens and scores, to the bit."""
    return [(c.token_ids, c.cumulative_logprob) for c in output.outputs]


def generate(llm: LLM) -> list[list[Any]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [facts(output) for output in llm.generate(prompts, PARAMS, use_tqdm=False)]


@pytest.fixture(scope="module", autouse=True)
def importable_workers() -> Iterator[None]:
    """Engine cores get this process's `sys.path`."""
    folder = str(Path(__file__).parent)
    sys.path.append(folder)
    yield
    sys.path.remove(folder)


class Models:
    """Two checkpoints of one shape, and what cold engines of either give."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.old, self.new = save_tiny_model(root / "old"), save_tiny_model(root / "new")
        generator = torch.Generator().manual_seed(3)
        tensors = load_file(self.new / "model.safetensors")
        for tensor in tensors.values():
            tensor += 0.3 * torch.randn(tensor.shape, generator=generator)
        save_file(tensors, self.new / "model.safetensors", {"format": "pt"})
        self.tensors = tensors
        self._cold: dict[tuple[str, int], list[list[Any]]] = {}
        assert self.cold("default") != self.cold("v2")

    def cold(self, version: str, num_workers: int = 1) -> list[list[Any]]:
        """What an engine gives that has loaded these weights at its start."""
        key = version, num_workers
        if key not in self._cold:
            path = self.old if version == "default" else self.new
            llm = LLM(str(path), tensor_parallel_size=num_workers, **ENGINE_ARGUMENTS)
            self._cold[key] = generate(llm)
            llm.close()
        return self._cold[key]

    def arguments(self, **fields: Any) -> dict[str, Any]:
        return {**ENGINE_ARGUMENTS, "weight_update_root": str(self.root), **fields}

    def llm(self, **fields: Any) -> LLM:
        return LLM(str(self.old), **self.arguments(**fields))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(params=[1, 2], ids=["one worker", "two shards"])
def num_workers(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def llm(models: Models, num_workers: int) -> Iterator[LLM]:
    llm = models.llm(
        tensor_parallel_size=num_workers,
        weight_transfer_config={"backend": "shm"},
        enable_sleep_mode=True,
    )
    yield llm
    llm.close()


def shared(tensors: dict[str, torch.Tensor]) -> tuple[int, dict[str, Any]]:
    fd = write_shared(list(tensors.values()))
    return fd, {**described(tensors), "memory": f"/proc/{os.getpid()}/fd/{fd}"}


def described(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype) for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def test_from_a_path_and_from_shared_memory(llm: LLM, models: Models, num_workers: int) -> None:
    """PP21: with a warm cache nothing is found, and outputs are those of a cold start."""
    assert generate(llm) == models.cold("default", num_workers)
    (warm,) = llm.generate([{"prompt_token_ids": PROMPTS[0]}], PARAMS, use_tqdm=False)
    assert warm.num_cached_tokens and warm.weight_version == "default"
    llm.start_weight_update()
    llm.update_weights({"path": "new"})
    assert generate(llm) == models.cold("default", num_workers)
    assert llm.finish_weight_update("v2") == "v2" == llm.llm_engine.weight_version
    (cold,) = llm.generate([{"prompt_token_ids": PROMPTS[0]}], PARAMS, use_tqdm=False)
    assert cold.num_cached_tokens == 0 and cold.weight_version == "v2"
    assert generate(llm) == models.cold("v2", num_workers)

    fd, info = shared(load_file(models.old / "model.safetensors"))
    llm.start_weight_update()
    llm.update_weights(info)
    os.close(fd)
    llm.finish_weight_update("v3")
    assert generate(llm) == models.cold("default", num_workers)


def test_a_failed_update_changes_nothing(llm: LLM, models: Models, num_workers: int) -> None:
    fd, info = shared(models.tensors)
    llm.start_weight_update()
    llm.update_weights(info)
    with pytest.raises(ValueError, match="no weight of this architecture"):
        llm.update_weights({**info, "names": ["no.such", *info["names"][1:]]})
    os.close(fd)
    with pytest.raises(WrongStateError):
        llm.finish_weight_update("v2")
    assert llm.llm_engine.weight_version == "default"
    assert generate(llm) == models.cold("default", num_workers)
    llm.start_weight_update()
    llm.rollback_weight_update()
    assert generate(llm) == models.cold("default", num_workers)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_sleep_and_wake(llm: LLM, models: Models, num_workers: int, level: int) -> None:
    llm.sleep(level)
    assert llm.llm_engine.is_sleeping()
    with pytest.raises(EngineNotReadyError, match="wake_up"):
        generate(llm)
    llm.wake_up(["weights"])
    llm.wake_up(["kv_cache", "scheduling"])
    if level == 2:
        assert llm.llm_engine.is_sleeping()
        llm.collective_rpc("reload_weights")
    assert not llm.llm_engine.is_sleeping()
    assert generate(llm) == models.cold("default", num_workers)


@pytest.mark.parametrize("in_process", [False, True])
def test_a_thread_does_not_wait_for_itself(
    models: Models, monkeypatch: pytest.MonkeyPatch, in_process: bool
) -> None:
    """Outputs of what was aborted come; then there is an error, and no end of waiting."""
    monkeypatch.setenv("HEADRACE_MULTIPROCESSING", "0" if in_process else "1")
    llm = models.llm()
    engine, prompt = llm.llm_engine, {"prompt_token_ids": PROMPTS[0]}
    engine.add_request("old", prompt, PARAMS)
    engine.pause_generation()
    engine.add_request("new", prompt, PARAMS)
    finished: dict[str, RequestOutput] = {}
    with pytest.raises(EngineNotReadyError, match="resume_generation"):
        while True:
            finished |= {o.request_id: o for o in engine.step() if o.finished}
    assert list(finished) == ["old"]
    engine.resume_generation()
    while engine.has_unfinished_requests():
        finished |= {o.request_id: o for o in engine.step() if o.finished}
    assert facts(finished["new"]) == models.cold("default")[0]
    llm.close()


def test_in_the_callers_process(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_MULTIPROCESSING", "0")
    llm = models.llm(enable_sleep_mode=True)
    llm.start_weight_update()
    llm.update_weights({"path": "new"})
    llm.finish_weight_update("v2")
    assert generate(llm) == models.cold("v2")
    llm.sleep()
    llm.wake_up()
    assert generate(llm) == models.cold("v2")
    llm.close()


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_trainer_broadcasts(models: Models, num_workers: int, num_replicas: int) -> None:
    llm = models.llm(
        tensor_parallel_size=num_workers, data_parallel_size=num_replicas,
        weight_transfer_config={"backend": "gloo"},
    )  # fmt: skip
    group_size = 1 + num_workers * num_replicas
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    failures: list[BaseException] = []

    def train() -> None:
        try:
            group = WeightGroup("127.0.0.1", port, 0, group_size, 60.0)
            group.send(list(models.tensors.values()))
        except BaseException as error:
            failures.append(error)

    trainer = threading.Thread(target=train)
    trainer.start()
    llm.init_weight_transfer_engine({"master_address": "127.0.0.1", "master_port": port})
    llm.start_weight_update()
    llm.update_weights(described(models.tensors))
    trainer.join(60)
    assert not failures and not trainer.is_alive()
    llm.finish_weight_update("v2")
    assert generate(llm) == models.cold("v2", num_workers)
    llm.shutdown_weight_transfer_engine()
    llm.close()


async def started(models: Models, **fields: Any) -> AsyncLLMEngine:
    slow = {"worker_cls": name_of(SlowWorker), "enable_sleep_mode": True}
    args = AsyncEngineArgs(str(models.old), **models.arguments(**slow, **fields))
    return AsyncLLMEngine.from_engine_args(args)


async def one(engine: AsyncLLMEngine, number: int, name: str) -> RequestOutput:
    last = None
    prompt = {"prompt_token_ids": PROMPTS[number]}
    async for output in engine.generate(prompt, PARAMS, name):
        last = output
    assert last is not None
    return last


def test_an_update_under_load_never_mixes(models: Models, num_workers: int) -> None:
    async def run() -> None:
        engine = await started(models, tensor_parallel_size=num_workers)
        done: list[tuple[int, RequestOutput]] = []

        async def keep_asking(client: int) -> None:
            for turn in range(12):
                number = (client + turn) % len(PROMPTS)
                done.append((number, await one(engine, number, f"{client}-{turn}")))

        clients = [asyncio.create_task(keep_asking(client)) for client in range(6)]
        while len(done) < 10:
            await asyncio.sleep(0.005)
        await engine.start_weight_update()
        await engine.update_weights({"path": "new"})
        await engine.finish_weight_update("v2")
        await asyncio.gather(*clients)
        versions = [str(output.weight_version) for _, output in done]
        assert set(versions) == {"default", "v2"}
        for (number, output), version in zip(done, versions, strict=True):
            assert facts(output) == models.cold(version, num_workers)[number]
        await engine.engine.stop()

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_pause_modes_with_requests_in_flight(models: Models, mode: str) -> None:
    async def run() -> None:
        engine = await started(models)
        running = [asyncio.create_task(one(engine, i, f"old {i}")) for i in range(4)]
        await asyncio.sleep(0.02)
        await engine.pause_generation(mode)
        late = asyncio.create_task(one(engine, 0, "late"))
        await asyncio.sleep(0.05)
        assert await engine.is_paused() and not late.done()
        if mode != "keep":
            assert all(task.done() for task in running)
        await engine.resume_generation()
        outputs = await asyncio.gather(*running)
        for number, output in enumerate(outputs):
            if output.outputs[0].finish_reason == "abort":
                assert mode == "abort"
            else:
                assert facts(output) == models.cold("default")[number]
        assert facts(await late) == models.cold("default")[0]
        await engine.engine.stop()

    asyncio.run(run())


def test_requests_wait_for_a_sleeping_engine(models: Models) -> None:
    async def run() -> None:
        engine = await started(models)
        await engine.sleep(2)
        waiting = asyncio.create_task(one(engine, 1, "a"))
        await engine.wake_up()
        await asyncio.sleep(0.1)
        assert not waiting.done() and await engine.is_sleeping(), "there are no weights yet"
        await engine.start_weight_update()
        await engine.update_weights({"path": "new"})
        await engine.finish_weight_update("v2")
        output = await waiting
        assert facts(output) == models.cold("v2")[1] and output.weight_version == "v2"
        await engine.engine.stop()

    asyncio.run(run())


def kill_core(llm: LLM) -> None:
    client: Any = llm.llm_engine._client
    core = psutil.Process(client.ready.pid)
    core.send_signal(signal.SIGKILL)
    with suppress(psutil.NoSuchProcess):
        core.wait(10)


def patiently(ask: Callable[[], bool]) -> bool:
    """Ask until an answer comes: a question may be lost with the engine core."""
    while True:
        try:
            return ask()
        except CallLostError:
            continue


def test_a_killed_engine_core_comes_back_with_the_new_weights(models: Models) -> None:
    llm = models.llm(enable_sleep_mode=True)
    llm.start_weight_update()
    llm.update_weights({"path": "new"})
    llm.finish_weight_update("v2")
    kill_core(llm)
    assert generate(llm) == models.cold("v2") and llm.llm_engine.weight_version == "v2"
    llm.sleep(1)
    kill_core(llm)
    assert patiently(llm.llm_engine.is_sleeping)
    llm.wake_up()
    assert generate(llm) == models.cold("v2")
    llm.llm_engine.pause_generation()
    kill_core(llm)
    assert patiently(llm.llm_engine.is_paused)
    llm.llm_engine.resume_generation()
    assert generate(llm) == models.cold("v2")
    llm.close()


def test_an_update_that_is_lost_with_its_engine_core(models: Models) -> None:
    llm = models.llm()
    llm.start_weight_update()
    llm.update_weights({"path": "new"})
    kill_core(llm)
    with pytest.raises(RequestFailedError):
        llm.finish_weight_update("v2")
    assert generate(llm) == models.cold("default")
    llm.close()
