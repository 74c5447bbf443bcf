"""The `headrace` command. Only the chosen sub-command is imported, so that help is quick."""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from headrace import __version__
from headrace.configs import environment
from headrace.configs.errors import ConfigurationError, HeadraceError, UnsupportedFeatureError
from headrace.frontend.cli.arguments import merge_dotted_keys, take_help_topic, with_dashes
from headrace.frontend.cli.config_file import add_config_option, apply_config_file
from headrace.frontend.cli.known_flags import KNOWN_COMMANDS
from headrace.frontend.cli.parser import EXIT_USAGE, Parser

EXIT_ERROR = 1
EXAMPLES = """examples:
  headrace serve                           serve the default model on http://127.0.0.1:8000
  headrace serve smollm2-135m --port 9000
  headrace chat                            talk to a model, without a server
  headrace chat --url http://127.0.0.1:8000/v1 -q "What is the capital of France?"
  headrace complete -q "Once upon a time" --max-tokens 40
  headrace pull smollm2-135m               download a model for later

more help: headrace COMMAND --help, --help=all, --help=FLAG, --help=TEXT to search; --help=env lists
the environment variables
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
    "bench": Command("headrace.frontend.cli.bench.command", "measure speed"),
    "doctor": Command(
        "headrace.frontend.cli.doctor", "check that several workers can work together"
    ),
    "collect-env": Command("headrace.frontend.cli.collect_env", "print a report of this machine"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Errors made on purpose are one line."""
    arguments = [with_dashes(argument) for argument in (sys.argv[1:] if argv is None else argv)]
    try:
        environment.check_environ(os.environ)
        topic, arguments = take_help_topic(arguments)
        if topic is not None:
            return _print_help(topic, arguments)
        parser, command = _make_parser(arguments)
        if command is not None:
            chosen = parser.chosen(arguments)
            add_config_option(chosen)
            apply_config_file(chosen, arguments)
            arguments = merge_dotted_keys(chosen, arguments)
        args = parser.parse_args(arguments)
        if command is None:
            parser.print_help()
            return EXIT_USAGE
        signal.signal(signal.SIGTERM, _interrupt)
        return int(importlib.import_module(command.module).run(args))
    except (ConfigurationError, UnsupportedFeatureError) as error:
        return _fail(error, EXIT_USAGE)
    except HeadraceError as error:
        return _fail(error, EXIT_ERROR)
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except KeyboardInterrupt:  # SIGINT or SIGTERM: what ran is aborted, and that was asked for
        return 0


def _print_help(topic: str, arguments: list[str]) -> int:
    """Print what `--help=TOPIC` asks for; without a command, of the options of `serve`."""
    if topic.lower() == "env":
        print(f"environment variables:\n{environment.table()}")
        return 0
    words = arguments if _command_in(arguments) in COMMANDS else ["serve", *arguments]
    parser, _ = _make_parser(words)
    chosen = parser.chosen(words)
    add_config_option(chosen)
    text = chosen.help_on(topic)
    if text is None:
        chosen.error(f"--help={topic}: no option, group or text of {chosen.prog} has that")
    print(text, end="")
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
    parser.add_argument("-v", "--version", action="version", version=f"headrace {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)
    chosen = _command_in(arguments)
    if chosen in KNOWN_COMMANDS:
        parser.error(f"{chosen} is known but not implemented yet")
    for name, command in COMMANDS.items():
        if name == chosen:
            importlib.import_module(command.module).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=command.help)
    return parser, COMMANDS.get(chosen) if chosen else None


def _command_in(arguments: list[str]) -> str | None:
    return next((word for word in arguments if not word.startswith("-")), None)


def _fail(error: HeadraceError, code: int) -> int:
    print(f"headrace: error: {error}", file=sys.stderr)
    return code
