"""A group of a trainer and the workers, over which the trainer broadcasts weights.

It is apart from the workers' own groups, and from any default group of the trainer's process.
"""

import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

TRAINER_RANK = 0
_PREFIX = "headrace-weights"


class WeightGroup:
    """One member's side; the trainer has rank 0. All make the same calls in the same order.

    Gloo carries it. Its connections are neither authenticated nor encrypted: a trusted network
    only. On loopback it listens there alone; elsewhere GLOO_SOCKET_IFNAME names the interface.
    """

    def __init__(
        self, address: str, port: int, rank: int, world_size: int, timeout_s: float = 300.0
    ) -> None:
        """Meet the others at the trainer's `address` and `port`, where rank 0 listens.

        An exception of torch's if they do not come within `timeout_s`, or if a later call of one
        of them does not.
        """
        if _is_loopback(address):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        timeout = timedelta(seconds=timeout_s)
        is_trainer = rank == TRAINER_RANK
        listener: socket.socket | None = None
        if is_trainer:  # torch's own listener would take every interface
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.create_server((address, port), family=family)
        self._store = TCPStore(
            address,
            port,
            world_size,
            is_master=is_trainer,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
        store = PrefixStore(_PREFIX, self._store)
        backend = dist.ProcessGroupGloo(store, rank, world_size, timeout=timeout)
        self._group = dist.ProcessGroup(store, rank, world_size)
        self._group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._group._register_backend(
            torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend
        )

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """The trainer's side: one broadcast for each tensor, contiguous and on the CPU."""
        for tensor in tensors:
            self._group.broadcast(tensor.contiguous(), TRAINER_RANK).wait()

    def receive(
        self, names: Sequence[str], dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """A worker's side: the tensors in order, one in memory at a time.

        All are received, also those that nobody takes: the trainer would wait otherwise.
        """
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            tensor = torch.empty(tuple(shape), dtype=dtype)
            self._group.broadcast(tensor, TRAINER_RANK).wait()
            yield name, tensor

    def close(self) -> None:
        """Leave the group: its connections end with the last that refers to them."""
        del self._group, self._store


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
