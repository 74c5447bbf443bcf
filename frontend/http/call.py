"""What every call of a route about a model has: our id, the client's label, notes for headers."""

import time
import urllib.parse
import uuid
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import TypeVar

from fastapi import Request

from headrace.configs.config import ModelConfig
from headrace.configs.errors import InvalidRequestError
from headrace.frontend.http.connection import ClientConnection
from headrace.frontend.http.fields import (
    Unsupported,
    check_other_fields,
    invalid,
    refuse_unknown,
)
from headrace.frontend.http.health import package_version
from headrace.frontend.http.models import check_model_name
from headrace.frontend.http.protocol import RequestBody, decode_body, read_body
from headrace.frontend.http.request_ids import valid_label
from headrace.frontend.http.sampling import SamplingRules
from headrace.frontend.http.server_state import ServerState

T = TypeVar("T")
BodyT = TypeVar("BodyT", bound=RequestBody)
MAX_NAMED_FIELDS = 20
PRIORITY_HEADERS = ("x-headrace-priority", "x-vllm-priority")
RANK_HEADER = "x-data-parallel-rank"


class Call:
    """One call. `response_id` is unique; `label` is the client's own id, only echoed."""

    def __init__(self, request: Request, state: ServerState, prefix: str) -> None:
        self.request = request
        self.state = state
        self.response_id = f"{prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.warnings: list[str] = []
        self._label = valid_label(request.headers.get("x-request-id"))
        self._unknown_fields: list[str] = []
        self._num_body_bytes = 0

    async def read(self, kind: type[BodyT], known: Mapping[str, Unsupported]) -> BodyT:
        """Read and check the body. Raises RequestRefused and InvalidRequestError."""
        limits = self.state.options.limits
        data = await self.state.shutdown.guard(read_body(self.request, limits.max_body_bytes))
        self._num_body_bytes = len(data)
        decoded = await self.compute(partial(decode_body, data, kind, limits))
        body = decoded.fields
        if body.request_id is not None and self._label is None:
            self._label = valid_label(body.request_id)
            if self._label is None:
                raise InvalidRequestError(
                    f"request_id must be 1 to {limits.max_request_id_chars} printable ASCII "
                    "characters",
                    "request_id",
                )
        check_model_name(self.config, body.model)
        self._unknown_fields = await self.compute(
            lambda: check_other_fields(decoded.raw, decoded.others(), known)
        )
        if self._unknown_fields:
            self.state.metrics.count_unknown_fields(len(self._unknown_fields))
            if self.state.options.strict:
                names = {*body.__struct_fields__, *known}
                raise refuse_unknown(self._unknown_fields[0], names)
        self._check_rank()
        return body

    async def compute(self, work: Callable[[], T]) -> T:
        """The result of `work` on the body; in a thread if the body is big."""
        return await self.state.pool.run(work, self._num_body_bytes)

    @property
    def config(self) -> ModelConfig:
        return self.state.engine.model_config

    def rules(self) -> SamplingRules:
        return SamplingRules(self.config, self.state.options.limits)

    @property
    def fingerprint(self) -> str:
        """Names what answers: version, parallel sizes (all 1 here), weights."""
        config = self.config
        weights = f"{config.dtype}\0{config.quantization}\0{config.weight_version}"
        return _fingerprint(f"{config.model}\0{weights}")

    def priority(self, given: int | None) -> int:
        """The body's `priority`, or the header's, which wins; what is no int64 there is ignored."""
        for name in PRIORITY_HEADERS:
            value = _header_int(self.request.headers.get(name))
            if value is not None and -(2**63) <= value < 2**63:
                return value
        return given or 0

    def connection(self) -> ClientConnection:
        """Watch the client from here on; the body must have been read."""
        return ClientConnection(self.request.receive, self.state.shutdown)

    @property
    def label(self) -> str:
        """The client's name for the call, or ours."""
        return self._label or self.response_id

    def headers(self) -> dict[str, str]:
        """Headers of the response, whatever it is."""
        headers = {"X-Request-Id": self.label}
        if self._unknown_fields:
            names = [urllib.parse.quote(name[:80]) for name in self._unknown_fields]
            headers["X-Headrace-Unknown-Fields"] = ", ".join(names[:MAX_NAMED_FIELDS])
        if self.warnings:
            text = "; ".join(dict.fromkeys(self.warnings))
            headers["X-Headrace-Warning"] = text.encode("ascii", "backslashreplace").decode()
        return headers

    @property
    def pinned_rank(self) -> int | None:
        """The replica that the client wants; what is no integer is ignored."""
        return _header_int(self.request.headers.get(RANK_HEADER))

    def _check_rank(self) -> None:
        ranks = self.state.engine.config.parallel_config.ranks
        if self.pinned_rank is not None and self.pinned_rank not in ranks:
            raise invalid(
                "X-data-parallel-rank",
                f"is out of range [{ranks.start}, {ranks.stop})",
                self.pinned_rank,
            )


@lru_cache(maxsize=8)
def _fingerprint(identity: str) -> str:
    return f"headrace-{package_version()}-{uuid.uuid5(uuid.NAMESPACE_URL, identity).hex[:8]}"


def _header_int(value: str | None) -> int | None:
    """The integer that a header spells, None if it spells none."""
    digits = (value or "").strip()[:40]
    is_int = digits.removeprefix("-").isascii() and digits.removeprefix("-").isdigit()
    return int(digits) if is_int else None
