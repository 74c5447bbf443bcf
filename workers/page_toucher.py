"""Memory that the system backs with pages ahead of its use, in moments when nobody computes."""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Touched at a time: small, so that what comes next waits for less than a millisecond.
PIECE_BYTES = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14: as if written to, but without changing what is there
_LOWEST_PRIORITY = 19
_QUIET_S = 0.01  # since the last use, before touching goes on


class PageToucher:
    """Touches the pages of `memory`, which consists of `num_buffers` equal parts.

    That changes no contents. The heads of all parts come first: what is used from the front of
    every part, as blocks of a cache are, finds its pages there. Nothing is touched while `held`.
    Where the system has no call for it, nothing happens, and the first use of a page takes longer.
    """

    def __init__(self, memory: torch.Tensor, num_buffers: int) -> None:
        self._memory = memory  # it must not go while the thread works
        self._pieces = touching_order(memory.nbytes, num_buffers)
        self._stop = threading.Event()
        self._is_held = False
        self._last_use = 0.0  # time.monotonic() when that ended
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Touch from a thread of its own. It takes seconds per 10 GB."""
        self._thread = threading.Thread(target=self._run, name="headrace-kv-pages", daemon=True)
        self._thread.start()

    @contextmanager
    def held(self) -> Iterator[None]:
        """While the block runs, and for a moment after it, no page is touched."""
        self._is_held = True
        try:
            yield
        finally:
            self._last_use = time.monotonic()
            self._is_held = False

    def wait(self, timeout_s: float) -> bool:
        """Whether all pages are there, after waiting at most `timeout_s`."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def close(self) -> None:
        """Stop touching."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        # On Linux a priority belongs to a thread: only this one yields to everything else.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        address, num_bytes = self._memory.data_ptr(), self._memory.nbytes
        for piece in self._pieces:
            while self._is_held or time.monotonic() - self._last_use < _QUIET_S:
                if self._stop.wait(_QUIET_S):
                    return
            start = piece * PIECE_BYTES
            length = min(PIECE_BYTES, num_bytes - start)
            if self._stop.is_set() or not _populate(address + start, length):
                return


def touching_order(num_bytes: int, num_buffers: int) -> Iterator[int]:
    """All pieces of `PIECE_BYTES` once: the first one of every buffer, the second ones, ..."""
    num_pieces = -(-num_bytes // PIECE_BYTES)
    starts = [num_bytes // num_buffers * buffer // PIECE_BYTES for buffer in range(num_buffers)]
    ends = [*starts[1:], num_pieces]
    longest = max(end - start for start, end in zip(starts, ends, strict=True))
    for index in range(longest):
        for start, end in zip(starts, ends, strict=True):
            if start + index < end:
                yield start + index


def _populate(address: int, num_bytes: int) -> bool:
    """Back page-aligned memory with pages; False where the system has no call for that."""
    if sys.platform != "linux":
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(madvise(address, num_bytes, _MADV_POPULATE_WRITE) == 0)
