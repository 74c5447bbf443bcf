"""Tensors that another process has left in shared memory, one after the other."""

import math
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from headrace.configs.errors import InvalidRequestError

ALIGNMENT = 64  # bytes; each tensor begins at a multiple of it
_DESCRIPTOR = re.compile(r"/proc/\d+/fd/\d+")
_NAMED = re.compile(r"/dev/shm/[^/]+")


def tensor_starts(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where tensors of these sizes begin, and the bytes that all of them take."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return starts, end


def shared_tensors(
    path: str, names: Sequence[str], dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of the tensors in the memory at `path`, which must be shared memory and nothing else.

    A memfd of another process (`/proc/PID/fd/N`), or a file right in `/dev/shm`. Raises
    InvalidRequestError.
    """
    counts = [math.prod(shape) for shape in shapes]
    sizes = [count * dtype.itemsize for count, dtype in zip(counts, dtypes, strict=True)]
    starts, num_bytes = tensor_starts(sizes)
    memory = _mapped(path, num_bytes)
    for name, dtype, shape, start, count in zip(names, dtypes, shapes, starts, counts, strict=True):
        if not count:
            raise InvalidRequestError(f"{name} has the shape {list(shape)}: nothing", "shapes")
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=start)
        yield name, flat.view(tuple(shape))


def write_shared(tensors: Sequence[torch.Tensor]) -> int:
    """The descriptor of a memfd with the tensors, in the layout of `shared_tensors`.

    The caller closes it once they have been taken.
    """
    starts, num_bytes = tensor_starts([tensor.nbytes for tensor in tensors])
    fd = os.memfd_create("headrace-tensors", os.MFD_CLOEXEC)
    os.ftruncate(fd, max(1, num_bytes))
    memory = mmap.mmap(fd, max(1, num_bytes))
    for start, tensor in zip(starts, tensors, strict=True):
        flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
        flat.copy_(tensor.detach().reshape(-1))
    return fd


def _mapped(path: str, num_bytes: int) -> mmap.mmap:
    if _DESCRIPTOR.fullmatch(path):
        is_shared = _link(path).startswith("/memfd:")
    else:
        is_shared = bool(_NAMED.fullmatch(path)) and not Path(path).is_symlink()
    if not is_shared:
        raise InvalidRequestError(
            f"{path!r} is no shared memory: give /proc/PID/fd/N of a memfd, or a file in /dev/shm",
            "update_info",
        )
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < num_bytes or not num_bytes:
                raise InvalidRequestError(
                    f"{path} has {size} bytes, but the tensors take {num_bytes}", "update_info"
                )
            # Private, so that it can be mapped for writing, as torch wants; nobody writes.
            return mmap.mmap(file.fileno(), num_bytes, mmap.MAP_PRIVATE)
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error}", "update_info") from error


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
