"""`X-Request-Id`: the caller's label for a request, echoed on every response, never a key."""

import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LABEL = re.compile(r"[\x20-\x7e]{1,256}")
_NAME = b"x-request-id"


def valid_label(given: str | None) -> str | None:
    """`given` if it can be echoed: 1 to 256 printable ASCII characters."""
    return given if given is not None and _LABEL.fullmatch(given) else None


class RequestIdEcho:
    """ASGI middleware: a response without the header gets the caller's, or one of ours."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                if not any(name.lower() == _NAME for name, _ in headers):
                    headers.append((_NAME, _request_id(scope).encode("ascii")))
                    message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_with_id)


def _request_id(scope: Scope) -> str:
    given = next((value for name, value in scope["headers"] if name == _NAME), b"")
    return valid_label(given.decode("latin-1")) or uuid.uuid4().hex
