"""`POST /v1/chat/completions`."""

from collections.abc import Iterator
from typing import Any

from fastapi import Response
from msgspec import UNSET, UnsetType

from headrace.configs.config import ModelConfig
from headrace.configs.errors import InvalidRequestError
from headrace.frontend.admission import RenderedPrompt
from headrace.frontend.http.call import Call
from headrace.frontend.http.fields import CHAT_FIELDS
from headrace.frontend.http.generation import UsageCounter, UsageReport, respond
from headrace.frontend.http.logprobs import LogprobFormat
from headrace.frontend.http.protocol import ChatBody
from headrace.frontend.http.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    ChatResponse,
    Usage,
)
from headrace.frontend.http.sampling import make_sampling_params
from headrace.frontend.outputs import CompletionOutput
from headrace.frontend.sampling_defaults import default_max_tokens


async def create_chat_completion(call: Call) -> Response:
    """Run a chat request; streams if the body says so."""
    body = await call.read(ChatBody, CHAT_FIELDS)
    config = call.config
    params = make_sampling_params(
        body,
        config,
        max_tokens=_max_tokens(body, config),
        logprobs=_num_logprobs(body),
        logprobs_field="top_logprobs",
    )
    if not body.messages:
        raise InvalidRequestError("messages must have at least one message", "messages")
    return await respond(
        call,
        body,
        params,
        _render(call, body, body.messages),
        lambda prompts: ChatFormat(call, body, prompts[0]),
    )


def _max_tokens(body: ChatBody, config: ModelConfig) -> int | None:
    """The request's limit, the model's, or None: the rest of the window."""
    given = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if given is not None:
        return given
    return default_max_tokens(config.default_sampling_params)


def _num_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


async def _render(
    call: Call, body: ChatBody, messages: list[dict[str, Any]]
) -> list[RenderedPrompt]:
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
        variables.setdefault("enable_thinking", body.reasoning_effort != "none")
    prompt = await call.state.engine.renderer.render_chat(
        messages,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs=variables,
    )
    call.warnings += prompt.warnings
    return [prompt]


class ChatFormat:
    """Writes chat completions and their chunks."""

    def __init__(self, call: Call, body: ChatBody, prompt: RenderedPrompt) -> None:
        self._id = call.response_id
        self._created = call.created
        self._model = call.config.served_model_name
        self._fingerprint = call.fingerprint
        self._num_top = body.top_logprobs or 0
        self._logprobs = LogprobFormat(
            call.state.engine.tokenizer, bool(body.return_tokens_as_token_ids)
        )
        self._returns_ids = bool(body.return_token_ids)
        self._prompt_ids = prompt.token_ids if self._returns_ids else None
        self._prompt_text = prompt.text if body.return_prompt_text else None
        starts_message = body.add_generation_prompt is not False or not body.messages
        self._role = "assistant" if starts_message else _last_role(body)
        self._report = UsageReport(body.stream_options)
        self._started: set[int] = set()

    def chunks(
        self, choice: int, output: CompletionOutput, usage: UsageCounter
    ) -> Iterator[ChatChunk]:
        counts = self._report.in_chunk(usage)
        if choice not in self._started:
            self._started.add(choice)
            opening = ChatChunkChoice(choice, ChatDelta(self._role, ""))
            yield self._chunk([opening], counts, is_first=True)
        logprobs = self._logprobs.chat(output, self._num_top)
        has_tokens = bool(output.token_ids) and (logprobs is not None or self._returns_ids)
        is_end = output.finish_reason is not None
        if not (output.text or is_end or has_tokens):
            return  # the text is held back for now
        delta = ChatChunkChoice(
            choice,
            ChatDelta(content=output.text),
            logprobs,
            output.finish_reason,
            output.stop_reason if is_end else UNSET,
            list(output.token_ids) if self._returns_ids else None,
        )
        yield self._chunk([delta], counts, is_last=is_end and not self._report.at_end)

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        return self._chunk([], usage, is_last=True)

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | UnsetType | None,
        *,
        is_first: bool = False,
        is_last: bool = False,
    ) -> ChatChunk:
        return ChatChunk(
            self._id,
            self._created,
            self._model,
            choices,
            usage,
            self._fingerprint if is_last else UNSET,
            self._prompt_ids if is_first else UNSET,
            self._prompt_text if is_first else UNSET,
        )

    def whole(self, choices: list[CompletionOutput], usage: Usage) -> ChatResponse:
        return ChatResponse(
            self._id,
            self._created,
            self._model,
            [self._choice(index, output) for index, output in enumerate(choices)],
            self._fingerprint,
            usage,
            self._prompt_ids,
            self._prompt_text,
        )

    def _choice(self, index: int, output: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            index,
            ChatMessage(output.text, self._role),
            self._logprobs.chat(output, self._num_top),
            output.finish_reason,
            output.stop_reason,
            list(output.token_ids) if self._returns_ids else None,
        )


def _last_role(body: ChatBody) -> str:
    role = (body.messages or [{}])[-1].get("role")
    return role if isinstance(role, str) else "assistant"
