"""A worker without a model, for `headrace doctor`: it meets the others and times the ways to them.

It is started and called as a real one is, so that what fails for it would fail for those.
"""

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from headrace.configs import environment
from headrace.configs.config import EngineConfig
from headrace.configs.hardware import CpuFacts, cpu_facts
from headrace.kernels.native import load_kernels
from headrace.workers.distributed.groups import WorkerGroups, join_groups
from headrace.workers.distributed.place import Place
from headrace.workers.distributed.shared_memory import SharedMemoryCommunicator, StepLimits
from headrace.workers.protocol import (
    KVCacheSpec,
    ModelRunnerOutput,
    SchedulerOutput,
    WorkerInfo,
    WorkerSetup,
)

_NUM_PINGS = 100
_NUM_BLOCKS = 8
_BLOCK_BYTES = 4 << 20
_HIDDEN_SIZE = 1024


class ProbeWorker:
    """All ranks get the same calls."""

    def __init__(self, config: EngineConfig, setup: WorkerSetup) -> None:
        self.setup = setup
        self._parallel = config.parallel_config
        self._groups = WorkerGroups(Place.of(setup.rank, self._parallel))
        self._facts: CpuFacts | None = None

    def init_device(self) -> None:
        facts = cpu_facts().shared(self.setup.local_rank, self.setup.local_size)
        self._facts = facts
        torch.set_num_threads(facts.num_threads)
        choice = environment.read(environment.CPU_KERNELS, os.environ)
        kernels = load_kernels(choice, facts.num_threads, facts.helper_cpus("none"))
        self._groups = join_groups(self.setup, self._parallel, kernels, StepLimits(1, 1))

    def load_model(self, progress: Callable[[str], None]) -> None:
        if isinstance(self._groups.shards, SharedMemoryCommunicator):
            self._groups.shards.reserve(_HIDDEN_SIZE, _HIDDEN_SIZE)

    def init_kv_cache(self) -> WorkerInfo:
        return WorkerInfo(KVCacheSpec((), 0, 1, 1, 1, 1), 0, "", {}, {})

    def warm_up(self) -> None:
        pass

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return ModelRunnerOutput(step.step, {})

    def shutdown(self) -> None:
        self._groups.close()

    def place(self) -> dict[str, Any]:
        """Where this rank is, and what it computes with."""
        assert self._facts is not None
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "threads": self._facts.num_threads,
            "cpus": list(self._facts.allowed_cpus),
            "place": self._groups.place.describe(),
            "interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
        }

    def time_pair(self, first: int, second: int) -> list[float] | None:
        """Seconds of one way of an empty message, and bytes per second; None on other ranks."""
        rank, other = self.setup.rank, first + second - self.setup.rank
        self._groups.world.barrier()
        if rank not in (first, second):
            return None
        starts = rank == first
        one_way = _time_exchange(torch.zeros(1), other, starts, _NUM_PINGS) / 2
        block = torch.zeros(_BLOCK_BYTES, dtype=torch.uint8)
        both_ways = _time_exchange(block, other, starts, _NUM_BLOCKS)
        return [one_way, 2 * _BLOCK_BYTES / both_ways]

    def time_shards(self) -> list[float]:
        """Seconds of a meeting of this stage's shards: in shared memory (-1: none), over Gloo."""
        shards = self._groups.shards
        in_memory = -1.0
        if isinstance(shards, SharedMemoryCommunicator):
            in_memory = _time(shards.barrier)
        row = torch.zeros(1, _HIDDEN_SIZE)
        return [in_memory, _time(lambda: shards.all_reduce(row))]


def _time(call: Callable[[], Any]) -> float:
    call()
    began = time.perf_counter()
    for _ in range(_NUM_PINGS):
        call()
    return (time.perf_counter() - began) / _NUM_PINGS


def _time_exchange(tensor: torch.Tensor, other: int, starts: bool, count: int) -> float:
    """Seconds for there and back."""

    def exchange() -> None:
        if starts:
            dist.send(tensor, other)
        dist.recv(tensor, other)
        if not starts:
            dist.send(tensor, other)

    exchange()
    began = time.perf_counter()
    for _ in range(count):
        exchange()
    return (time.perf_counter() - began) / count
