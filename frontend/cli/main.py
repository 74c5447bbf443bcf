"""The `headrace` command. Only the chosen sub-command is imported, so that help is quick."""

import argparse
import difflib
import importlib
import importlib.metadata
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from headrace.configs.environment import check_environ
from headrace.configs.errors import ConfigurationError, HeadraceError

EXIT_ERROR = 1
EXIT_USAGE = 2
EXAMPLES = """examples:
  headrace serve                           serve the default model on http://127.0.0.1:8000
  headrace serve smollm2-135m --port 9000
  headrace chat                            talk to a model, without a server
  headrace chat --url http://127.0.0.1:8000/v1 -q "What is the capital of France?"
  headrace complete -q "Once upon a time" --max-tokens 40
  headrace pull smollm2-135m               download a model for later
"""


@dataclass(frozen=True)
class Command:
    """A sub-command: a module with `add_parser(subparsers)` and `run(args) -> int`."""

    module: str
    help: str


COMMANDS = {
    "serve": Command("headrace.frontend.cli.serve", "start the OpenAI-compatible HTTP server"),
    "chat": Command("headrace.frontend.cli.chat", "chat with a model, here or on a server"),
    "complete": Command("headrace.frontend.cli.complete", "complete a text, here or on a server"),
    "pull": Command("headrace.frontend.cli.pull", "download a model for later"),
}


class Parser(argparse.ArgumentParser):
    """argparse, with a hint at the nearest option when one is unknown."""

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        if unknown is not None:
            near = difflib.get_close_matches(unknown[1], self._all_options(), n=1)
            message += f" (did you mean {near[0]}?)" if near else ""
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message}\n")

    def _all_options(self) -> list[str]:
        options = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    options += parser._option_string_actions
        return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Errors made on purpose are one line."""
    arguments = [_dashed(argument) for argument in (sys.argv[1:] if argv is None else argv)]
    try:
        check_environ(os.environ)
        parser, command = _make_parser(arguments)
        args = parser.parse_args(arguments)
        if command is None:
            parser.print_help()
            return EXIT_USAGE
        signal.signal(signal.SIGTERM, _interrupt)
        return int(importlib.import_module(command.module).run(args))
    except ConfigurationError as error:
        return _fail(error, EXIT_USAGE)
    except HeadraceError as error:
        return _fail(error, EXIT_ERROR)
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except KeyboardInterrupt:  # SIGINT or SIGTERM: what ran is aborted, and that was asked for
        return 0


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _make_parser(arguments: list[str]) -> tuple[Parser, Command | None]:
    """The parser, with the options of the command that `arguments` name, and that command."""
    parser = Parser(
        prog="headrace",
        description="LLM inference and serving: a real model answers, in seconds.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-v", "--version", action="version", version=_version())
    subparsers = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    for name, command in COMMANDS.items():
        if name == chosen:
            importlib.import_module(command.module).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=command.help)
    return parser, COMMANDS.get(chosen) if chosen else None


def _version() -> str:
    return f"headrace {importlib.metadata.version('headrace')}"


def _dashed(argument: str) -> str:
    """`--max_model_len=1` as `--max-model-len=1`: underscores in a flag are dashes."""
    if not argument.startswith("--"):
        return argument
    match = re.match(r"--[^.=]*", argument)
    flag = match.group() if match else ""
    return flag.replace("_", "-") + argument[len(flag) :]


def _fail(error: HeadraceError, code: int) -> int:
    print(f"headrace: error: {error}", file=sys.stderr)
    return code
