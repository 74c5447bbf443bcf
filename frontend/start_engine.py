"""Starting an engine core and the front end beside it: the steps that all engines share."""

import asyncio
import logging
import os
import time
from contextlib import ExitStack

from headrace.configs import environment
from headrace.configs.config import EngineConfig, ParallelConfig
from headrace.configs.engine_args import EngineArgs, UsageContext
from headrace.configs.errors import ConfigurationError
from headrace.engine_core.client import AsyncClient, InprocClient, SyncClient
from headrace.engine_core.messages import Ready
from headrace.engine_core.supervisor import SupervisorThread
from headrace.frontend.renderer import Renderer
from headrace.frontend.startup_report import StartupReport, log_model_facts, memory_table

logger = logging.getLogger(__name__)

Client = SyncClient | InprocClient
EXTERNAL_LAUNCHER = "external_launcher"


def log_phase(phase: str) -> None:
    """What a client's `progress` is told."""
    logger.debug("phase: %s", phase)


def load_renderer(config: EngineConfig, report: StartupReport) -> Renderer:
    """The renderer, beside the engine core's start; raises ModelFileError."""
    began = time.time()
    renderer = Renderer.from_config(config.model_config)
    report.add_overlapped("tokenizer", began)
    return renderer


def spawn(backend: object, has_worker: bool) -> SupervisorThread | None:
    """The supervisor of an engine core, which starts while its configuration is resolved.

    It imports torch meanwhile if a worker is to run in it. None if it is to run in this process, as
    the executor `backend` may need. Raises ConfigurationError for unknown HEADRACE_ variables.
    """
    environment.check_environ(os.environ)
    if backend == EXTERNAL_LAUNCHER or _runs_in_process():
        return None
    return SupervisorThread(has_worker)


def spawn_process(has_worker: bool) -> SupervisorThread:
    """`spawn()` for the asynchronous engine, whose core cannot run in its own process."""
    environment.check_environ(os.environ)
    if _runs_in_process():
        raise ConfigurationError(
            f"{environment.MULTIPROCESSING.name}=0 is for LLM and LLMEngine; the asynchronous "
            "engine needs a process for its core: unset it"
        )
    return SupervisorThread(has_worker)


def _runs_in_process() -> bool:
    return not environment.read_switch(environment.MULTIPROCESSING, os.environ)


def resolve(
    args: EngineArgs,
    usage_context: UsageContext,
    supervisor: SupervisorThread | None,
    report: StartupReport,
) -> EngineConfig:
    """The configuration of `args`; ends `supervisor` if it cannot work."""
    began = time.time()
    try:
        config = args.create_engine_config(usage_context)
    except BaseException:
        if supervisor is not None:
            supervisor.close()
        raise
    report.add_overlapped("resolve model", began)
    return config


def start_blocking(
    config: EngineConfig, supervisor: SupervisorThread | None, report: StartupReport
) -> tuple[Renderer, Client]:
    """Wait until the engine core is ready, and load the tokenizer meanwhile.

    Raises the HeadraceError that says why it cannot start; everything started has ended then.
    """
    if supervisor is None:
        parallel = config.parallel_config
        if parallel.data_parallel_size_local > 1 or parallel.data_parallel_backend == "ray":
            raise ConfigurationError(
                f"{environment.MULTIPROCESSING.name}=0 runs one engine core, in this process; "
                f"{_why_processes(parallel)} needs processes"
            )
        began = time.time()
        renderer = load_renderer(config, report)
        inproc = InprocClient(config, log_phase)
        _finish(config, renderer, inproc.ready, report, began)
        return renderer, inproc
    with ExitStack() as undo:
        undo.callback(supervisor.close)
        client = SyncClient(supervisor)
        undo.callback(client.close)
        client.send_config(config)
        renderer = load_renderer(config, report)
        client.wait_ready(log_phase)
        _finish(config, renderer, client.ready, report, supervisor.started)
        undo.pop_all()
    return renderer, client


def _why_processes(parallel: ParallelConfig) -> str:
    if parallel.data_parallel_backend == "ray":
        return "data_parallel_backend ray"
    return f"data_parallel_size {parallel.data_parallel_size}"


async def start_async(
    config: EngineConfig, started: float, client: AsyncClient, report: StartupReport
) -> Renderer:
    """`start_blocking` for a client that is attached to the running event loop; ends nothing.

    `started`: when the engine core's process was, seconds since the epoch. Raises
    ConfigurationError for an executor that needs every process to be given the same requests.
    """
    if config.parallel_config.distributed_executor_backend == EXTERNAL_LAUNCHER:
        raise ConfigurationError(
            "distributed_executor_backend external_launcher is for LLM and LLMEngine: every "
            "process must be given the same requests in the same order. Choose mp or ray to serve"
        )

    async def wait_ready() -> float:
        await client.wait_ready(log_phase)
        return time.time()

    loading = asyncio.create_task(asyncio.to_thread(load_renderer, config, report))
    waiting = asyncio.create_task(wait_ready())
    try:  # whichever fails first: a large model must not load for a broken tokenizer
        renderer, core_ready = await asyncio.gather(loading, waiting)
    except BaseException:
        loading.cancel()
        waiting.cancel()
        raise
    _finish(config, renderer, client.ready, report, started, core_ready)
    return renderer


def _finish(
    config: EngineConfig,
    renderer: Renderer,
    ready: Ready,
    report: StartupReport,
    spawned: float,
    core_ready: float | None = None,
) -> None:
    if not report.starts_core:
        logger.info("front end ready after %.2f s", time.time() - report.began)
        return
    report.finish(spawned, ready.phases, core_ready or time.time())
    log_model_facts(config.model_config, renderer.tokenizer)
    logger.info("%s", memory_table(ready.memory))
    logger.info("%s", report.table())
