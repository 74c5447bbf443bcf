"""`POST /tokenize` and `/detokenize`: text or a chat to token ids, and back. No length limit.

All of the work is in the renderer's pool or in a thread: a long text holds no stream up.
"""

import asyncio
from typing import Any

import msgspec
from fastapi import Response

from headrace.configs.errors import InvalidRequestError
from headrace.frontend.admission import RenderedPrompt
from headrace.frontend.http.call import Call
from headrace.frontend.http.chat import chat_params, checked_messages
from headrace.frontend.http.fields import Unsupported, invalid
from headrace.frontend.http.health import json_response
from headrace.frontend.http.protocol import ChatBody, RequestBody
from headrace.frontend.render_params import TokenizeParams

TOKENIZE_FIELDS = {
    "tools": Unsupported((None, [])),
    "media_io_kwargs": Unsupported((None, {})),
    "mm_processor_kwargs": Unsupported((None, {})),
}
MAX_TOKEN_ID = 2**63 - 1


class TokenizeBody(RequestBody, kw_only=True, frozen=True):
    """Body of `POST /tokenize`: `prompt`, or `messages` with what rendering them needs."""

    prompt: Any = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None  # None: true for a prompt, false for a chat
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(RequestBody, kw_only=True, frozen=True):
    """Body of `POST /detokenize`."""

    tokens: Any = None


class Tokens(msgspec.Struct, frozen=True):
    """Answer of `/tokenize`; `token_strs` are spellings in the vocabulary."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(msgspec.Struct, frozen=True):
    """Answer of `/detokenize`."""

    prompt: str


async def tokenize(call: Call) -> Response:
    """Ids of a prompt or of a chat."""
    body = await call.read(TokenizeBody, TOKENIZE_FIELDS)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either prompt or messages", "prompt")
    rendered = await (_prompt(call, body) if body.messages is None else _chat(call, body))
    call.warnings += rendered.warnings
    ids = rendered.token_ids
    strings = await asyncio.to_thread(_strings, call, ids) if body.return_token_strs else None
    return json_response(Tokens(len(ids), call.config.max_model_len, ids, strings))


async def detokenize(call: Call) -> Response:
    """Text of ids, special tokens included; an id that the vocabulary lacks gives nothing."""
    body = await call.read(DetokenizeBody, {})
    return json_response(Text(await asyncio.to_thread(_text, call, body.tokens)))


async def _prompt(call: Call, body: TokenizeBody) -> RenderedPrompt:
    if not isinstance(body.prompt, str):
        raise invalid("prompt", "must be a string", body.prompt)
    if not body.prompt:  # no text is no error here
        return RenderedPrompt("", [])
    params = TokenizeParams(None, add_special_tokens=body.add_special_tokens is not False)
    (rendered,) = await call.state.engine.renderer.render_cmpl_async(
        [{"prompt": body.prompt}], params
    )
    return rendered


async def _chat(call: Call, body: TokenizeBody) -> RenderedPrompt:
    chat = ChatBody(
        messages=body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    messages = checked_messages(chat, call.state.options.limits)
    params = TokenizeParams(None, add_special_tokens=bool(body.add_special_tokens))
    _, (rendered,) = await call.state.engine.renderer.render_chat_async(
        [messages], chat_params(call, chat), params
    )
    return rendered


def _strings(call: Call, ids: list[int]) -> list[str]:
    id_to_token = call.state.engine.tokenizer.id_to_token
    return [id_to_token(token) or "" for token in ids]


def _text(call: Call, ids: Any) -> str:
    wanted = f"must be token ids: ints in [0, {MAX_TOKEN_ID}]"
    if not isinstance(ids, list):
        raise invalid("tokens", wanted, ids)
    for token in ids:
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            raise invalid("tokens", wanted, token)
    tokenizer = call.state.engine.tokenizer
    known = [token for token in ids if token <= tokenizer.max_token_id]
    return str(tokenizer.decode(known, skip_special_tokens=False))
