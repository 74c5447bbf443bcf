"""API keys. Every route needs one, unless it is on the short public list."""

import hashlib
import hmac
from collections.abc import Sequence, Set

from fastapi import Response
from starlette.types import ASGIApp, Receive, Scope, Send

PUBLIC_PATHS = frozenset(
    {
        "/health", "/health/live", "/health/ready", "/health/progress", "/metrics", "/version",
        "/ping",
    }
)  # fmt: skip


class ApiKeys:
    """The accepted keys, as SHA-256 digests."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accepts(self, authorization: bytes) -> bool:
        """Whether a header value is `Bearer KEY` with a known key; the time does not tell which."""
        scheme, _, key = authorization.partition(b" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(matches) and scheme.lower() == b"bearer"


class KeyGuard:
    """ASGI middleware: 401 for every path off the public list that comes without a key.

    `admin_paths` take `admin_keys` alone, once there are any.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        admin_keys: ApiKeys | None = None,
        admin_paths: Set[str] = frozenset(),
    ) -> None:
        self._app = app
        self._keys = keys
        self._admin_keys = admin_keys
        self._admin_paths = admin_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] in ("http", "websocket") and route_path(scope) not in PUBLIC_PATHS
        keys = self._keys
        if self._admin_keys and guarded and route_path(scope) in self._admin_paths:
            keys = self._admin_keys
        if not guarded or not keys or keys.accepts(_authorization(scope)):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            response = Response(
                b'{"error":"Unauthorized"}',
                status_code=401,
                media_type="application/json",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await response(scope, receive, send)


def route_path(scope: Scope) -> str:
    """The path that routes see: without the prefix of `--root-path`, as a proxy would strip it."""
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "")
    return path[len(prefix) :] if prefix and path.startswith(prefix + "/") else path


def _authorization(scope: Scope) -> bytes:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    return next((value for name, value in headers if name == b"authorization"), b"")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
