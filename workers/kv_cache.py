"""The KV cache: its layout for a model, its memory, and what the step loop does to whole blocks."""

import mmap
from collections.abc import Sequence

import torch

from headrace.workers.page_toucher import PageToucher
from headrace.workers.protocol import BlockCopy, KVCacheGroupSpec, KVCacheSpec


def make_kv_cache_spec(
    windows: Sequence[int | None],
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> KVCacheSpec:
    """Group the layers of a model. `windows`: per layer, tokens seen by a query, or None for all.

    Layers of one kind alone are one group. In a hybrid the smaller kind's layer count is the size
    of every group (the last group of a kind may have fewer), so that pages of all groups have one
    byte size.
    """
    by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        by_window.setdefault(window, []).append(layer)
    size = min(len(layers) for layers in by_window.values())
    groups = [
        KVCacheGroupSpec(
            kind="full" if window is None else "sliding",
            layer_indices=tuple(layers[start : start + size]),
            window=window,
        )
        for window, layers in sorted(by_window.items(), key=lambda item: item[0] or 0)
        for start in range(0, len(layers), size)
    ]
    return KVCacheSpec(
        groups=tuple(groups),
        num_buffers=size,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype_bytes=dtype.itemsize,
    )


class KVCache:
    """All pages of all layers, in one allocation.

    `layer_pages[layer]` is the layer's buffer as rows of one token's K or V (see
    `kernels.attention.metadata`): [num_blocks * 2 * block_size, num_kv_heads * head_dim]. All
    memory starts as zeros; once its `toucher` is started, the system backs it with real pages in
    idle moments, so that requests do not pay for that.
    """

    def __init__(self, spec: KVCacheSpec, num_blocks: int, dtype: torch.dtype) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        page_shape = (2, spec.block_size, spec.num_kv_heads, spec.head_dim)
        # Private memory: shared anonymous memory gets no huge pages, and they halve the touching.
        memory = mmap.mmap(
            -1, spec.block_bytes * num_blocks, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        pool = torch.frombuffer(memory, dtype=dtype)  # keeps the memory alive
        self.pool = pool.view(spec.num_buffers, num_blocks, *page_shape)
        rows = self.pool.view(
            spec.num_buffers, num_blocks * 2 * spec.block_size, spec.num_kv_heads * spec.head_dim
        )
        layers = {
            layer: (group, buffer)
            for group, group_spec in enumerate(spec.groups)
            for buffer, layer in enumerate(group_spec.layer_indices)
        }
        self.layer_pages = [rows[layers[layer][1]] for layer in range(len(layers))]
        self.layer_groups = [layers[layer][0] for layer in range(len(layers))]
        self.toucher = PageToucher(self.pool, spec.num_buffers)

    @property
    def num_bytes(self) -> int:
        return self.spec.block_bytes * self.num_blocks

    def close(self) -> None:
        """Stop touching pages. The memory itself goes with the last tensor that uses it."""
        self.toucher.close()

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Zero these blocks in every buffer."""
        self.pool[:, torch.tensor(block_ids, dtype=torch.int64)] = 0

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in every buffer, all sources read before any target is written."""
        sources = torch.tensor([copy.source for copy in copies], dtype=torch.int64)
        targets = torch.tensor([copy.target for copy in copies], dtype=torch.int64)
        self.pool[:, targets] = self.pool[:, sources]
