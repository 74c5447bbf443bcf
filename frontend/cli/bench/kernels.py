"""`headrace bench kernels`: how near the native kernels come to what the machine can do."""

import argparse
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.configs.errors import ConfigurationError
from headrace.configs.hardware import cpu_facts
from headrace.configs.model_files.model_info import read_model_info
from headrace.configs.model_files.resolve import resolve_model
from headrace.frontend.cli.bench.options import add_json_option, positive
from headrace.frontend.cli.bench.report import check_writable, readable, write_json

BENCH = "headrace.kernels.bench"  # by name: it imports torch
NATIVE = "headrace.kernels.native"
KINDS = ("products", "attention", "norms", "argmax", "draws", "logprobs")
ROWS = (1, 8, 64, 512)
EXAMPLES = """examples:
  headrace bench kernels --only products --formats bf16 --rows 1 512 --compare-torch
  headrace bench kernels --model smollm2-135m --json kernels.json
  headrace bench kernels --kernels avx2 --threads 1

How to read it. Two limits of the machine are measured first: the rate at which it reads a buffer of
1 GiB, again whenever that is half a minute old and at the end, and the arithmetic of each kind that
all threads do on registers alone. GB/s count the weights of a product or the keys and values of
attention once, GFLOP/s two operations a multiply-add. `of limit` is the time that the slower of
these two limits needs at least, as a share of the time taken: near 100 % nothing is left to gain.
Products with few rows are limited by memory, with many by arithmetic. What works in the caches
(norms, and with few rows argmax, draws and logprobs) has no limit there. Times are the best of
several calls; products and attention go through so many matrices that no cache holds them.
`x torch` is the median of torch's time over ours, alternating: for quantized matrices torch
multiplies bfloat16 ones of the same shape, and it does without the activation that follows gate_up.

Before a kernel is measured, it must pass a test against its reference. One that fails is not
measured, and the exit code is 1. On a machine with other work the shares say little: they are only
as good as the moments that the limits and the kernels got.
"""
HEAD = (
    f"{'kernel':<14}{'shape':<44}{'rows':>5}{'us':>11}{'GB/s':>8}{'GFLOP/s':>9}"
    f"{'of limit':>10}  {'limit':<10}"
)


def add_parser(subparsers: Any) -> None:
    """Add `bench kernels`."""
    parser = subparsers.add_parser(
        "kernels",
        help="compare the native CPU kernels with the limits of this machine",
        description="Measure the native CPU kernels one by one, after testing each.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_json_option(parser)
    parser.add_argument(
        "--model", default=None, help="take the shapes of this model's config (name, path or alias)"
    )
    parser.add_argument(
        "--kernels", default="auto", metavar="ISA",
        help="the instruction set, as HEADRACE_CPU_KERNELS names it (default: the best one here)",
    )  # fmt: skip
    parser.add_argument(
        "--threads", type=positive, default=None, metavar="N", help="default: one per core"
    )
    parser.add_argument(
        "--only", nargs="+", choices=KINDS, default=KINDS, help="default: all of them"
    )
    parser.add_argument(
        "--formats", nargs="+", default=None, metavar="FORMAT",
        help="of the matrices, such as bf16 int8 q4_0 (default: all that the kernels have)",
    )  # fmt: skip
    parser.add_argument(
        "--rows", nargs="+", type=positive, default=ROWS, metavar="N",
        help="rows of all but attention (default: 1 8 64 512)",
    )  # fmt: skip
    parser.add_argument(
        "--compare-torch", action="store_true", help="alternate products with torch's linear"
    )


def run(args: argparse.Namespace) -> int:
    """1 if a kernel failed its test, else 0. Raises HeadraceError for what cannot be measured."""
    check_writable(args.json)
    shapes = None if args.model is None else read_model_info(resolve_model(args.model)).hf_config
    bench = make_bench(args, shapes)
    rate = bench.measure_reading()
    print(f"{bench.kernels.isa}, {bench.kernels.num_threads} threads")
    print(f"memory: {rate / 1e9:.1f} GB/s, reading 1 GiB\n{HEAD}" + torch_head(args))
    measured, failed = [], []
    for result in bench.run():
        if hasattr(result, "reason"):
            failed.append(asdict(result))
            print(f"{result.kernel:<14}FAILED its test and is not measured: {result.reason}")
        else:
            measured.append(asdict(result))
            print(line(measured[-1]), flush=True)
    peaks = {format.name: peak for format, peak in bench.peak_rates.items()}
    print(f"memory at the end: {bench.read_rates[-1] / 1e9:.1f} GB/s")
    for name, peak in peaks.items():
        print(f"arithmetic with {name}: {peak / 1e9:,.0f} GFLOP/s on registers")
    if args.json is not None:
        result = {
            "kernels": bench.kernels.isa,
            "threads": bench.kernels.num_threads,
            "read_rates": bench.read_rates,
            "peak_rates": peaks,
            "measured": measured,
            "failed": failed,
        }
        write_json(args.json, result)
    return 1 if failed else 0


def make_bench(args: argparse.Namespace, hf_config: Mapping[str, Any] | None) -> Any:
    """A `KernelBench`. ConfigurationError where there are no native kernels or no such formats."""
    import_module = importlib.import_module
    torch, native, bench = import_module("torch"), import_module(NATIVE), import_module(BENCH)
    num_threads = args.threads or cpu_facts().num_threads
    torch.set_num_threads(num_threads)
    kernels = native.load_kernels(args.kernels, num_threads)
    if kernels is None:
        raise ConfigurationError(
            "there are no native kernels to measure: the library was not built or this machine "
            "cannot run it. `headrace collect-env` says more"
        )
    shapes = bench.DEFAULT_SHAPES
    if hf_config is not None:
        shapes = (bench.shape_of(Path(args.model).name, hf_config),)
    formats = chosen_formats(args.formats, bench.supported_formats(kernels))
    return bench.KernelBench(
        kernels, shapes, args.rows, formats, args.only, compares_torch=args.compare_torch
    )


def chosen_formats(names: Iterable[str] | None, supported: Iterable[Any]) -> list[Any]:
    """Formats by name in any case; all, if there are no names."""
    by_name = {format.name: format for format in supported}
    chosen = list(by_name) if names is None else [name.upper() for name in names]
    for name in chosen:
        if name not in by_name:
            raise ConfigurationError(
                f"--formats {name.lower()}: the kernels have {', '.join(by_name).lower()}"
            )
    return [by_name[name] for name in chosen]


def torch_head(args: argparse.Namespace) -> str:
    return f"{'x torch':>8}" if args.compare_torch else ""


def line(result: Mapping[str, Any]) -> str:
    """One measurement, under `HEAD`."""
    share = result["limit_share"]
    operations = result["operations_rate"]
    cells = (
        f"{result['kernel']:<14}{result['model'] + ' ' + result['shape']:<44}",
        f"{result['num_rows']:>5}{readable(1e6 * result['seconds']):>11}",
        f"{result['bytes_rate'] / 1e9:>8.1f}",
        f"{operations / 1e9:>9.1f}" if operations else f"{'-':>9}",
        f"{'-' if share is None else f'{100 * share:.0f} %':>10}  {result['limit'] or '-':<10}",
        "" if result["torch_ratio"] is None else f"{result['torch_ratio']:>8.2f}",
    )
    return "".join(cells).rstrip()
