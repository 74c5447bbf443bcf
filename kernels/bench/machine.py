"""The limits of a machine that kernels are compared with, and how calls are timed."""

import time
from collections.abc import Callable, Sequence

import torch

from headrace.kernels.native import Format, NativeKernels

READ_BYTES = 1 << 30  # more than any cache holds
_PEAK_SECONDS = 0.01  # of a loop: short enough to find a moment without others
_NUM_PEAKS = 30
_NUM_READS = 5
_PAUSE_S = 0.02  # between two engines' calls: until the threads of the first do not spin any more
_MIN_CALLS = 3

Call = Callable[[], object]


def read_rate() -> float:
    """Bytes a second that torch's threads read from a buffer of 1 GiB: the best of a few times."""
    buffer = torch.ones(READ_BYTES // 4)
    return READ_BYTES / min(seconds_of(buffer.sum) for _ in range(_NUM_READS))


def peak_rate(kernels: NativeKernels, format: Format) -> float:
    """Operations a second, on all threads, of what products with matrices in `format` are made of.

    From registers alone. The best of many short times.
    """

    def seconds(rounds: int) -> float:
        return seconds_of(lambda: kernels.peak(format, rounds))

    rounds = 1000
    while seconds(rounds) < _PEAK_SECONDS:
        rounds *= 2
    operations = kernels.peak(format, rounds)
    return operations / min(seconds(rounds) for _ in range(_NUM_PEAKS))


def seconds_of(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def alternating_seconds(calls: Sequence[Call], min_seconds: float) -> list[list[float]]:
    """Times of each of the calls, in rounds; the first round does not count.

    As many rounds as take `min_seconds` for each call, and at least three.
    """
    times: list[list[float]] = [[] for _ in calls]
    total, num_rounds = 0.0, -1
    while num_rounds < _MIN_CALLS or total < min_seconds * len(calls):
        for call, taken in zip(calls, times, strict=True):
            if len(calls) > 1:
                time.sleep(_PAUSE_S)
            seconds = seconds_of(call)
            if num_rounds >= 0:
                taken.append(seconds)
                total += seconds
        num_rounds += 1
    return times
