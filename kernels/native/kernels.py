"""Choice of the kernels at start, and calls into them."""

import ctypes
import logging
import platform
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch

from headrace.configs.errors import ConfigurationError
from headrace.kernels.native.interface import DrawRow, Format, Kind, Lanes, Op, Step, open_library

logger = logging.getLogger(__name__)

# Instruction sets by the number that the library knows them by, worst first: of x86-64, then of
# 64-bit Arm.
_X86_ISAS = {"avx2": 0, "avx512": 1, "avx512vnni": 2, "avx512bf16": 3, "amx": 4}
_ARM_ISAS = {"neon": 5, "neondotprod": 6}
_ISAS: Mapping[str, int] = MappingProxyType({**_X86_ISAS, **_ARM_ISAS})
# Those whose results are bitwise equal, by the name of the first: integer products are exact, and
# products of tiles have the order of plain AVX-512.
_FAMILIES: Mapping[str, str] = MappingProxyType(
    {"avx512vnni": "avx512", "amx": "avx512", "neondotprod": "neon"}
)
# Formats of rows, and of float matrices.
FORMATS: Mapping[torch.dtype, Format] = MappingProxyType(
    {torch.bfloat16: Format.BF16, torch.float16: Format.F16, torch.float32: Format.F32}
)
CHOICES = ("auto", "reference", *_ISAS)

_NO_CODE = -2  # result of `hr_run`

# Changes with any change of what the kernels compute, bit by bit.
_CONTRACT_VERSION = 4

_HOW_TO_GET_THEM = (
    "Install headrace again from its wheel, or from source with a C++ compiler (g++) on the PATH."
)


