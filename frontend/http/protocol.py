"""Request bodies, typed and strict, and how they are decoded.

A body is decoded in two passes: its top-level names with their raw values, to find unknown and
unsupported fields, and then the fields that this version acts on. `true` and `1.5` are no ints.
"""

import re
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import msgspec
from fastapi import Request

from headrace.frontend.http.errors import MAX_VALUE_CHARS, RequestRefused, bad_schema
from headrace.frontend.http.json_shape import find_excess
from headrace.frontend.http.limits import RequestLimits

_PATH = re.compile(r" - at `(?P<path>[^`]*)`$")

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options`: whether usage comes at the end of a stream, or with every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RequestBody(msgspec.Struct, kw_only=True, frozen=True):
    """What the body of every route about a model may have."""

    model: str | None = None
    request_id: str | None = None


class GenerationBody(RequestBody, kw_only=True, frozen=True):
    """Fields that completions and chat share. None is unset: the model's default, then ours."""

    max_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Any = None  # Any: checked by hand, so that messages give the range
    allowed_token_ids: Any = None
    bad_words: Any = None
    stop: str | list[str] | None = None
    stop_token_ids: Any = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str | None = None
    echo: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_effective_params: bool | None = None


class CompletionBody(GenerationBody, kw_only=True, frozen=True):
    """Body of `POST /v1/completions`."""

    prompt: Any = None  # str, [str], [int] or [[int]]; checked by hand
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class ChatBody(GenerationBody, kw_only=True, frozen=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, str]] | None = None
    reasoning_effort: ReasoningEffort | None = None
    return_prompt_text: bool | None = None


BodyT = TypeVar("BodyT", bound=RequestBody)


@dataclass(frozen=True)
class DecodedBody(Generic[BodyT]):
    """A decoded body, and the raw JSON of each of its top-level fields."""

    fields: BodyT
    raw: dict[str, msgspec.Raw]

    def others(self) -> list[str]:
        """Names in the body that its type does not have."""
        known = self.fields.__struct_fields__
        return [name for name in self.raw if name not in known]


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The request's JSON text. Raises RequestRefused for another media type or too many bytes."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise bad_schema(
            f"the body must have Content-Type: application/json, got {media_type[:80] or 'none'}"
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise bad_schema("compressed bodies are not accepted")
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise RequestRefused(
                413, "Content Too Large", f"the body is longer than {max_bytes} bytes"
            )
        chunks.append(chunk)
    return b"".join(chunks)


def decode_body(data: bytes, kind: type[BodyT], limits: RequestLimits) -> DecodedBody[BodyT]:
    """Decode a body. Raises RequestRefused (400) with the field, its value and what it must be."""
    if (excess := find_excess(data, limits)) is not None:
        raise bad_schema(excess)
    raw: dict[str, msgspec.Raw] = {}
    try:
        raw = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        return DecodedBody(msgspec.json.decode(data, type=kind), raw)
    except msgspec.ValidationError as error:
        raise _schema_error(str(error), raw) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_schema(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise bad_schema("the body is nested too deeply") from error


def decode_value(raw: msgspec.Raw, name: str) -> Any:
    """The JSON value of one field. Raises RequestRefused if it cannot be represented."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_schema(f"{name}: {error}", f"body.{name}") from error


def _schema_error(message: str, raw: dict[str, msgspec.Raw]) -> RequestRefused:
    match = _PATH.search(message)
    text = message[: match.start()] if match else message
    path = match["path"].removeprefix("$").removeprefix(".") if match else ""
    if not path:
        return bad_schema(f"the body must be a JSON object of request fields: {text}")
    name = re.split(r"[.\[]", path, maxsplit=1)[0]
    shown = ""
    if name in raw:
        value = bytes(raw[name]).decode("utf-8", "replace")
        shown = f", got {value[:MAX_VALUE_CHARS]}"
    return bad_schema(f"{path}: {text}{shown}", f"body.{path}")
