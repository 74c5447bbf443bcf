"""Speed of the native kernels against the limits of the machine: `headrace bench kernels`."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from headrace.kernels.bench.attention import attention_kernel
from headrace.kernels.bench.cases import Case, Kernel
from headrace.kernels.bench.machine import alternating_seconds, peak_rate, read_rate
from headrace.kernels.bench.products import product_kernels, supported_formats
from headrace.kernels.bench.rows import argmax_kernel, draw_kernel, norm_kernel, score_kernel
from headrace.kernels.bench.shapes import DEFAULT_SHAPES, ModelShape, shape_of
from headrace.kernels.native import Format, NativeKernels

__all__ = [
    "DEFAULT_SHAPES",
    "KINDS",
    "Failure",
    "KernelBench",
    "Measurement",
    "ModelShape",
    "read_rate",
    "shape_of",
    "supported_formats",
]

KINDS = ("products", "attention", "norms", "argmax", "draws", "logprobs")
_RATE_AGE_S = 30.0  # after which the read rate is measured again


@dataclass(frozen=True)
class Measurement:
    """Of one kernel. Rates are per second; the limit is what the machine needs at least."""

    kernel: str
    model: str
    shape: str
    num_rows: int
    seconds: float  # the best of several calls
    bytes_rate: float
    operations_rate: float
    limit: str | None  # "memory" or "arithmetic"; None: it works in the caches
    limit_share: float | None
    read_rate: float  # measured within the same minute
    torch_seconds: float | None
    torch_ratio: float | None  # median of alternating calls: torch's time over the kernel's


@dataclass(frozen=True)
class Failure:
    """A kernel that did not pass its test and is not measured."""

    kernel: str
    reason: str


@dataclass
class KernelBench:
    """Measures kernels of one instruction set. `rows`: of all but attention."""

    kernels: NativeKernels
    shapes: Sequence[ModelShape]
    rows: Sequence[int]
    formats: Sequence[Format]
    kinds: Sequence[str] = KINDS
    compares_torch: bool = False
    min_seconds: float = 0.2  # for each kernel
    read_rates: list[float] = field(default_factory=list)
    peak_rates: dict[Format, float] = field(default_factory=dict)
    _rate_time: float = -_RATE_AGE_S

    def run(self) -> Iterator[Measurement | Failure]:
        """Each kernel is tested and, unless that fails, measured at all shapes."""
        for kernel in self._kernels():
            try:
                kernel.check()
            except Exception as error:  # whatever it does wrong, the others are measured
                yield Failure(kernel.name, str(error) or type(error).__name__)
                continue
            for case in kernel.cases():
                yield self._measure(kernel.name, case)
        self.measure_reading()

    def measure_reading(self) -> float:
        """Bytes a second of memory, now."""
        self.read_rates.append(read_rate())
        self._rate_time = time.monotonic()
        return self.read_rates[-1]

    def _kernels(self) -> Iterator[Kernel]:
        makers: dict[str, Callable[[], Iterator[Kernel]]] = {
            "products": lambda: product_kernels(
                self.kernels, self.formats, self.shapes, self.rows, self.compares_torch
            ),
            "attention": lambda: iter([attention_kernel(self.kernels, self.shapes)]),
            "norms": lambda: iter([norm_kernel(self.kernels, self.shapes, self.rows)]),
            "argmax": lambda: iter([argmax_kernel(self.kernels, self.shapes, self.rows)]),
            "draws": lambda: iter([draw_kernel(self.kernels, self.shapes, self.rows)]),
            "logprobs": lambda: iter([score_kernel(self.kernels, self.shapes, self.rows)]),
        }
        for kind in self.kinds:
            yield from makers[kind]()

    def _measure(self, kernel: str, case: Case) -> Measurement:
        if time.monotonic() - self._rate_time > _RATE_AGE_S:
            self.measure_reading()
        if case.format not in self.peak_rates:
            self.peak_rates[case.format] = peak_rate(self.kernels, case.format)
        calls = [case.call] if case.torch_call is None else [case.call, case.torch_call]
        times = alternating_seconds(calls, self.min_seconds)
        seconds = min(times[0]) / case.num_kernels
        limit, share = self._limit(case, seconds)
        return Measurement(
            kernel=kernel,
            model=case.model,
            shape=case.shape,
            num_rows=case.num_rows,
            seconds=seconds,
            bytes_rate=case.num_bytes / seconds,
            operations_rate=case.num_operations / seconds,
            limit=limit,
            limit_share=share,
            read_rate=self.read_rates[-1],
            torch_seconds=min(times[1]) / case.num_kernels if len(times) > 1 else None,
            torch_ratio=(
                median(theirs / ours for ours, theirs in zip(*times, strict=True))
                if len(times) > 1
                else None
            ),
        )

    def _limit(self, case: Case, seconds: float) -> tuple[str | None, float | None]:
        least = {"arithmetic": case.num_operations / self.peak_rates[case.format]}
        if case.is_cold:
            least["memory"] = case.num_bytes / self.read_rates[-1]
        limit = max(least, key=lambda name: least[name])
        return (limit, least[limit] / seconds) if least[limit] > 0 else (None, None)
