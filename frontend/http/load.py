"""How many generation requests are being answered: the number behind `GET /load`."""

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.frontend.http.auth import route_path

COUNTED_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})


class ServerLoad:
    """Requests from their arrival to the end of their response."""

    def __init__(self) -> None:
        self.num_running = 0


class LoadTracker:
    """ASGI middleware: keeps a `ServerLoad` up to date."""

    def __init__(self, app: ASGIApp, load: ServerLoad) -> None:
        self._app = app
        self._load = load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_path(scope) not in COUNTED_PATHS:
            await self._app(scope, receive, send)
            return
        self._load.num_running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._load.num_running -= 1
