"""The KV cache: its layout for a model, its memory, and what the step loop does to whole blocks."""

import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Sequence

import torch

from headrace.configs.config import KVCacheDtype
from headrace.configs.errors import ConfigurationError
from headrace.workers.protocol import BlockCopy, KVCacheGroupSpec, KVCacheSpec

# Touched at a time: small, so that the thread can stop soon and others' page faults get their turn.
_POPULATE_BYTES = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14: as if written to, but without changing what is there
_LOWEST_PRIORITY = 19

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
    starts as zeros; `start_touching` makes the system back it with real pages in the background, so
    that requests do not pay for that.
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
        pool = torch.frombuffer(memory, dtype=dtype)  # keeps the memory alive
        self.pool = pool.view(spec.num_buffers, num_blocks, spec.page_bytes // dtype.itemsize)
        buffers = self.pool
        if not spec.scale_bytes:
            buffers = self.pool.view(spec.num_buffers, -1, spec.num_kv_heads * spec.head_dim)
        layers = {
            layer: (group, buffer)
            for group, group_spec in enumerate(spec.groups)
            for buffer, layer in enumerate(group_spec.layer_indices)
        }
        self.layer_pages = [buffers[layers[layer][1]] for layer in range(len(layers))]
        self.layer_groups = [layers[layer][0] for layer in range(len(layers))]
        self._stop = threading.Event()
        self._toucher: threading.Thread | None = None

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

    def start_touching(self) -> None:
        """Back the memory with pages from a low-priority thread.

        That changes no contents, so serving may begin.

        Where the system cannot do that, every page is written here and now; call it before the
        first step.
        """
        address = self.pool.data_ptr()
        if not _populate(address, min(_POPULATE_BYTES, self.num_bytes)):
            self.pool.zero_()
            return
        self._toucher = threading.Thread(
            target=_populate_in_background,
            args=(self.pool, self._stop),
            name="headrace-kv-pages",
            daemon=True,
        )
        self._toucher.start()

    def wait_until_touched(self, timeout_s: float) -> bool:
        """Whether all pages are there, after waiting at most `timeout_s`."""
        if self._toucher is not None:
            self._toucher.join(timeout_s)
        return self._toucher is None or not self._toucher.is_alive()

    def close(self) -> None:
        """Stop touching pages. The memory itself goes with the last tensor that uses it."""
        self._stop.set()
        if self._toucher is not None:
            self._toucher.join()

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Zero these blocks in every buffer."""
        self.pool[:, torch.tensor(block_ids, dtype=torch.int64)] = 0

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in every buffer, all sources read before any target is written."""
        sources = torch.tensor([copy.source for copy in copies], dtype=torch.int64)
        targets = torch.tensor([copy.target for copy in copies], dtype=torch.int64)
        self.pool[:, targets] = self.pool[:, sources]


def _populate(address: int, num_bytes: int) -> bool:
    """Back page-aligned memory with pages; False where the system has no call for that."""
    if sys.platform != "linux":
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(madvise(address, num_bytes, _MADV_POPULATE_WRITE) == 0)


def _populate_in_background(pool: torch.Tensor, stop: threading.Event) -> None:
    """Holds on to `pool`, so that the memory cannot go while it works."""
    address, num_bytes = pool.data_ptr(), pool.nbytes
    # On Linux a priority belongs to a thread: only this one yields to everything else.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    for start in range(0, num_bytes, _POPULATE_BYTES):
        length = min(_POPULATE_BYTES, num_bytes - start)
        if stop.is_set() or not _populate(address + start, length):
            return
