"""The ASGI application: routes, and what every answer has in common."""

import logging
import urllib.parse
from collections.abc import Awaitable, Callable

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route

from headrace.configs.errors import HeadraceError
from headrace.frontend.http.admin import ROUTES, add_admin_routes
from headrace.frontend.http.auth import ApiKeys, KeyGuard, route_path
from headrace.frontend.http.call import Call
from headrace.frontend.http.chat import create_chat_completion
from headrace.frontend.http.completions import create_completion
from headrace.frontend.http.connection import ClientDisconnected
from headrace.frontend.http.errors import ErrorDetail, RequestRefused, error_response
from headrace.frontend.http.health import HealthRoutes, ReadinessGate
from headrace.frontend.http.load import LoadTracker
from headrace.frontend.http.metrics import HttpMetrics
from headrace.frontend.http.models import ModelRoutes
from headrace.frontend.http.request_ids import RequestIdEcho
from headrace.frontend.http.server_state import ServerState
from headrace.frontend.http.tokenize import detokenize, tokenize

logger = logging.getLogger(__name__)

CLIENT_GONE = 499  # nobody reads it; access logs of proxies use the number
Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(state: ServerState) -> FastAPI:
    """The application for `state`; with API keys, a route that is not public needs one of them.

    Routes that change the engine are there only with admin keys, and need one of these.
    """
    app = FastAPI(
        title="headrace", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    _add_facts(app, state)
    for path, prefix, handle in (
        ("/v1/completions", "cmpl", create_completion),
        ("/v1/chat/completions", "chatcmpl", create_chat_completion),
        ("/tokenize", "tokenize", tokenize),
        ("/detokenize", "detokenize", detokenize),
    ):
        app.add_route(path, _endpoint(state, prefix, handle), ["POST"])
    if state.options.admin_api_keys:
        add_admin_routes(app, state)
    app.add_exception_handler(HTTPException, _no_such_route)
    _add_middleware(app, state)
    return app


def _add_facts(app: FastAPI, state: ServerState) -> None:
    """Routes that are only read."""
    health = HealthRoutes(state)
    models = ModelRoutes(state)
    for path, handle in (
        ("/health", health.ready),
        ("/health/live", health.live),
        ("/health/ready", health.ready),
        ("/health/progress", health.progress),
        ("/version", health.version),
        ("/metrics", health.metrics),
        ("/load", health.load),
        ("/v1/models", models.list_models),
        ("/v1/models/{model:path}", models.get_model),
    ):
        app.add_route(path, handle, ["GET"])
    app.add_route("/ping", health.ready, ["GET", "POST"])


def _add_middleware(app: FastAPI, state: ServerState) -> None:
    """From the innermost to the outermost."""
    options = state.options
    if options.enable_server_load_tracking:
        app.add_middleware(LoadTracker, load=state.load)
    app.add_middleware(ReadinessGate, state=state)
    app.add_middleware(
        KeyGuard,
        keys=ApiKeys(options.api_keys),
        admin_keys=ApiKeys(options.admin_api_keys),
        admin_paths=frozenset(ROUTES),
    )
    cross = options.cross_origin
    app.add_middleware(
        CORSMiddleware,
        allow_origins=cross.origins,
        allow_methods=cross.methods,
        allow_headers=cross.headers,
        allow_credentials=cross.credentials,
        expose_headers=("X-Request-Id", "X-Headrace-Unknown-Fields", "X-Headrace-Warning"),
    )
    handlers: dict[object, str] = {
        route.endpoint: route.path for route in app.routes if isinstance(route, Route)
    }
    app.add_middleware(HttpMetrics, metrics=state.metrics, handlers=handlers)
    app.add_middleware(RequestIdEcho)


def _endpoint(
    state: ServerState, prefix: str, handle: Callable[[Call], Awaitable[Response]]
) -> Endpoint:
    """A route around `handle`: every exception becomes an answer, every answer has our headers."""

    async def endpoint(request: Request) -> Response:
        call = Call(request, state, prefix)
        try:
            response = await handle(call)
        except (ClientDisconnected, ClientDisconnect):
            return Response(status_code=CLIENT_GONE)
        except (HeadraceError, RequestRefused) as error:
            response = error_response(error)
        except Exception as error:
            logger.exception("request %s failed", call.response_id)
            response = error_response(error)
        response.headers.update(call.headers())
        return response

    return endpoint


async def _no_such_route(request: Request, error: Exception) -> Response:
    """404 and 405; a path with a slash too many is redirected.

    The body has the framework's `detail`, which some clients look for, beside the envelope.
    """
    assert isinstance(error, HTTPException)
    path = route_path(request.scope)
    if error.status_code == 404 and path.endswith("/") and _has_route(request, path.rstrip("/")):
        return _redirect(request)
    kind = "NotFoundError" if error.status_code == 404 else str(error.detail)
    detail = ErrorDetail(str(error.detail), kind, None, error.status_code)
    body = msgspec.json.encode({"detail": error.detail, "error": detail})
    return Response(body, error.status_code, dict(error.headers or {}), "application/json")


def _has_route(request: Request, path: str) -> bool:
    scope = {**request.scope, "path": path, "root_path": ""}
    return bool(path) and any(
        route.matches(scope)[0] is not Match.NONE for route in request.app.router.routes
    )


def _redirect(request: Request) -> Response:
    """The same place without the slash; relative to the host, whatever the Host header says."""
    path = request.scope["path"].rstrip("/")
    query = request.scope["query_string"].decode("latin-1")
    target = "/" + urllib.parse.quote(path.lstrip("/")) + (f"?{query}" if query else "")
    return Response(status_code=307, headers={"Location": target})