class NativeKernels:
    """The library with a thread pool of its own and one instruction set.

    One call at a time. Threads end with this object.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        isa: str,
        num_threads: int,
        helper_cpus: Sequence[int] | None = None,
    ) -> None:
        """`helper_cpus`: a CPU for each thread beside the caller's; None: wherever they may be."""
        if helper_cpus is not None and len(helper_cpus) != num_threads - 1:
            raise ValueError(f"{num_threads - 1} threads cannot be pinned to {helper_cpus}")
        self.isa = isa
        self.num_threads = num_threads
        self.helper_cpus = None if helper_cpus is None else tuple(helper_cpus)
        self._library = library
        self._isa_number = _ISAS[isa]
        cpus = None if helper_cpus is None else (ctypes.c_int32 * len(helper_cpus))(*helper_cpus)
        self._pool = library.hr_pool_new(num_threads, cpus)
        if not self._pool:
            pinned = "" if helper_cpus is None else f" and pinned to CPUs {list(helper_cpus)}"
            raise ConfigurationError(
                f"the system does not let {num_threads} threads be started{pinned}"
            )
        weakref.finalize(self, library.hr_pool_free, self._pool)

    @property
    def contract(self) -> str:
        """Names the rules of arithmetic: equal names mean bitwise equal results."""
        return f"native-{_CONTRACT_VERSION}-{_FAMILIES.get(self.isa, self.isa)}"

    def run(
        self, ops: "ctypes.Array[Op]", step: Step, first: int = 0, last: int | None = None
    ) -> None:
        """Run operations `first` to `last` (all, if not given) of a list; releases the GIL.

        All memory that they name must be there. Running a list slice by slice gives the same bits.
        Raises ValueError, with nothing computed, where an operation has no code for its formats.
        """
        last = len(ops) if last is None else last
        if not 0 <= first <= last <= len(ops):
            raise ValueError(f"operations {first} to {last} of {len(ops)}")
        if first == last:
            return
        op_seconds = step.op_seconds
        if op_seconds:
            step.op_seconds = op_seconds + first * ctypes.sizeof(ctypes.c_double)
        status = self._library.hr_run(
            self._pool, self._isa_number, ctypes.byref(ops[first]), last - first, ctypes.byref(step)
        )
        step.op_seconds = op_seconds
        if status == _NO_CODE:
            products = [op for op in ops[first:last] if op.kind == Kind.PRODUCT]
            formats = sorted({_format_name(op.format) for op in products})
            raise ValueError(
                f"the native kernels have no code for operations {first} to {last} on rows in "
                f"{_format_name(step.format)} with matrices in {', '.join(formats) or 'none'}"
            )
        if status:
            raise MemoryError("no memory for the work list of a step")

    def packed_bytes(self, format: Format, num_outputs: int, num_inputs: int) -> int:
        """Of a packed matrix. Raises ValueError for a format that cannot have such rows."""
        num_bytes: int = self._library.hr_packed_bytes(format, num_outputs, num_inputs)
        if num_bytes < 0:
            raise ValueError(f"rows of {num_inputs} inputs cannot be packed as {format.name}")
        return num_bytes

    def pack(
        self,
        rows: torch.Tensor,
        packed: torch.Tensor,
        format: Format,
        first_row: int,
        lanes: Lanes,
    ) -> None:
        """Copy float `rows` [num_rows, num_inputs], rounded if need be, into a packed matrix.

        Raises ValueError where the one cannot be made of the other.
        """
        num_rows, num_inputs = rows.shape
        if self._library.hr_pack(
            self._pool,
            rows.data_ptr(),
            FORMATS[rows.dtype],
            num_rows,
            num_inputs,
            packed.data_ptr(),
            format,
            first_row,
            lanes,
        ):
            raise ValueError(f"{rows.dtype} rows cannot be packed as {format.name}")

    def pack_blocks(
        self,
        rows: np.ndarray,
        packed: torch.Tensor,
        format: Format,
        num_inputs: int,
        first_row: int,
        lanes: Lanes,
    ) -> None:
        """Copy rows of a GGUF file, uint8 [num_rows, bytes of a row], into a matrix of `format`."""
        rows = np.ascontiguousarray(rows)
        status = self._library.hr_pack(
            self._pool,
            rows.ctypes.data,
            format,
            rows.shape[0],
            num_inputs,
            packed.data_ptr(),
            format,
            first_row,
            lanes,
        )
        assert status == 0, (format, num_inputs)

    def lookup(
        self,
        packed: torch.Tensor,
        format: Format,
        num_inputs: int,
        row_ids: torch.Tensor,
        scale: float,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Rows `row_ids` [num_ids] int64 of a packed matrix, times `scale`: [num_ids, num_inputs].

        Of `dtype`: bfloat16, float16 or float32. Raises ValueError for a format without lookups.
        """
        out = torch.empty(row_ids.shape[0], num_inputs, dtype=dtype)
        if self._library.hr_lookup(
            self._pool,
            packed.data_ptr(),
            format,
            num_inputs,
            row_ids.data_ptr(),
            row_ids.shape[0],
            scale,
            FORMATS[dtype],
            out.data_ptr(),
        ):
            raise ValueError(f"rows of {format.name} matrices cannot be looked up")
        return out

    def argmax(self, scores: torch.Tensor) -> tuple[list[float], list[int]]:
        """Of each row of float32 `scores` [num_rows, vocab] the largest, and the lowest id with it.

        In a row with NaN that is the first NaN.
        """
        num_rows, vocab = _checked_shape(scores)
        maxima = torch.empty(num_rows, dtype=torch.float32)
        token_ids = torch.empty(num_rows, dtype=torch.int64)
        _check_memory(
            self._library.hr_argmax(
                self._pool,
                self._isa_number,
                scores.data_ptr(),
                num_rows,
                vocab,
                maxima.data_ptr(),
                token_ids.data_ptr(),
            )
        )
        return maxima.tolist(), token_ids.tolist()

    def draw(
        self,
        logits: torch.Tensor,
        rows: "ctypes.Array[DrawRow]",
        scores: torch.Tensor | None = None,
    ) -> list[int]:
        """Draw one token id from each of some rows of float32 `logits` [*, vocab].

        -Inf excludes a token; the best is finite. `scores` [len(rows), vocab] become what is drawn
        from: logits less the row's maximum, over its temperature, at -Inf what its filters drop.
        Equal to the torch reference, but that a sum of probabilities within a millionth of top-p's
        may fall on its other side.
        """
        num_logits, vocab = _checked_shape(logits)
        if not all(0 <= row.row < num_logits and 0 <= row.best < vocab for row in rows):
            raise ValueError(f"rows to draw from are not in {tuple(logits.shape)} logits")
        if scores is not None and _checked_shape(scores) != (len(rows), vocab):
            raise ValueError(f"no place for scores of {len(rows)} rows: {tuple(scores.shape)}")
        token_ids = torch.empty(len(rows), dtype=torch.int64)
        _check_memory(
            self._library.hr_draw(
                self._pool,
                self._isa_number,
                logits.data_ptr(),
                vocab,
                rows,
                len(rows),
                None if scores is None else scores.data_ptr(),
                token_ids.data_ptr(),
            )
        )
        result: list[int] = token_ids.tolist()
        return result

    def score(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        token_ids: Sequence[int],
        num_tops: Sequence[int],
        maxima: Sequence[float] | None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Scores of one token and of the best ones, of some rows of float32 `logits` [*, vocab].

        They are log-probabilities, from the largest logit of each of the `rows`, or, without
        `maxima`, logits. Returns scores float32 and token ids int64 [len(rows), 1 +
        max(num_tops)], of which a row's first 1 + num_tops are filled: its token of `token_ids`,
        then the best, the lower id first among equals. And ranks, int64 [len(rows)]: 1 + the number
        of larger scores than the token's. The logarithm of the sum has a fixed order, which
        `logprobs.h` says.
        """
        num_logits, vocab = _checked_shape(logits)
        row_array, token_array, top_array = (
            np.array(numbers, dtype=np.int64) for numbers in (rows, token_ids, num_tops)
        )
        for numbers, limit in (
            (row_array, num_logits), (token_array, vocab), (top_array, vocab + 1)
        ):  # fmt: skip
            if len(numbers) != len(rows) or numbers.min() < 0 or numbers.max() >= limit:
                raise ValueError(f"cannot score {numbers.tolist()} of {tuple(logits.shape)} logits")
        maximum_array = None if maxima is None else np.array(maxima, dtype=np.float32)
        stride = 1 + int(top_array.max())
        scores = np.empty((len(rows), stride), dtype=np.float32)
        ids, ranks = np.empty((len(rows), stride), dtype=np.int64), np.empty_like(row_array)
        self._library.hr_score(
            self._pool,
            self._isa_number,
            logits.data_ptr(),
            vocab,
            row_array.ctypes.data,
            len(rows),
            token_array.ctypes.data,
            top_array.ctypes.data,
            None if maximum_array is None else maximum_array.ctypes.data,
            stride,
            scores.ctypes.data,
            ids.ctypes.data,
            ranks.ctypes.data,
        )
        return scores, ids, ranks

    def peak(self, format: Format, rounds: int) -> float:
        """Do nothing but arithmetic on registers, as products with matrices of `format` do it.

        Returns how many operations that were on all threads; a multiply-add counts as two.
        """
        operations: float = self._library.hr_peak(self._pool, self._isa_number, format, rounds)
        return operations


def _checked_shape(scores: torch.Tensor) -> tuple[int, int]:
    """Of a matrix that lies as the library takes it; ValueError for others."""
    if scores.dtype is not torch.float32 or not scores.is_contiguous() or scores.ndim != 2:
        raise ValueError(f"no kernel for {scores.dtype} {tuple(scores.shape)} as it lies")
    num_rows, vocab = scores.shape
    return num_rows, vocab


def _check_memory(status: int) -> None:
    if status:
        raise MemoryError("no memory for work on rows of scores")


def _format_name(number: int) -> str:
    try:
        return Format(number).name
    except ValueError:
        return f"format {number}"


def load_kernels(
    choice: str, num_threads: int, helper_cpus: Sequence[int] | None = None
) -> NativeKernels | None:
    """The native kernels of `choice`, one of `CHOICES`, or None for the torch references.

    "auto" takes the best instruction set of this machine, and the references where there is none or
    where the library was not built. `helper_cpus` as `NativeKernels` takes them. Says in the log
    which it took and why no better one. Raises `ConfigurationError` for a choice that does not work
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
            logger.warning(
                "native CPU kernels are not there (%s): torch computes instead, several times "
                "slower. %s",
                error,
                _HOW_TO_GET_THEM,
            )
            return None
        raise ConfigurationError(
            f"CPU kernels {choice!r} need the native library, which was not built: {error}. "
            f"{_HOW_TO_GET_THEM} Or choose auto"
        ) from error
    supported = supported_isas(library)
    if choice == "auto":
        if not supported:
            logger.info(
                "native CPU kernels cannot be used (%s): torch is",
                _missing(library, next(iter(_isas_of_this_kind()))),
            )
            return None
        choice = supported[-1]
    elif choice not in supported:
        raise ConfigurationError(
            f"this machine cannot run CPU kernels {choice!r}: {_missing(library, choice)}; it can "
            f"run {', '.join(supported) or 'none'}: choose one of them, auto or reference"
        )
    kernels = NativeKernels(library, choice, num_threads, helper_cpus)
    logger.info("native CPU kernels: %s", describe_choice(library, kernels))
    return kernels


def supported_isas(library: ctypes.CDLL) -> tuple[str, ...]:
    """Instruction sets that this machine can run, worst first."""
    found = library.hr_machine()
    return tuple(isa for isa, number in _ISAS.items() if found >> number & 1)


def describe_choice(library: ctypes.CDLL, kernels: NativeKernels) -> str:
    """The instruction set in use, the threads, and why no better set is in use: one line."""
    names = list(_ARM_ISAS if kernels.isa in _ARM_ISAS else _X86_ISAS)
    parts = [f"{kernels.isa}, {kernels.num_threads} threads"]
    if kernels.helper_cpus:
        parts.append(f"all but the first pinned to CPUs {', '.join(map(str, kernels.helper_cpus))}")
    supported = supported_isas(library)
    for isa in names[names.index(kernels.isa) + 1 :]:
        parts.append(f"{isa}: {'not chosen' if isa in supported else _missing(library, isa)}")
    return "; ".join(parts)


def _isas_of_this_kind() -> Mapping[str, int]:
    return _ARM_ISAS if platform.machine() == "aarch64" else _X86_ISAS


def _missing(library: ctypes.CDLL, isa: str) -> str:
    reason: bytes | None = library.hr_why_not(_ISAS[isa])
    return "" if reason is None else reason.decode()
