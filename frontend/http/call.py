"""What every call of a generation route has: our id, the client's label, notes for headers."""

import re
import time
import urllib.parse
import uuid
from collections.abc import Mapping
from typing import TypeVar

from fastapi import Request

from headrace.configs.config import ModelConfig
from headrace.configs.errors import InvalidRequestError
from headrace.frontend.http.connection import ClientConnection
from headrace.frontend.http.fields import Limits, Unsupported, check_other_fields
from headrace.frontend.http.health import package_version
from headrace.frontend.http.models import check_model_name
from headrace.frontend.http.protocol import GenerationBody, decode_body, read_body
from headrace.frontend.http.server_state import ServerState

BodyT = TypeVar("BodyT", bound=GenerationBody)
_LABEL = re.compile(r"[\x20-\x7e]{1,256}")
MAX_NAMED_FIELDS = 20


class Call:
    """One call. `response_id` is unique; `label` is the client's own id, only echoed."""

    def __init__(self, request: Request, state: ServerState, prefix: str) -> None:
        self.request = request
        self.state = state
        self.response_id = f"{prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.warnings: list[str] = []
        self._label: str | None = None
        self._unknown_fields: list[str] = []
        given = request.headers.get("x-request-id")
        if given is not None and _LABEL.fullmatch(given):
            self._label = given

    async def read(self, kind: type[BodyT], known: Mapping[str, Unsupported]) -> BodyT:
        """Read and check the body. Raises RequestRefused and InvalidRequestError."""
        decoded = decode_body(await read_body(self.request), kind)
        body = decoded.fields
        config = self.config
        if body.request_id is not None and self._label is None:
            if not _LABEL.fullmatch(body.request_id):
                raise InvalidRequestError(
                    "request_id must be 1 to 256 printable ASCII characters", "request_id"
                )
            self._label = body.request_id
        check_model_name(config, body.model)
        limits = Limits(config.vocab_size, body.n or 1)
        self._unknown_fields = check_other_fields(decoded.raw, decoded.others(), known, limits)
        if self._unknown_fields:
            self.state.metrics.count_unknown_fields(len(self._unknown_fields))
        return body

    @property
    def config(self) -> ModelConfig:
        return self.state.ready_engine().model_config

    @property
    def fingerprint(self) -> str:
        """Names what answers: version, parallel sizes (all 1 here), weights."""
        config = self.config
        identity = f"{config.model}\0{config.dtype}\0{config.weight_version}"
        return f"headrace-{package_version()}-{uuid.uuid5(uuid.NAMESPACE_URL, identity).hex[:8]}"

    def connection(self) -> ClientConnection:
        """Watch the client from here on; the body must have been read."""
        return ClientConnection(self.request.receive, self.state.stopping)

    def headers(self) -> dict[str, str]:
        """Headers of the response, whatever it is."""
        headers = {"X-Request-Id": self._label or self.response_id}
        if self._unknown_fields:
            names = [urllib.parse.quote(name[:80]) for name in self._unknown_fields]
            headers["X-Headrace-Unknown-Fields"] = ", ".join(names[:MAX_NAMED_FIELDS])
        if self.warnings:
            text = "; ".join(dict.fromkeys(self.warnings))
            headers["X-Headrace-Warning"] = text.encode("ascii", "backslashreplace").decode()
        return headers
