"""`headrace serve`: the OpenAI-compatible HTTP server."""

import argparse
import logging
import os
from typing import Any

from headrace.configs.engine_args import AsyncEngineArgs
from headrace.configs.environment import API_KEY, read
from headrace.configs.options import add_options
from headrace.configs.process_times import process_creation_time
from headrace.engine_core.supervisor import EngineCoreProcess
from headrace.frontend.cli.engine_options import add_model_argument, engine_args_of, log_to_stderr
from headrace.frontend.cli.frontend_options import FrontendOptions
from headrace.frontend.http.listener import listening

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
    add_options(parser, FrontendOptions)
    AsyncEngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    """Bind the port, start the engine, serve. Raises HeadraceError."""
    began = process_creation_time(os.getpid())
    log_to_stderr(logging.INFO, args.log_level)
    engine_args = engine_args_of(args, AsyncEngineArgs)
    options = FrontendOptions.from_cli_args(args).server_options(
        read(API_KEY, os.environ), logs_requests=engine_args.logs_requests
    )
    _set_http_log(args.uvicorn_log_level, options.access_log)
    with listening(options) as listener:
        process = EngineCoreProcess()  # imports torch while the rest is imported here
        from headrace.frontend.async_engine import AsyncEngine
        from headrace.frontend.startup_report import StartupReport

        engine = AsyncEngine(engine_args, StartupReport(began), process)
        from headrace.frontend.http.server import serve

        return serve(engine, options, listener)


def _set_http_log(level: str, access_log: bool) -> None:
    logging.getLogger("uvicorn").setLevel(level.upper())
    logging.getLogger("uvicorn.access").setLevel("INFO" if access_log else level.upper())
