"""`headrace bench`: one sub-command for each kind of measurement."""

import argparse
import importlib
from typing import Any

from headrace.configs.errors import ConfigurationError

KINDS = ("serve", "latency", "throughput", "startup", "kernels")
KINDS_NOT_BUILT = ("mm-processor", "sweep")
EXAMPLES = """examples:
  headrace bench latency smollm2-135m --batch-size 1      how quick is one batch?
  headrace bench throughput --input-len 128 --output-len 128 --num-prompts 200
  headrace bench startup                                  how long until the first request?
  headrace bench kernels                                  how near are the kernels to the limits?
  headrace bench serve --port 8000 --request-rate 4       what do clients of a server see?

All take --json FILE. `headrace bench KIND --help` says what each measures and how to read it.
"""


def add_parser(subparsers: Any) -> None:
    """Add the `bench` command and its kinds."""
    parser = subparsers.add_parser(
        "bench",
        help="measure latency, throughput, start-up, kernels, or a running server",
        description="Measure an engine, its kernels, or a server.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    kinds = parser.add_subparsers(metavar="KIND", dest="bench_kind", required=True)
    for kind in KINDS:
        _module(kind).add_parser(kinds)
    for kind in KINDS_NOT_BUILT:
        kinds.add_parser(kind, add_help=False).add_argument("rest", nargs=argparse.REMAINDER)


def run(args: argparse.Namespace) -> int:
    """Run the chosen kind; returns the exit code. Raises HeadraceError."""
    if args.bench_kind in KINDS_NOT_BUILT:
        raise ConfigurationError(
            f"bench {args.bench_kind} is known but not implemented yet; there are "
            f"{', '.join(KINDS)}"
        )
    return int(_module(args.bench_kind).run(args))


def _module(kind: str) -> Any:
    return importlib.import_module(f"headrace.frontend.cli.bench.{kind}")
