"""`headrace doctor`: whether several workers could work together here, before a model is loaded."""

import argparse
import dataclasses
import logging
from typing import Any

from headrace.configs.engine_options.parallel import ParallelOptions
from headrace.configs.options import add_options
from headrace.configs.parallel import resolve_parallel
from headrace.frontend.cli.engine_options import log_to_stderr

EXAMPLES = """examples:
  headrace doctor                          this machine, with two workers
  headrace doctor -tp 2 -pp 2              with four, as `serve -tp 2 -pp 2` would have them
  headrace doctor -tp 4 --distributed-executor-backend ray
                                           in a Ray cluster (RAY_ADDRESS, or `ray start` here)
  headrace doctor --make-key cluster.key   a key for connections between machines; copy it to all
  headrace doctor -tp 2 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --cluster-key-file cluster.key
                                           two machines; the same with --node-rank 1 on the other

Each line is something that was looked at: the cores and threads of each worker, free shared memory,
Ray's nodes, and the time that a message takes between each two workers, and between shards. A line
with "fix:" says what to do. The exit code is 1 if there is one, else 0.
"""  # noqa: E501


def add_parser(subparsers: Any) -> None:
    """Add the `doctor` command."""
    parser = subparsers.add_parser(
        "doctor",
        help="check that several workers can work together",
        description="Start workers without a model, here or on several machines, and time the "
        "ways between them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--make-key", metavar="FILE", help="write a fresh --cluster-key-file, and do nothing else"
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds for all workers to come (default: 60)"
    )
    add_options(parser, ParallelOptions)


def run(args: argparse.Namespace) -> int:
    """Print a line for each check; 1 if something is to be fixed."""
    from headrace.executors.preflight import help_node_0, make_key, run_checks

    log_to_stderr(logging.WARNING, None)
    if args.make_key:
        make_key(args.make_key)
        print(f"{args.make_key}: a fresh key; copy it to every machine, readable by its owner only")
        return 0
    names = [field.name for field in dataclasses.fields(ParallelOptions)]
    options = ParallelOptions(**{name: getattr(args, name) for name in names})
    if options.tensor_parallel_size * options.pipeline_parallel_size == 1:
        options = dataclasses.replace(options, tensor_parallel_size=2)
    parallel = dataclasses.replace(resolve_parallel(options), start_timeout_s=args.timeout)
    if parallel.node_rank > 0:
        return help_node_0(parallel)
    num_problems = 0
    for check in run_checks(parallel):
        mark = "!!" if check.fix else "ok"
        print(f"{mark}  {check.name + ':':<15} {check.found}", flush=True)
        if check.fix:
            num_problems += 1
            print(f"    fix: {check.fix}", flush=True)
    verdict = f"{num_problems} to fix" if num_problems else "everything is as it should be"
    print(f"\n{verdict}")
    return 1 if num_problems else 0
