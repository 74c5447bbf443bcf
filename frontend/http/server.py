"""The server process: socket first, engine in the background, signals, an honest exit code."""

import asyncio
import contextlib
import functools
import logging
import signal
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn
import uvloop
from starlette.types import ASGIApp

from headrace.configs.garbage import settle_garbage_collector
from headrace.frontend.http.app import create_app
from headrace.frontend.http.engine import ServingEngine
from headrace.frontend.http.http_protocol import LimitedProtocol
from headrace.frontend.http.listener import ServerOptions, stop_connections, url_of
from headrace.frontend.http.server_state import ServerState

logger = logging.getLogger(__name__)

GRACEFUL_SHUTDOWN_S = 1  # what was cut gets its last event in this time
KEEP_ALIVE_S = 5
LAST_REQUESTS_S = 0.1  # for requests on connections that began before the end


def serve(
    engine: ServingEngine,
    options: ServerOptions,
    listener: socket.socket,
    has_others: bool = False,
) -> int:
    """Start `engine` and answer on `listener` until SIGINT or SIGTERM; returns the exit code, 0.

    `has_others`: other processes accept connections of `listener` too, and may go on. Raises the
    HeadraceError that ended the engine, or kept it from starting. Everything that was started has
    ended then.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Server(engine, options, listener, has_others).run())


def make_uvicorn_config(app: ASGIApp, options: ServerOptions) -> uvicorn.Config:
    """uvicorn with our limits on what arrives, and TLS if there is a certificate."""
    tls = options.tls
    protocol: Any = functools.partial(LimitedProtocol, limits=options.limits)
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=options.access_log,
        server_header=False,
        root_path=options.root_path,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S,
        ssl_keyfile=tls.keyfile if tls else None,
        ssl_certfile=tls.certfile if tls else None,
        ssl_ca_certs=tls.ca_certs if tls else None,
        ssl_cert_reqs=tls.cert_reqs if tls else ssl.CERT_NONE,
    )


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handling: the signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    def __init__(
        self,
        engine: ServingEngine,
        options: ServerOptions,
        listener: socket.socket,
        has_others: bool,
    ) -> None:
        self._engine = engine
        self._listener = listener
        self._has_others = has_others
        self._url = url_of(listener, options.tls)
        self._state = ServerState(engine, options)
        self._shutdown = self._state.shutdown
        self._timeout_s = options.shutdown_timeout
        self._http = _HttpServer(make_uvicorn_config(create_app(self._state), options))

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, number.name)
        logger.info("listening on %s; the model is loading", self._url)
        http = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        stopping = asyncio.create_task(self._shutdown.begun.wait())
        engine = asyncio.create_task(self._run_engine())
        try:
            await asyncio.wait({http, stopping, engine}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                await self._drain()
            failure = _failure(engine) or _failure(http)
        finally:
            await self._shut_down(http, stopping, engine)
        if failure is not None:
            raise failure
        return 0

    async def _run_engine(self) -> None:
        """Start the engine and wait until it dies; always ends with an exception."""
        await self._engine.start()
        settle_garbage_collector()
        config = self._engine.model_config
        logger.info("ready: %s on %s", config.served_model_name, self._url)
        raise await self._engine.wait_dead()

    def _stop(self, signal_name: str) -> None:
        if self._shutdown.begun.is_set():
            logger.info("%s again: nothing is waited for any more", signal_name)
            self._http.force_exit = True
            self._shutdown.end()
            return
        self._shutdown.begin()
        num_running = self._shutdown.num_at_begin
        logger.info("%s: shutting down with %d running requests", signal_name, num_running)

    async def _drain(self) -> None:
        """Give running requests their time. If the engine dies meanwhile, they end by that."""
        num_cut = await self._shutdown.drain(self._timeout_s)
        num_finished = self._shutdown.num_at_begin - num_cut
        logger.info("shutting down: %d requests finished, %d cut", num_finished, num_cut)

    async def _shut_down(
        self, http: "asyncio.Task[None]", *waiting: "asyncio.Task[object]"
    ) -> None:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        self._shutdown.end()
        engine = asyncio.create_task(self._engine.stop())
        await self._close(http)  # both at once: an engine may need as long as slow clients
        self._state.pool.shutdown()
        await engine

    async def _close(self, http: "asyncio.Task[None]") -> None:
        """End the HTTP server. Whoever has a connection gets an answer first: it is refused."""
        if not self._has_others:
            stop_connections(self._listener)
        if not self._http.force_exit:
            await asyncio.wait({http}, timeout=LAST_REQUESTS_S)
        self._http.should_exit = True
        await asyncio.wait({http})


def _failure(task: "asyncio.Task[None]") -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None
