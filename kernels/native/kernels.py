"""Choice of the kernels at start, and calls into them."""

import ctypes
import logging
import weakref
from collections.abc import Mapping
from types import MappingProxyType

import torch

from headrace.configs.errors import ConfigurationError
from headrace.kernels.native.interface import DrawRow, Format, Lanes, Op, Step, open_library

logger = logging.getLogger(__name__)

# Instruction sets by the number that the library knows them by, worst first.
_ISAS: Mapping[str, int] = MappingProxyType({"avx2": 0, "avx512": 1, "avx512bf16": 3})
_HAS_AMX = 1 << 4
CHOICES = ("auto", "reference", *_ISAS)

# Changes with any change of what the kernels compute, bit by bit.
_CONTRACT_VERSION = 3


class NativeKernels:
    """The library with a thread pool of its own and one instruction set.

    One call at a time. Threads end with this object.
    """

    def __init__(self, library: ctypes.CDLL, isa: str, num_threads: int) -> None:
        self.isa = isa
        self.num_threads = num_threads
        self._library = library
        self._isa_number = _ISAS[isa]
        self._pool = library.hr_pool_new(num_threads, None)
        if not self._pool:
            raise ConfigurationError(f"the system does not let {num_threads} threads be started")
        weakref.finalize(self, library.hr_pool_free, self._pool)

    @property
    def contract(self) -> str:
        """Names the rules of arithmetic: equal names mean bitwise equal results."""
        return f"native-{_CONTRACT_VERSION}-{self.isa}"

    def run(self, ops: "ctypes.Array[Op]", step: Step) -> None:
        """Run a list of operations; all memory that they name must be there. Releases the GIL."""
        if self._library.hr_run(self._pool, self._isa_number, ops, len(ops), ctypes.byref(step)):
            raise MemoryError("no memory for the work list of a step")

    def pack(self, rows: torch.Tensor, packed: torch.Tensor, first_row: int, lanes: Lanes) -> None:
        """Copy bf16 `rows` [num_rows, num_inputs] into a packed matrix."""
        num_rows, num_inputs = rows.shape
        self._library.hr_pack(
            self._pool,
            rows.data_ptr(),
            Format.BF16,
            num_rows,
            num_inputs,
            packed.data_ptr(),
            Format.BF16,
            first_row,
            lanes,
        )

    def lookup(
        self, packed: torch.Tensor, num_inputs: int, row_ids: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Rows `row_ids` [num_ids] int64 of a packed matrix, times `scale`: bf16."""
        out = torch.empty(row_ids.shape[0], num_inputs, dtype=torch.bfloat16)
        self._library.hr_lookup(
            self._pool,
            packed.data_ptr(),
            Format.BF16,
            num_inputs,
            row_ids.data_ptr(),
            row_ids.shape[0],
            scale,
            Format.BF16,
            out.data_ptr(),
        )
        return out

    def draw(self, scores: torch.Tensor, rows: "ctypes.Array[DrawRow]") -> list[int]:
        """Draw one token id per row of float32 `scores` [num_rows, vocab]; releases the GIL.

        They are logits, of which -Inf excludes a token and one at least is finite. In place they
        become what is drawn from: less the row's maximum, over its temperature, at -Inf what its
        filters drop. Equal to the torch reference, but that a sum of probabilities within a
        millionth of top-p's may fall on its other side.
        """
        num_rows, vocab = scores.shape
        if scores.dtype is not torch.float32 or not scores.is_contiguous() or num_rows != len(rows):
            raise ValueError(f"cannot draw from {scores.dtype} {tuple(scores.shape)} as it lies")
        token_ids = torch.empty(num_rows, dtype=torch.int64)
        self._library.hr_draw(
            self._pool,
            self._isa_number,
            scores.data_ptr(),
            num_rows,
            vocab,
            rows,
            token_ids.data_ptr(),
        )
        result: list[int] = token_ids.tolist()
        return result


def load_kernels(choice: str, num_threads: int) -> NativeKernels | None:
    """The native kernels of `choice`, one of `CHOICES`, or None for the torch references.

    "auto" takes the best instruction set of this machine, and the references where there is none or
    where the library was not built. Raises `ConfigurationError` for a choice that does not work
    here.
    """
    if choice not in CHOICES:
        raise ConfigurationError(
            f"CPU kernels {choice!r} do not exist; choose one of {', '.join(CHOICES)}"
        )
    if choice == "reference":
        return None
    try:
        library = open_library()
    except OSError as error:
        if choice == "auto":
            logger.info("native CPU kernels are not there (%s): torch is used", error)
            return None
        raise ConfigurationError(
            f"CPU kernels {choice!r} need the native library, which was not built: {error}. "
            "Install headrace again with a C++ compiler, or choose auto"
        ) from error
    supported = supported_isas(library)
    if choice == "auto":
        choice = _best(library, supported)
    if choice == "reference":
        return None
    if choice not in supported:
        raise ConfigurationError(
            f"this processor cannot run CPU kernels {choice!r}; it can run "
            f"{', '.join(supported) or 'none'}: choose one of them, auto or reference"
        )
    return NativeKernels(library, choice, num_threads)


def supported_isas(library: ctypes.CDLL) -> tuple[str, ...]:
    """Instruction sets that this machine can run, worst first."""
    found = library.hr_machine()
    return tuple(isa for isa, number in _ISAS.items() if found >> number & 1)


def _best(library: ctypes.CDLL, supported: tuple[str, ...]) -> str:
    """With AMX, whose products follow the order of plain AVX-512, bf16 instructions are left out:

    they follow another order, and one machine has one contract.
    """
    has_amx = bool(library.hr_machine() & _HAS_AMX)
    usable = [isa for isa in supported if not (has_amx and isa == "avx512bf16")]
    return usable[-1] if usable else "reference"
