"""`headrace serve`: the OpenAI-compatible HTTP server."""

import argparse
import logging
import os
from typing import Any

from headrace.configs.engine_args import DEFAULT_MODEL, AsyncEngineArgs, EngineArgs
from headrace.configs.environment import API_KEY, read
from headrace.configs.process_times import process_creation_time
from headrace.engine_core.supervisor import EngineCoreProcess
from headrace.frontend.http.listener import ServerOptions, bind_socket

EXAMPLES = """examples:
  headrace serve
  headrace serve ./model.gguf --port 9000 --max-model-len 2k
  headrace serve org/name --host 0.0.0.0 --api-key "$KEY" --served-model-name my-model
"""


def add_parser(subparsers: Any) -> None:
    """Add the `serve` command with all engine options."""
    parser = subparsers.add_parser(
        "serve",
        help="start the OpenAI-compatible HTTP server",
        description="Serve a model over the OpenAI-compatible HTTP API until SIGINT or SIGTERM.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_model_argument(parser)
    server = parser.add_argument_group("server")
    server.add_argument(
        "--host",
        default=None,
        help="address to listen on (default: 127.0.0.1; with an API key, all addresses)",
    )
    server.add_argument(
        "--port",
        type=int,
        default=8000,
        help="port to listen on; 0 finds a free one (default: 8000)",
    )
    server.add_argument(
        "--api-key",
        nargs="+",
        default=None,
        metavar="KEY",
        help="keys that clients must send, any of them (default: the variable HEADRACE_API_KEY)",
    )
    AsyncEngineArgs.add_cli_args(parser)


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


def engine_args_of(args: argparse.Namespace) -> EngineArgs:
    """The engine arguments of a command line that has MODEL and the engine options."""
    if args.model_tag is not None:
        args.model = args.model_tag
    return AsyncEngineArgs.from_cli_args(args)


def run(args: argparse.Namespace) -> int:
    """Bind the port, start the engine, serve. Raises HeadraceError."""
    began = process_creation_time(os.getpid())
    log_to_stderr(logging.INFO)
    environment_key = read(API_KEY, os.environ)
    keys = args.api_key or ([environment_key] if environment_key else [])
    options = ServerOptions(args.host, args.port, tuple(keys))
    with bind_socket(options) as listener:
        process = EngineCoreProcess()  # imports torch while the rest is imported here
        from headrace.frontend.async_engine import AsyncEngine

        engine = AsyncEngine(engine_args_of(args), began=began, process=process)
        from headrace.frontend.http.server import serve

        return serve(engine, options, listener)


def log_to_stderr(level: int) -> None:
    """Send headrace's log, and warnings of others, to stderr."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    logging.getLogger("headrace").setLevel(level)
