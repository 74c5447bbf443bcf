"""Pages are touched in the order of use, without changing them, and not while steps run."""

import ctypes
import mmap
import sys
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.workers.page_toucher import PIECE_BYTES, PageToucher, touching_order

NUM_BYTES = 8 * PIECE_BYTES
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="pages are touched on Linux only")


def fresh_memory() -> torch.Tensor:
    memory = mmap.mmap(-1, NUM_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)


def num_resident(memory: torch.Tensor) -> int:
    """Pages of `memory` that the system has backed."""
    pages = (ctypes.c_ubyte * (memory.nbytes // mmap.PAGESIZE))()
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert mincore(memory.data_ptr(), memory.nbytes, pages) == 0
    return sum(page & 1 for page in pages)


@settings(deadline=None)
@given(st.integers(1, 200 * PIECE_BYTES), st.integers(1, 40))
def test_every_piece_once_and_heads_of_buffers_first(num_bytes: int, num_buffers: int) -> None:
    order = list(touching_order(num_bytes, num_buffers))
    assert sorted(order) == list(range(-(-num_bytes // PIECE_BYTES)))
    heads = {num_bytes // num_buffers * buffer // PIECE_BYTES for buffer in range(num_buffers)}
    assert set(order[: len(heads)]) == heads


@linux_only
def test_all_pages_come_and_nothing_changes() -> None:
    memory = fresh_memory()
    memory[5 * PIECE_BYTES :] = 7
    toucher = PageToucher(memory, 3)
    assert num_resident(memory) < NUM_BYTES // mmap.PAGESIZE
    toucher.start()
    assert toucher.wait(30.0)
    assert num_resident(memory) == NUM_BYTES // mmap.PAGESIZE
    assert not memory[: 5 * PIECE_BYTES].any()
    assert (memory[5 * PIECE_BYTES :] == 7).all()


@linux_only
def test_nothing_is_touched_while_held() -> None:
    memory = fresh_memory()
    toucher = PageToucher(memory, 1)
    with toucher.held():
        toucher.start()
        time.sleep(0.05)
        assert num_resident(memory) == 0
    assert toucher.wait(30.0)
    assert num_resident(memory) == NUM_BYTES // mmap.PAGESIZE


@linux_only
def test_close_ends_it_while_held() -> None:
    memory = fresh_memory()
    toucher = PageToucher(memory, 1)
    with toucher.held():
        toucher.start()
        toucher.close()
    assert toucher.wait(0.0)
    assert num_resident(memory) == 0
