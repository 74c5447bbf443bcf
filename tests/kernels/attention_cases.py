"""Caches with random keys and values in shuffled blocks, and exact attention to them."""

from collections.abc import Sequence

import torch

from headrace.kernels.attention import SequenceSlots, block_slots
from headrace.kernels.native import NativeKernels
from tests.kernels.native_ops import AttentionCall, packed_pages


class Cache:
    """K and V of some sequences in the layout of native attention; everything else is NaN.

    `keys` and `values` are what the cache holds, [num_tokens, num_kv_heads, head_dim] each. An int8
    cache is written by the kernels, the others are packed here.
    """

    def __init__(
        self,
        call: AttentionCall,
        lengths: Sequence[int],
        rows: torch.dtype = torch.bfloat16,
        dtype: torch.dtype = torch.bfloat16,
        kernels: NativeKernels | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        block_size, heads, dim = call.block_size, call.num_kv_heads, call.head_dim
        counts = [-(-length // block_size) for length in lengths]
        ids = (torch.randperm(sum(counts), generator=generator) + 1).split(counts)
        num_rows = 2 * block_size * (sum(counts) + 1)
        self.call, self.rows, self.keys, self.values = call, rows, [], []
        self.slots = [
            block_slots(blocks.tolist(), block_size)[:length]
            for length, blocks in zip(lengths, ids, strict=True)
        ]
        plain = torch.full((num_rows, heads * dim), torch.nan)
        for length, slots in zip(lengths, self.slots, strict=True):
            for offset, kept in ((0, self.keys), (block_size, self.values)):
                data = torch.randn(length, heads * dim, generator=generator)
                data = data.to(rows if dtype is torch.int8 else dtype)
                plain[torch.from_numpy(slots) + offset] = data.float()
                kept.append(data.view(length, heads, dim))
        if dtype is not torch.int8:
            self.packed = packed_pages(plain.to(dtype), block_size, heads, rows)
            return
        assert kernels is not None
        page_bytes = 2 * block_size * heads * (dim + 4)
        self.packed = torch.full((sum(counts) + 1, page_bytes), 127, dtype=torch.int8)
        self.packed[:, 2 * block_size * heads * dim :].view(torch.float32).fill_(torch.nan)
        for index, length in enumerate(lengths):
            key_value = torch.stack((self.keys[index], self.values[index]), dim=1)
            call.write(kernels, key_value, self.packed, self.sequence(index, length, length))

    def sequence(self, index: int, end: int, num_queries: int) -> SequenceSlots:
        return SequenceSlots(self.slots[index][:end], num_queries)

    def exact(self, query: torch.Tensor, index: int = 0) -> torch.Tensor:
        """All queries of one sequence, in float64."""
        call, keys, values = self.call, self.keys[index], self.values[index]
        copies = query.shape[1] // keys.shape[1]
        q, k, v = (t.double().transpose(0, 1) for t in (query, keys, values))
        k, v = k.repeat_interleave(copies, 0), v.repeat_interleave(copies, 0)
        scores = q @ k.transpose(1, 2) * query.shape[2] ** -0.5
        if call.soft_cap is not None:
            scores = call.soft_cap * torch.tanh(scores / call.soft_cap)
        ages = torch.arange(len(keys))[:, None] - torch.arange(len(keys))
        hidden = (ages < 0) | (ages >= (call.window or len(keys)))
        scores = scores.masked_fill(hidden, -torch.inf)
        if call.sinks is not None:
            sinks = call.sinks.double()[:, None, None].expand(-1, len(keys), 1)
            scores = torch.cat((scores, sinks), dim=2)
        return (scores.softmax(-1)[:, :, : len(keys)] @ v).transpose(0, 1)


def queries(
    length: int, num_heads: int, head_dim: int, dtype: torch.dtype = torch.bfloat16, seed: int = 7
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(length, num_heads, head_dim, generator=generator)).to(dtype)
