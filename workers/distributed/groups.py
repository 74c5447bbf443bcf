"""The groups that a worker belongs to, and how it finds the others."""

import ipaddress
import os
import socket
from datetime import timedelta
from urllib.parse import urlsplit

import psutil
import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from headrace.configs.config import ParallelConfig
from headrace.configs.errors import ConfigurationError
from headrace.kernels.native import NativeKernels
from headrace.workers.distributed.communicator import ALONE, Communicator
from headrace.workers.distributed.place import Place
from headrace.workers.distributed.shared_memory import SharedMemoryCommunicator, StepLimits
from headrace.workers.distributed.stage_links import StageLinks
from headrace.workers.distributed.torch_communicator import TorchCommunicator
from headrace.workers.protocol import WorkerSetup

_PATH_BYTES = 128


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
        is_ours: bool = False,
    ) -> None:
        """`is_ours`: whether torch's default group ends with this."""
        self.place = place
        self.world = world
        self.shards = shards
        self.stages = stages
        self._is_ours = is_ours

    def least(self, number: int) -> int:
        """The smallest of all workers' numbers."""
        numbers = self.world.all_gather(torch.tensor([number], dtype=torch.int64))
        return min(int(other) for other in numbers)

    def share(self, data: bytes, source: int) -> bytes:
        """The `data` of the worker of rank `source`, on all workers."""
        if self.world.size == 1:
            return data
        size = torch.tensor([len(data)], dtype=torch.int64)
        self.world.broadcast(size, source)
        message = torch.empty(int(size), dtype=torch.uint8)
        if self.world.rank == source:
            message = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.world.broadcast(message, source)
        return message.numpy().tobytes()

    def close(self) -> None:
        """Leave the groups."""
        if self._is_ours and dist.is_initialized():
            dist.destroy_process_group()


def join_groups(
    setup: WorkerSetup,
    config: ParallelConfig,
    kernels: NativeKernels | None,
    limits: StepLimits,
) -> WorkerGroups:
    """Meet the other workers of the replica, which must come within the start's time limit.

    A default group that the program has made already is used as it is.
    """
    place = Place.of(setup.rank, config)
    if config.world_size == 1:
        return WorkerGroups(place)
    interface = _interface(setup, config)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    is_ours = not dist.is_initialized()
    if is_ours:
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
        shards = TorchCommunicator(own)
        if kernels is not None:
            path = setup.shared_memory or common_memory(shards)
            if path:
                shards = SharedMemoryCommunicator(own, kernels, path, limits)
    stages = StageLinks(place) if config.pipeline_parallel_size > 1 else None
    return WorkerGroups(place, TorchCommunicator(dist.group.WORLD), shards, stages, is_ours)


def common_memory(group: Communicator) -> str:
    """Path of a fresh file in memory that every worker of the group can open, or "".

    It is a descriptor of the first of them, so it has no name and goes with the processes.
    """
    descriptor = os.memfd_create("headrace-shards") if group.rank == 0 else -1
    own = f"{_machine()} /proc/{os.getpid()}/fd/{descriptor}".encode()
    message = torch.zeros(_PATH_BYTES, dtype=torch.uint8)
    message[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    first = bytes(group.all_gather(message)[0].tolist()).rstrip(b"\0").decode()
    machine, _, path = first.partition(" ")
    is_here = machine == _machine() and os.access(path, os.R_OK | os.W_OK)
    answers = group.all_gather(torch.tensor([is_here], dtype=torch.int64))
    if all(int(answer) for answer in answers):
        return path
    if descriptor >= 0:
        os.close(descriptor)
    return ""


def _machine() -> str:
    """Equal for processes that see each other's /proc."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"


def _interface(setup: WorkerSetup, config: ParallelConfig) -> str:
    """The network interface for Gloo: the loopback one, unless workers are on several machines.

    "" leaves it to Gloo.
    """
    if setup.local_size == config.world_size:
        return "lo"
    if not setup.address:
        return ""
    wanted = ipaddress.ip_address(setup.address)
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family in (socket.AF_INET, socket.AF_INET6) and (
                ipaddress.ip_address(entry.address.partition("%")[0]) == wanted
            ):
                return name
    raise ConfigurationError(
        f"no network interface of this machine has the address {setup.address}"
    )


def _store(setup: WorkerSetup, config: ParallelConfig) -> Store:
    timeout = timedelta(seconds=config.start_timeout_s)
    if setup.store.startswith("/"):
        return FileStore(setup.store, config.world_size)
    if setup.store == "env://":
        store, _, _ = next(rendezvous(setup.store, setup.rank, config.world_size))
        store.set_timeout(timeout)
        return PrefixStore("headrace", store)
    url = urlsplit(setup.store)
    if url.scheme != "tcp" or url.hostname is None or url.port is None:
        raise ValueError(f"no store at {setup.store!r}")
    if setup.store_fd < 0:
        return TCPStore(url.hostname, url.port, is_master=False, timeout=timeout)
    return TCPStore(  # on that socket alone: by itself it would listen on every interface
        url.hostname,
        url.port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=setup.store_fd,
    )
