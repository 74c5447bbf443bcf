"""What commands with an engine share: the model to run, engine arguments, the log."""

import argparse
import logging
import os
from typing import TypeVar

from headrace.configs.engine_args import DEFAULT_MODEL, EngineArgs
from headrace.configs.environment import read_log_level
from headrace.configs.options import default_of, flag_of, option_fields

Args = TypeVar("Args", bound=EngineArgs)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add the positional MODEL, and `--model` for those who type it."""
    parser.add_argument(
        "model_tag",
        nargs="?",
        default=None,
        metavar="MODEL",
        help="a directory or .gguf file, an alias such as smollm2-135m or gemma3-270m, or a hub id "
        f"(default: {DEFAULT_MODEL})",
    )
    parser.add_argument("--model", dest="model", default=DEFAULT_MODEL, help=argparse.SUPPRESS)


def engine_args_of(args: argparse.Namespace, kind: type[Args]) -> Args:
    """The engine arguments of a command line that has MODEL and the options of `kind`.

    Raises ConfigurationError or UnsupportedFeatureError for what cannot work, before any start.
    """
    if args.model_tag is not None:
        args.model = args.model_tag
    engine_args = kind.from_cli_args(args)
    engine_args.check()
    return engine_args


def engine_options_given(args: argparse.Namespace) -> list[str]:
    """Flags of `EngineArgs`, beside the model's, that the command line changes."""
    return [
        flag_of(field.name)
        for field in option_fields(EngineArgs)
        if field.name != "model" and getattr(args, field.name) != default_of(field)
    ]


def log_to_stderr(default: int, given: str | None = None) -> None:
    """Send headrace's log, and warnings of others, to stderr.

    The level is `given`, else that of HEADRACE_LOGGING_LEVEL, else `default`.
    """
    name = given or read_log_level(os.environ)
    level = logging.getLevelNamesMapping()[name.upper()] if name else default
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("headrace").setLevel(level)
