"""The groups that a worker belongs to, and how it finds the others."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from headrace.configs.config import ParallelConfig
from headrace.kernels.native import NativeKernels
from headrace.workers.distributed.communicator import ALONE, Communicator
from headrace.workers.distributed.place import Place
from headrace.workers.distributed.shared_memory import SharedMemoryCommunicator, StepLimits
from headrace.workers.distributed.stage_links import StageLinks
from headrace.workers.distributed.torch_communicator import TorchCommunicator
from headrace.workers.protocol import WorkerSetup

_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}  # of workers that are all on this machine


class WorkerGroups:
    """A worker's place, the shards of its stage, and its links to other stages.

    `stages` is None where there is one stage only.
    """

    def __init__(
        self,
        place: Place,
        world: Communicator = ALONE,
        shards: Communicator = ALONE,
        stages: StageLinks | None = None,
    ) -> None:
        self.place = place
        self.world = world
        self.shards = shards
        self.stages = stages

    def least(self, number: int) -> int:
        """The smallest of all workers' numbers."""
        numbers = self.world.all_gather(torch.tensor([number], dtype=torch.int64))
        return min(int(other) for other in numbers)

    def close(self) -> None:
        """Leave the groups."""
        if self.world.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def join_groups(
    setup: WorkerSetup,
    config: ParallelConfig,
    kernels: NativeKernels | None,
    limits: StepLimits,
) -> WorkerGroups:
    """Meet the other workers of the replica, which must come within the start's time limit."""
    place = Place.of(setup.rank, config)
    if config.world_size == 1:
        return WorkerGroups(place)
    if setup.local_size == config.world_size:
        os.environ.update({**_LOOPBACK, **os.environ})
    dist.init_process_group(
        "gloo",
        store=_store(setup, config),
        rank=setup.rank,
        world_size=config.world_size,
        timeout=timedelta(seconds=config.start_timeout_s),
    )
    assert dist.group.WORLD is not None
    shards: Communicator = ALONE
    if config.tensor_parallel_size > 1:
        # Every worker makes every group, in the same order.
        groups = [
            dist.new_group(place.shard_ranks(stage))
            for stage in range(config.pipeline_parallel_size)
        ]
        own = groups[place.stage]
        if kernels is not None and setup.shared_memory:
            shards = SharedMemoryCommunicator(own, kernels, setup.shared_memory, limits)
        else:
            shards = TorchCommunicator(own)
    stages = StageLinks(place) if config.pipeline_parallel_size > 1 else None
    return WorkerGroups(place, TorchCommunicator(dist.group.WORLD), shards, stages)


def _store(setup: WorkerSetup, config: ParallelConfig) -> dist.Store:
    if setup.store.startswith("/"):
        return dist.FileStore(setup.store, config.world_size)
    raise ValueError(f"no store at {setup.store!r}")
