"""Routes that change the engine: pausing, sleep, weights, calls of workers.

They exist only with an admin key, and take no other. A call waits while the engine core restarts.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response

from headrace.configs.errors import HeadraceError, InvalidRequestError
from headrace.frontend.http.errors import RequestRefused, error_response
from headrace.frontend.http.health import json_response
from headrace.frontend.http.protocol import RequestBody, decode_body, read_body
from headrace.frontend.http.server_state import ServerState

logger = logging.getLogger(__name__)

BodyT = TypeVar("BodyT", bound=RequestBody)
Handle = Callable[[Request], Awaitable[Response]]
_TRUE, _FALSE = ("true", "1"), ("false", "0")


class CollectiveRpcBody(RequestBody, kw_only=True, frozen=True):
    """A worker's method by name; arguments that JSON can hold. `timeout`: seconds."""

    method: str
    args: list[Any] = msgspec.field(default_factory=list)
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    timeout: float | None = None


class InitBody(RequestBody, kw_only=True, frozen=True):
    """How to meet the trainer."""

    init_info: dict[str, Any] = msgspec.field(default_factory=dict)


class UpdateBody(RequestBody, kw_only=True, frozen=True):
    """Where new weights are, or which ones the trainer sends."""

    update_info: dict[str, Any] | list[Any]


class FinishBody(RequestBody, kw_only=True, frozen=True):
    """What the new weights are to be called."""

    weight_version: str | None = None


class VersionBody(RequestBody, kw_only=True, frozen=True):
    """What the weights are to be called."""

    new_version: str


class AdminRoutes:
    """A handler for each path of `ROUTES`."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def pause(self, request: Request) -> Response:
        """Hold new requests; the answer comes when nothing runs. `mode`: abort, wait, keep."""
        await self._call(
            "pause",
            mode=request.query_params.get("mode", "abort"),
            clear_cache=_flag(request, "clear_cache", default=True),
        )
        return json_response({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        await self._call("resume")
        return json_response({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        return json_response({"is_paused": await self._call("is_paused")})

    async def sleep(self, request: Request) -> Response:
        """Give memory back; it is free when the answer comes."""
        level = request.query_params.get("level", "1")
        if level not in ("0", "1", "2"):
            raise InvalidRequestError(f"level must be 0, 1 or 2, got {level[:20]!r}", "level")
        await self._call("sleep", level=int(level), mode=request.query_params.get("mode"))
        return json_response({"status": "sleeping", "level": int(level)})

    async def wake_up(self, request: Request) -> Response:
        tags = request.query_params.getlist("tags") or None
        answer = await self._call("wake_up", tags=tags)
        return json_response({"status": answer["status"], "tags": tags})

    async def is_sleeping(self, request: Request) -> Response:
        return json_response({"is_sleeping": await self._call("is_sleeping")})

    async def release_kv_cache_memory(self, request: Request) -> Response:
        await self._call("release_kv_cache_memory")
        return json_response({"status": "kv_cache_released"})

    async def reset_prefix_cache(self, request: Request) -> Response:
        return json_response({"success": bool(await self._call("reset_prefix_cache"))})

    async def reload_weights(self, request: Request) -> Response:
        """Read the weights of this version again, as after sleep at level 2."""
        return await self._message("reload_weights", "the weights were read again")

    async def init_weight_transfer_engine(self, request: Request) -> Response:
        body = await self._read(request, InitBody)
        text = "the weight transfer is set up"
        return await self._message("init_weight_transfer_engine", text, init_info=body.init_info)

    async def shutdown_weight_transfer_engine(self, request: Request) -> Response:
        return await self._message("shutdown_weight_transfer_engine", "the transfer is shut down")

    async def start_weight_update(self, request: Request) -> Response:
        return await self._message("start_weight_update", "a weight update was started")

    async def start_draft_weight_update(self, request: Request) -> Response:
        return await self._message("start_draft_weight_update", "")

    async def update_weights(self, request: Request) -> Response:
        body = await self._read(request, UpdateBody)
        text = "the weights were taken"
        return await self._message("update_weights", text, update_info=body.update_info)

    async def finish_weight_update(self, request: Request) -> Response:
        """The new weights serve when the answer comes."""
        body = await self._read(request, FinishBody, is_optional=True)
        info = await self._call("finish_weight_update", weight_version=body.weight_version)
        return json_response({"message": "the new weights serve", **info})

    async def rollback_weight_update(self, request: Request) -> Response:
        return await self._message("rollback_weight_update", "the new weights were dropped")

    async def update_weight_version(self, request: Request) -> Response:
        version = (await self._read(request, VersionBody)).new_version
        await self._call("update_weight_version", new_version=version)
        return json_response({"success": True, "new_version": version})

    async def weight_info(self, request: Request) -> Response:
        return json_response(await self._call("weight_info"))

    async def get_world_size(self, request: Request) -> Response:
        """Workers, of all replicas unless `include_dp` is false."""
        size = await self._call("world_size")
        if _flag(request, "include_dp", default=True):
            size *= self._state.engine.config.parallel_config.data_parallel_size
        return json_response({"world_size": size})

    async def collective_rpc(self, request: Request) -> Response:
        """A worker's method on every worker; results by rank."""
        body = await self._read(request, CollectiveRpcBody)
        try:
            results = await self._state.engine.collective_rpc(
                body.method, body.timeout, body.args, body.kwargs
            )
        except TimeoutError as error:
            raise RequestRefused(504, "Gateway Timeout", str(error)) from error
        return json_response({"results": [_shown(result) for result in results]})

    async def _message(self, method: str, text: str, **kwargs: Any) -> Response:
        await self._call(method, **kwargs)
        return json_response({"message": text})

    async def _call(self, method: str, **kwargs: Any) -> Any:
        return await self._state.engine.call(method, kwargs)

    async def _read(
        self, request: Request, kind: type[BodyT], *, is_optional: bool = False
    ) -> BodyT:
        """The body. Raises RequestRefused; an empty one is {} where it `is_optional`."""
        limits = self._state.options.limits
        if is_optional and _has_no_body(request):
            return msgspec.convert({}, kind)
        return decode_body(await read_body(request, limits.max_body_bytes), kind, limits).fields


