"""Errors of the HTTP API: one envelope, a status and a type for every cause."""

from typing import Any

import msgspec
from fastapi import Response

from headrace.configs.errors import (
    EngineDeadError,
    EngineNotReadyError,
    HeadraceError,
    InvalidRequestError,
)

RETRY_AFTER_S = 1
MAX_VALUE_CHARS = 200


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong; `code` is the HTTP status, `param` the field at fault."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct, frozen=True):
    """The envelope of every error, also inside a stream."""

    error: ErrorDetail


class RequestRefused(Exception):
    """A request that HTTP itself refuses: schema, media type, size, unknown model."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param


def bad_schema(message: str, param: str | None = None) -> RequestRefused:
    """A body that does not have the form of the API."""
    return RequestRefused(400, "Bad Request", message, param)


def describe_error(error: Exception) -> ErrorBody:
    """The envelope for any exception; what is not ours stays behind a general sentence."""
    message = str(error)
    if isinstance(error, RequestRefused):
        return ErrorBody(ErrorDetail(message, error.kind, error.param, error.status))
    if isinstance(error, InvalidRequestError):
        return ErrorBody(ErrorDetail(message, "BadRequestError", error.parameter, 400))
    if isinstance(error, EngineNotReadyError | EngineDeadError):
        return ErrorBody(ErrorDetail(message, "ServiceUnavailableError", None, 503))
    if not isinstance(error, HeadraceError):
        message = "the server failed on this request; its log says more"
    return ErrorBody(ErrorDetail(message, "InternalServerError", None, 500))


def error_response(error: Exception) -> Response:
    """The HTTP response for an exception. A 503 says when to try again."""
    body = describe_error(error)
    status = body.error.code
    return Response(
        msgspec.json.encode(body),
        status_code=status,
        media_type="application/json",
        headers={"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None,
    )


def show_value(value: Any) -> str:
    """A client's value as JSON, cut to a length that a message can carry."""
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        text = repr(value) if isinstance(value, int) else type(value).__name__
    return text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + "…"
