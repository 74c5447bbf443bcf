"""The ASGI application: routes, and what every answer has in common."""

import logging
from collections.abc import Awaitable, Callable, Sequence

from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect

from headrace.configs.errors import HeadraceError
from headrace.frontend.http.auth import ApiKeys, KeyGuard
from headrace.frontend.http.call import Call
from headrace.frontend.http.chat import create_chat_completion
from headrace.frontend.http.completions import create_completion
from headrace.frontend.http.connection import ClientDisconnected
from headrace.frontend.http.errors import RequestRefused, error_response
from headrace.frontend.http.health import HealthRoutes, ReadinessGate
from headrace.frontend.http.models import ModelRoutes
from headrace.frontend.http.server_state import ServerState

logger = logging.getLogger(__name__)

CLIENT_GONE = 499  # nobody reads it; access logs of proxies use the number


def create_app(state: ServerState, api_keys: Sequence[str] = ()) -> FastAPI:
    """The application for `state`; with keys, every route that is not public needs one of them."""
    app = FastAPI(title="headrace", openapi_url=None, docs_url=None, redoc_url=None)
    health = HealthRoutes(state)
    models = ModelRoutes(state)
    app.add_route("/health", health.ready, ["GET"])
    app.add_route("/health/live", health.live, ["GET"])
    app.add_route("/health/ready", health.ready, ["GET"])
    app.add_route("/health/progress", health.progress, ["GET"])
    app.add_route("/version", health.version, ["GET"])
    app.add_route("/metrics", health.metrics, ["GET"])
    app.add_route("/v1/models", models.list_models, ["GET"])
    app.add_route("/v1/models/{model:path}", models.get_model, ["GET"])
    app.add_route("/v1/completions", _endpoint(state, "cmpl", create_completion), ["POST"])
    app.add_route(
        "/v1/chat/completions", _endpoint(state, "chatcmpl", create_chat_completion), ["POST"]
    )
    app.add_middleware(ReadinessGate, state=state)
    app.add_middleware(KeyGuard, keys=ApiKeys(api_keys))  # added last: it comes first
    return app


def _endpoint(
    state: ServerState, prefix: str, handle: Callable[[Call], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
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
