"""`headrace complete`: completions in the terminal."""

import argparse
from typing import Any

from headrace.frontend.cli.answers import add_source_options, answer_options, open_source
from headrace.frontend.cli.printing import ends_at_interrupt, print_pieces, read_lines

EXAMPLES = """examples:
  headrace complete -q "The capital of France is" --max-tokens 5
  headrace complete gemma3-270m
  headrace complete --url http://127.0.0.1:8000/v1 -q "Once upon a time"
"""


def add_parser(subparsers: Any) -> None:
    """Add the `complete` command."""
    parser = subparsers.add_parser(
        "complete",
        help="complete a text, here or on a server",
        description="Complete texts: on a running server with --url, else on an engine of its "
        "own. Ends at end of file (Ctrl-D) or Ctrl-C.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-q", "--quick", metavar="TEXT", help="complete one text")
    add_source_options(parser, default_max_tokens=128)


def run(args: argparse.Namespace) -> int:
    """One completion with `--quick`, else one for each line until end of file or Ctrl-C."""
    options = answer_options(args)
    with open_source(args) as source:
        if args.quick is not None:
            print_pieces(source.complete(args.quick, options), args.stats)
            return 0
        with ends_at_interrupt():
            for text in read_lines("> "):
                print_pieces(source.complete(text, options), args.stats)
    return 0
