"""Shards on one machine: the native kernels sum up in memory that all of them map."""

import ctypes
import mmap
import os
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from headrace.kernels.native import Kind, NativeKernels, Op, Step
from headrace.kernels.native.interface import SHARD_LINE, Shards
from headrace.workers.distributed.torch_communicator import TorchCommunicator

NUM_AREAS = 3  # after attention, after the feed-forward layer, and for the embedding: in turn
EMBEDDING_AREA = 2
_LINE_BYTES = 4 * SHARD_LINE


@dataclass(frozen=True)
class StepLimits:
    """The largest step: rows of the residual stream, and rows of logits."""

    max_tokens: int
    max_logit_rows: int


class SharedMemoryCommunicator(TorchCommunicator):
    """Has areas that a model's operations use; what it lacks goes over torch's group.

    `reserve` comes first; until then everything goes over that group.
    """

    def __init__(
        self, group: "dist.ProcessGroup", kernels: NativeKernels, path: str, limits: StepLimits
    ) -> None:
        """`path`: of a file in memory that all shards can open, empty at first."""
        super().__init__(group)
        self._kernels = kernels
        self._path = path
        self._limits = limits
        self.is_reserved = False

    def reserve(self, hidden_size: int, vocab_size: int) -> None:
        """Map the areas, once: several models of one shape share them. All shards call it.

        `parts` [NUM_AREAS, size, max_tokens, hidden_size], `logits` [max_logit_rows, vocab_size]
        float32 and `tokens` [max_logit_rows] int64 are common memory, zeros at first.
        """
        if self.is_reserved:
            return
        limits = self._limits
        part = limits.max_tokens * hidden_size
        sizes = [
            self.size * _LINE_BYTES,
            4 * NUM_AREAS * self.size * part,
            4 * limits.max_logit_rows * vocab_size,
            8 * limits.max_logit_rows,
        ]
        starts = [sum(map(_page_up, sizes[:i])) for i in range(len(sizes))]
        memory = self._map(starts[-1] + _page_up(sizes[-1]))
        arrivals, parts, logits, tokens = (
            memory[start : start + size] for start, size in zip(starts, sizes, strict=True)
        )
        shape = (NUM_AREAS, self.size, limits.max_tokens, hidden_size)
        self.parts = parts.view(torch.float32).view(shape)
        self.logits = logits.view(torch.float32).view(limits.max_logit_rows, vocab_size)
        self.tokens = tokens.view(torch.int64)
        self._meetings = torch.zeros(self._kernels.num_threads * SHARD_LINE, dtype=torch.int32)
        pointers = [
            self.parts[area, rank].data_ptr()
            for area in range(NUM_AREAS)
            for rank in range(self.size)
        ]
        self._pointers = np.array(pointers, dtype=np.uintp)
        self._shards = Shards(
            rank=self.rank,
            size=self.size,
            arrivals=arrivals.data_ptr(),
            meetings=self._meetings.data_ptr(),
            parts=self._pointers.ctypes.data,
        )
        self._meet_ops = (Op * 1)(self.meet_op())
        self.is_reserved = True

    def sum_op(self, area: int, output: int, epilogue: int) -> Op:
        """Sum the shards' parts in `area` into a row buffer."""
        return Op(
            kind=Kind.SUM,
            epilogue=epilogue,
            input=area,
            output=output,
            num_outputs=self.parts.shape[-1],
            pages=ctypes.addressof(self._shards),
        )

    def meet_op(self) -> Op:
        """Wait for all shards."""
        return Op(kind=Kind.MEET, pages=ctypes.addressof(self._shards))

    def own_part(self, area: int) -> torch.Tensor:
        """Where this shard leaves its part: [max_tokens, hidden_size] float32."""
        return self.parts[area, self.rank]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Token ids, [at most max_logit_rows] int64, through the shared memory."""
        size = tensor.shape[0]
        if not self.is_reserved or tensor.dtype != torch.int64 or tensor.dim() != 1:
            super().broadcast(tensor, source)
            return
        if self.rank == source:
            self.tokens[:size] = tensor
        self.barrier()
        if self.rank != source:
            tensor.copy_(self.tokens[:size])

    def barrier(self) -> None:
        """Also makes what was written to the common memory visible to all."""
        if self.is_reserved:
            self._kernels.run(self._meet_ops, Step())
        else:
            super().barrier()

    def _map(self, num_bytes: int) -> torch.Tensor:
        with open(self._path, "r+b") as file:
            if self.rank == 0:
                os.ftruncate(file.fileno(), num_bytes)
            super().barrier()
            memory = mmap.mmap(file.fileno(), num_bytes)
        return torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping


def _page_up(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
