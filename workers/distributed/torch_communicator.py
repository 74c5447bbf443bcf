"""Collectives over torch.distributed: Gloo on CPUs, NCCL on GPUs."""

import torch
import torch.distributed as dist

from headrace.workers.distributed.communicator import sum_in_order


class TorchCommunicator:
    """A process group of torch's.

    On CPUs sums are gathered and added up in order, since Gloo's own order depends on the tensor's
    size. On GPUs they are NCCL's, which can be captured in CUDA graphs; its order is fixed for a
    size and a topology.
    """

    def __init__(self, group: "dist.ProcessGroup") -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_cuda:
            total = tensor.clone()
            dist.all_reduce(total, group=self.group)
            return total
        return sum_in_order(self.all_gather(tensor))

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor, group=self.group)
        return parts

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_cuda:
            part = tensor.new_empty(tensor.shape[0] // self.size, *tensor.shape[1:])
            dist.reduce_scatter_tensor(part, tensor.contiguous(), group=self.group)
            return part
        return self.all_reduce(tensor).chunk(self.size)[self.rank].clone()

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        dist.broadcast(tensor, group=self.group, group_src=source)

    def barrier(self) -> None:
        dist.barrier(group=self.group)
