"""What a benchmark of one kernel consists of, and running operations for it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from headrace.kernels.bench.machine import Call
from headrace.kernels.native import FORMATS, Format, NativeKernels, Op, Step

# A call goes through so much memory that the caches do not hold what it reads the next time.
COLD_BYTES = 256 << 20
FILLER = 0x3C  # as every byte: a sensible number in every format, and blocks of them


class CheckFailed(Exception):
    """A kernel does not compute what it should."""


@dataclass(frozen=True)
class Case:
    """A kernel with its operands, ready to be timed."""

    model: str
    shape: str
    num_rows: int
    call: Call
    num_kernels: int  # in one call
    num_bytes: int  # that one kernel reads from memory, or writes; activations of products excepted
    num_operations: int  # of one kernel, a multiply-add being two; 0: not what it is about
    format: Format  # of the arithmetic
    torch_call: Call | None = None  # the same with torch
    is_cold: bool = True  # whether what it reads comes from memory


@dataclass(frozen=True)
class Kernel:
    """A kernel, the test that it must pass to be measured, and what is measured then.

    `check` raises CheckFailed, or whatever the kernel raises. `cases` makes the operands of a
    case when it is asked for, so that only one's are there at a time.
    """

    name: str
    check: Callable[[], None]
    cases: Callable[[], Iterator[Case]]


def make_step(buffers: Sequence[torch.Tensor]) -> Step:
    """Buffers by number; the first gives the number of tokens and the format of the rows."""
    step = Step(num_tokens=buffers[0].shape[0], format=FORMATS[buffers[0].dtype])
    for number, buffer in enumerate(buffers):
        step.buffers[number], step.strides[number] = buffer.data_ptr(), buffer.stride(0)
    return step


def run_op(kernels: NativeKernels, op: Op, buffers: Sequence[torch.Tensor]) -> None:
    kernels.run((Op * 1)(op), make_step(buffers))


def must_be_close(result: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """CheckFailed unless no element is further off than `tolerance`; NaN is."""
    error = (result.double() - expected.double()).abs().max().item()
    if not error <= tolerance:
        raise CheckFailed(f"off by {error:.2g}; rounding explains {tolerance:.2g}")


def must_be_equal(result: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """CheckFailed unless they are equal bit by bit, but for the sign of 0."""
    if not torch.equal(result, expected):
        raise CheckFailed(f"{what}: other bits")
