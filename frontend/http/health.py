"""Health, version and metrics routes, and the gate in front of all others."""

import contextlib
import functools
import importlib.metadata

import msgspec
from fastapi import Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.configs.errors import HeadraceError
from headrace.frontend.http.auth import PUBLIC_PATHS, route_path
from headrace.frontend.http.errors import error_response
from headrace.frontend.http.server_state import ServerState

LIVE_PATH = "/health/live"


class ReadinessGate:
    """ASGI middleware: 503 for everything but liveness until the engine is ready.

    Afterwards (draining, dead) the public routes answer for themselves, everything else is 503.
    What was let through runs on when the server drains, so it is counted.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = route_path(scope)
        if not self._passes(path):
            try:
                self._state.check_ready()
            except HeadraceError as error:
                await error_response(error)(scope, receive, send)
                return
        is_work = path not in PUBLIC_PATHS
        with self._state.shutdown.running() if is_work else contextlib.nullcontext():
            await self._app(scope, receive, send)

    def _passes(self, path: str) -> bool:
        status = self._state.status
        if path == LIVE_PATH or status == "ready":
            return True
        return status != "starting" and path in PUBLIC_PATHS


class HealthRoutes:
    """`/health*`, `/ping`, `/version`, `/load` and `/metrics`."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def live(self, request: Request) -> Response:
        """200 as soon as the process answers HTTP at all."""
        return Response()

    async def ready(self, request: Request) -> Response:
        """200 while requests run; 503 with the reason otherwise.

        While the engine core is restarted, requests are taken, and wait: better sent elsewhere.
        """
        try:
            self._state.check_ready()
            self._state.check_up()
        except HeadraceError as error:
            return error_response(error)
        return Response()

    async def progress(self, request: Request) -> Response:
        """Last step, seconds since it, running and waiting: tells a stall from a long prefill."""
        status: str = self._state.status
        if status == "ready" and not self._state.engine.is_up:
            status = "restarting"
        return json_response({"status": status, **self._state.engine.progress()})

    async def version(self, request: Request) -> Response:
        return json_response({"version": package_version()})

    async def load(self, request: Request) -> Response:
        """Running generation requests; always 0 unless the server was started to count them."""
        return json_response({"server_load": self._state.load.num_running})

    async def metrics(self, request: Request) -> Response:
        text, content_type = self._state.metrics.exposition(request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})


def json_response(value: object) -> Response:
    """A 200 with `value` as JSON."""
    return Response(msgspec.json.encode(value), media_type="application/json")


@functools.cache
def package_version() -> str:
    return importlib.metadata.version("headrace")