# By path, which is the name of the handler: the HTTP method.
ROUTES: Mapping[str, str] = {
    **dict.fromkeys(("/is_paused", "/is_sleeping", "/weight_info", "/get_world_size"), "GET"),
    **dict.fromkeys(
        (
            "/pause", "/resume", "/sleep", "/wake_up", "/release_kv_cache_memory",
            "/reset_prefix_cache", "/reload_weights", "/init_weight_transfer_engine",
            "/shutdown_weight_transfer_engine", "/start_weight_update",
            "/start_draft_weight_update", "/update_weights", "/finish_weight_update",
            "/rollback_weight_update", "/update_weight_version", "/collective_rpc",
        ),
        "POST",
    ),
}  # fmt: skip


def add_admin_routes(app: FastAPI, state: ServerState) -> None:
    """Add them all; the caller guards them with the admin key."""
    routes = AdminRoutes(state)
    for path, method in ROUTES.items():
        app.add_route(path, _answering(getattr(routes, path.removeprefix("/"))), [method])


def _answering(handle: Handle) -> Handle:
    """Every exception becomes an answer."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handle(request)
        except (HeadraceError, RequestRefused) as error:
            return error_response(error)
        except Exception as error:
            logger.exception("%s failed", request.url.path)
            return error_response(error)

    return endpoint


def _has_no_body(request: Request) -> bool:
    headers = request.headers
    return "transfer-encoding" not in headers and headers.get("content-length", "0") == "0"


def _flag(request: Request, name: str, *, default: bool) -> bool:
    given = request.query_params.get(name)
    if given is None:
        return default
    if given.lower() not in (*_TRUE, *_FALSE):
        raise InvalidRequestError(f"{name} must be true or false, got {given[:20]!r}", name)
    return given.lower() in _TRUE


def _shown(result: Any) -> Any:
    """What JSON has no exact form for is written as text."""
    return result if result is None or isinstance(result, dict | list) else str(result)
