"""The KV cache: its layout for a model, its memory, and what the step loop does to whole blocks."""

import mmap
from collections.abc import Sequence

import torch

from headrace.configs.config import KVCacheDtype
from headrace.configs.errors import ConfigurationError
from headrace.workers.page_toucher import PageToucher
from headrace.workers.protocol import BlockCopy, KVCacheGroupSpec, KVCacheSpec

_NARROWER = [torch.bfloat16, torch.float16]  # than float32


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
        scale_bytes=torch.float32.itemsize if dtype is torch.int8 else 0,
    )


def choose_cache_dtype(
    name: KVCacheDtype, model_dtype: torch.dtype, has_native_kernels: bool
) -> torch.dtype:
    """The type of K and V in the cache.

    Raises ConfigurationError for one that attention cannot read beside rows of `model_dtype`.
    """
    usable = [model_dtype]
    if has_native_kernels:
        usable.append(torch.int8)
        usable += _NARROWER if model_dtype is torch.float32 else []
    if name == "auto":
        return model_dtype
    chosen: torch.dtype = getattr(torch, name)
    if chosen not in usable:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in usable)
        kind = "native" if has_native_kernels else "torch"
        raise ConfigurationError(
            f"kv_cache_dtype {name} does not work with dtype "
            f"{str(model_dtype).removeprefix('torch.')} on {kind} kernels; choose auto or one of "
            f"{names}"
        )
    return chosen


class KVCache:
    """All pages of all layers, in one allocation.

    `pool` is [num_buffers, num_blocks, elements of a page]. `layer_pages[layer]` is the layer's
    buffer. The torch kernels take it as rows of one token's K or V (see
    `kernels.attention.metadata`), [num_blocks * 2 * block_size, num_kv_heads * head_dim]; the
    native ones order each page as their products read it, and put scales behind int8. All memory
    starts as zeros; once its `toucher` is started, the system backs it with real pages in idle
    moments, so that requests do not pay for that.
    """

    def __init__(self, spec: KVCacheSpec, num_blocks: int, dtype: torch.dtype) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        # Private memory: shared anonymous memory gets no huge pages, and they halve the touching.
        memory = mmap.mmap(
            -1, spec.block_bytes * num_blocks, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = memory
        pool = torch.frombuffer(memory, dtype=dtype)
        self.pool = pool.view(spec.num_buffers, num_blocks, spec.page_bytes // dtype.itemsize)
        buffers = self.pool
        if not spec.scale_bytes:
            buffers = self.pool.view(spec.num_buffers, -1, spec.num_kv_heads * spec.head_dim)
        layers = {
            layer: (group, buffer)
            for group, group_spec in enumerate(spec.groups)
            for buffer, layer in enumerate(group_spec.layer_indices)
        }
        # By layer of the model; a stage has some of them.
        self.layer_pages = {layer: buffers[buffer] for layer, (_, buffer) in layers.items()}
        self.layer_groups = {layer: group for layer, (group, _) in layers.items()}
        self.toucher = PageToucher(self.pool, spec.num_buffers)

    @property
    def num_bytes(self) -> int:
        return self.spec.block_bytes * self.num_blocks

    def describe(self) -> str:
        """One line for the log."""
        spec = self.spec
        return (
            f"KV cache: {str(self.pool.dtype).removeprefix('torch.')}, {self.num_blocks} blocks of "
            f"{spec.block_size} tokens, {spec.block_bytes / spec.block_size:.0f} bytes a token and "
            f"group"
        )

    def close(self) -> None:
        """Stop touching pages. The memory itself goes with the last tensor that uses it."""
        self.toucher.close()

    def release(self) -> int:
        """Give the memory back to the system; all pages are zeros from now on.

        Addresses stay what they are, so nothing that was planned for them changes. Returns the
        bytes. Using the cache takes memory again, page by page.
        """
        self.toucher.close()
        self._memory.madvise(mmap.MADV_DONTNEED)
        return self.num_bytes

    def restore(self) -> None:
        """Take memory again after `release`, in idle moments, as at the start."""
        self.toucher = PageToucher(self.pool, self.spec.num_buffers)
        self.toucher.start()

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Zero these blocks in every buffer."""
        self.pool[:, torch.tensor(block_ids, dtype=torch.int64)] = 0

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in every buffer, all sources read before any target is written."""
        sources = torch.tensor([copy.source for copy in copies], dtype=torch.int64)
        targets = torch.tensor([copy.target for copy in copies], dtype=torch.int64)
        self.pool[:, targets] = self.pool[:, sources]
