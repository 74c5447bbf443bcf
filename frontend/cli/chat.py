"""`headrace chat`: a conversation in the terminal."""

import argparse
import sys
from typing import Any

from headrace.configs.errors import InvalidRequestError
from headrace.frontend.cli.answers import (
    Message,
    TextSource,
    add_source_options,
    answer_options,
    open_source,
)
from headrace.frontend.cli.printing import ends_at_interrupt, print_pieces, read_lines

EXAMPLES = """examples:
  headrace chat
  headrace chat smollm2-135m -q "What is the capital of France?"
  headrace chat --url http://127.0.0.1:8000/v1 --system-prompt "Answer in one sentence."
"""


def add_parser(subparsers: Any) -> None:
    """Add the `chat` command."""
    parser = subparsers.add_parser(
        "chat",
        help="chat with a model, here or on a server",
        description="Chat with a model: on a running server with --url, else on an engine of its "
        "own. The conversation ends at end of file (Ctrl-D) or Ctrl-C.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-q", "--quick", metavar="TEXT", help="send one message, print the answer")
    parser.add_argument("--system-prompt", metavar="TEXT", help="how the model should behave")
    add_source_options(parser)


def run(args: argparse.Namespace) -> int:
    """One answer with `--quick`, else a conversation until end of file or Ctrl-C."""
    messages: list[Message] = []
    if args.system_prompt:
        messages.append({"role": "system", "content": args.system_prompt})
    with open_source(args) as source:
        if args.quick is not None:
            _say(source, messages, args.quick, args)
            return 0
        with ends_at_interrupt():
            for text in read_lines("> "):
                try:
                    _say(source, messages, text, args)
                except InvalidRequestError as error:
                    print(f"headrace: {error}", file=sys.stderr)
                    messages.pop()
    return 0


def _say(source: TextSource, messages: list[Message], text: str, args: argparse.Namespace) -> None:
    """Send a message; both it and the answer join the conversation."""
    messages.append({"role": "user", "content": text})
    answer = print_pieces(source.chat(messages, answer_options(args)), args.stats)
    messages.append({"role": "assistant", "content": answer})
