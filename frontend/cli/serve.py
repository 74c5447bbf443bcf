"""`headrace serve`: the OpenAI-compatible HTTP server."""

import argparse
import dataclasses
import logging
import os
import sys
from typing import Any

from headrace.configs.engine_args import AsyncEngineArgs, UsageContext
from headrace.configs.environment import API_KEY, read
from headrace.configs.errors import ConfigurationError
from headrace.configs.options import add_options
from headrace.configs.parallel import runs_in_core
from headrace.configs.process_times import process_creation_time
from headrace.frontend.cli.engine_options import add_model_argument, engine_args_of, log_to_stderr
from headrace.frontend.cli.frontend_options import FrontendOptions
from headrace.frontend.http.api_server import ApiServerSetup
from headrace.frontend.http.listener import listening
from headrace.frontend.http.server_supervisor import ServerSupervisor

EXAMPLES = """examples:
  headrace serve
  headrace serve ./model.gguf --port 9000 --max-model-len 2k
  headrace serve -tp 2 --nnodes 2 --master-addr 10.0.0.1 --cluster-key-file cluster.key
  headrace serve -tp 2 --nnodes 2 --master-addr 10.0.0.1 --cluster-key-file cluster.key \
      --node-rank 1 --headless             on the second machine
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
    parser.add_argument(
        "--headless",
        action="store_true",
        help="run workers for the engine on machine 0 (--nnodes), without an HTTP server",
    )
    add_options(parser, FrontendOptions)
    AsyncEngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    """Bind the port, start engine core and API servers, watch them. Raises HeadraceError."""
    began = process_creation_time(os.getpid())
    log_to_stderr(logging.INFO, args.log_level)
    engine_args = engine_args_of(args, AsyncEngineArgs)
    if args.headless:
        return _run_headless(engine_args)
    if engine_args.node_rank > 0:
        raise ConfigurationError(
            f"machine {engine_args.node_rank} answers no requests: add --headless, or start "
            "machine 0 here (--node-rank 0)"
        )
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
        return ServerSupervisor(
            setup, listener, args.api_server_count, has_worker=runs_in_core(engine_args)
        ).serve()


def _run_headless(engine_args: AsyncEngineArgs) -> int:
    from headrace.executors.node_agent import run_agent

    if engine_args.nnodes == 1 or engine_args.node_rank == 0:
        raise ConfigurationError(
            f"--headless is for machines other than the first of several, not for node_rank "
            f"{engine_args.node_rank} of nnodes {engine_args.nnodes}"
        )
    config = engine_args.create_engine_config(UsageContext.API_SERVER)
    return run_agent(config.parallel_config, config.model_config.path)
