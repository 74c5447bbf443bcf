"""Speed of the native products per shape: `python -m headrace.kernels.bench [--kernels ISA]`.

GB/s count the weights once, GFLOP/s two operations per weight and row; the best of several calls,
each over so many matrices that they do not stay in the caches. Compare GB/s at few rows with the
read rate of a large buffer, which is measured first.
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch

from headrace.configs.hardware import cpu_facts
from headrace.kernels.native import (
    Epilogue,
    Format,
    Kind,
    NativeKernels,
    Op,
    Step,
    load_kernels,
)

_SHAPES = ((960, 576), (3072, 576), (576, 1536), (49152, 576), (2048, 2048), (8192, 2048))
_ROWS = (1, 8, 64, 512)
_BYTES_PER_CALL = 64 << 20
_READ_BYTES = 1 << 30
_MIN_SECONDS = 0.3


def _best_seconds(call: Callable[[], object]) -> float:
    best, end = float("inf"), time.perf_counter() + _MIN_SECONDS
    while time.perf_counter() < end or best == float("inf"):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def _product_seconds(kernels: NativeKernels, rows: int, outputs: int, inputs: int) -> float:
    """Of one product; a call makes many, with different weights."""
    num_matrices = max(1, _BYTES_PER_CALL // (2 * outputs * inputs))
    if rows >= 64:  # bound by arithmetic
        num_matrices = max(1, num_matrices // rows)
    num_bytes = kernels.packed_bytes(Format.BF16, outputs, inputs)
    weights = torch.full((num_matrices, num_bytes // 2), 0.5, dtype=torch.bfloat16)
    x = torch.ones(rows, inputs, dtype=torch.bfloat16)
    out = torch.empty(rows, outputs, dtype=torch.bfloat16)
    ops = (Op * num_matrices)()
    for op, weight in zip(ops, weights, strict=True):
        op.kind, op.epilogue, op.input, op.output = Kind.PRODUCT, Epilogue.STORE, 0, 1
        op.weight, op.num_outputs, op.num_inputs = weight.data_ptr(), outputs, inputs
    step = Step(num_tokens=rows)
    for number, buffer in enumerate((x, out)):
        step.buffers[number], step.strides[number] = buffer.data_ptr(), buffer.stride(0)
    return _best_seconds(lambda: kernels.run(ops, step)) / num_matrices


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m headrace.kernels.bench", description=__doc__)
    parser.add_argument("--kernels", default="auto", help="as HEADRACE_CPU_KERNELS")
    parser.add_argument("--threads", type=int, default=cpu_facts().num_threads)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    buffer = torch.ones(_READ_BYTES // 4)
    seconds = _best_seconds(buffer.sum)
    sys.stdout.write(f"read rate of 1 GiB: {_READ_BYTES / seconds / 1e9:.1f} GB/s\n")
    kernels = load_kernels(args.kernels, args.threads)
    if kernels is None:
        sys.stdout.write("no native kernels on this machine\n")
        return
    sys.stdout.write(f"{kernels.contract}, {args.threads} threads\n")
    sys.stdout.write(
        f"{'rows':>5} {'outputs':>7} {'inputs':>6} {'us':>9} {'GB/s':>6} {'GFLOP/s':>8}\n"
    )
    for outputs, inputs in _SHAPES:
        for rows in _ROWS:
            seconds = _product_seconds(kernels, rows, outputs, inputs)
            size = outputs * inputs
            sys.stdout.write(
                f"{rows:5d} {outputs:7d} {inputs:6d} {seconds * 1e6:9.1f} "
                f"{2 * size / seconds / 1e9:6.1f} {2 * rows * size / seconds / 1e9:8.1f}\n"
            )


if __name__ == "__main__":
    main()
