"""The memory of a model's weights: how much there is, giving it back, keeping it in a file."""

import ctypes
import mmap
import tempfile
from collections.abc import Iterator
from typing import IO

import torch

from headrace.configs.errors import RequestFailedError
from headrace.workers.models import Decoder

_MADV_DONTNEED = 4  # Linux: private pages are freed, and are zeros when they are used again
_CHUNK_BYTES = 16 << 20


def weight_memory(model: Decoder) -> Iterator[torch.Tensor]:
    """Every piece of memory that has weights, once, as bytes.

    Parameters that are views of one piece, as packed matrices are, come as that piece.
    """
    seen: set[int] = set()
    for parameter in model.parameters():
        storage = parameter.untyped_storage()
        if storage.data_ptr() not in seen and storage.nbytes():
            seen.add(storage.data_ptr())
            yield torch.empty(0, dtype=torch.uint8).set_(storage)


def num_weight_bytes(model: Decoder) -> int:
    return sum(piece.nbytes for piece in weight_memory(model))


def discard_weights(model: Decoder) -> int:
    """Give the whole pages of the weights' memory back to the system; returns their bytes.

    What they held is lost, and they are zeros when they are used again. Addresses stay, so that
    whatever was planned for the model stays right once its weights are filled in again.
    """
    return sum(map(_give_back, weight_memory(model)))


def _give_back(piece: torch.Tensor) -> int:
    """Pages that are the piece's alone; at its ends there may be some that are shared."""
    page = mmap.PAGESIZE
    start = -(-piece.data_ptr() // page) * page
    num_bytes = (piece.data_ptr() + piece.nbytes) // page * page - start
    if num_bytes <= 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if libc.madvise(start, num_bytes, _MADV_DONTNEED) != 0:
        raise RequestFailedError(
            f"the memory of the weights was not given back: errno {ctypes.get_errno()}"
        )
    return num_bytes


class SpilledWeights:
    """The bytes of a model's weights in a file that has no name, and goes with this object."""

    def __init__(self, model: Decoder, folder: str | None) -> None:
        """Raises RequestFailedError if the disk cannot hold them; the model is as it was then."""
        self._file: IO[bytes] = tempfile.TemporaryFile(  # noqa: SIM115 (it lives as long as we do)
            dir=folder, prefix="headrace-weights-"
        )
        try:
            for piece in weight_memory(model):
                for start in range(0, piece.nbytes, _CHUNK_BYTES):
                    self._file.write(piece[start : start + _CHUNK_BYTES].numpy().data)
            self._file.flush()
        except OSError as error:
            self._file.close()
            raise RequestFailedError(
                f"the weights could not be kept on disk: {error}; free "
                f"{num_weight_bytes(model) / 2**20:.0f} MiB, or name another folder with "
                "--sleep-spill-dir"
            ) from error

    def restore(self, model: Decoder) -> None:
        """Put the bytes back into the same model. The file is gone afterwards."""
        self._file.seek(0)
        for piece in weight_memory(model):
            for start in range(0, piece.nbytes, _CHUNK_BYTES):
                view = piece[start : start + _CHUNK_BYTES].numpy().data
                if self._file.readinto(view) != len(view):  # type: ignore[attr-defined]
                    raise RequestFailedError("the weights that were kept on disk are incomplete")
        self.close()

    def close(self) -> None:
        self._file.close()
