"""`headrace serve`: the OpenAI-compatible HTTP server."""

import argparse
import dataclasses
import logging
import os
import sys
from typing import Any

from headrace.configs.engine_args import AsyncEngineArgs
from headrace.configs.environment import API_KEY, read
from headrace.configs.options import add_options
from headrace.configs.process_times import process_creation_time
from headrace.frontend.cli.engine_options import add_model_argument, engine_args_of, log_to_stderr
from headrace.frontend.cli.frontend_options import FrontendOptions
from headrace.frontend.http.api_server import ApiServerSetup
from headrace.frontend.http.listener import listening
from headrace.frontend.http.server_supervisor import ServerSupervisor

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
    """Bind the port, start engine core and API servers, watch them. Raises HeadraceError."""
    began = process_creation_time(os.getpid())
    log_to_stderr(logging.INFO, args.log_level)
    engine_args = engine_args_of(args, AsyncEngineArgs)
    options = FrontendOptions.from_cli_args(args).server_options(
        read(API_KEY, os.environ), logs_requests=engine_args.logs_requests
    )
    http_log_level = logging.getLevelNamesMapping()[args.uvicorn_log_level.upper()]
    setup = ApiServerSetup(
        client_id="",
        options=options,
        engine_args={
            field.name: getattr(engine_args, field.name)
            for field in dataclasses.fields(engine_args)
        },
        began=began,
        core_started=0.0,
        sys_path=sys.path,
        log_level=logging.getLogger("headrace").getEffectiveLevel(),
        http_log_level=http_log_level,
        access_log_level=logging.INFO if options.access_log else http_log_level,
    )
    with listening(options) as listener:
        return ServerSupervisor(setup, listener, args.api_server_count).serve()
