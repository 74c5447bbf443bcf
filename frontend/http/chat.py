"""`POST /v1/chat/completions`."""

from collections.abc import Mapping
from typing import Any

from fastapi import Response
from msgspec import UNSET

from headrace.configs.errors import InvalidRequestError
from headrace.frontend.admission import RenderedPrompt
from headrace.frontend.http.answer import Answer, ChunkFrame
from headrace.frontend.http.call import Call
from headrace.frontend.http.fields import CHAT_FIELDS, invalid
from headrace.frontend.http.generation import respond
from headrace.frontend.http.limits import RequestLimits
from headrace.frontend.http.protocol import ChatBody
from headrace.frontend.http.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatResponse,
    Usage,
)
from headrace.frontend.http.sampling import SamplingPlan, ScoreRequest, make_sampling_plan
from headrace.frontend.http.tokenizing import prompt_extras, tokenize_params
from headrace.frontend.outputs import CompletionOutput
from headrace.frontend.render_params import ChatParams
from headrace.frontend.sampling_defaults import default_max_tokens


async def create_chat_completion(call: Call) -> Response:
    """Run a chat request; streams if the body says so."""
    body = await call.read(ChatBody, CHAT_FIELDS)
    rules = call.rules()
    given = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if given is None:  # the model's limit, or the rest of the window
        given = default_max_tokens(rules.config.default_sampling_params)
    scores = ScoreRequest(
        "top_logprobs",
        output=_num_logprobs(body),
        prompt=None if body.stream else body.prompt_logprobs,
    )
    plan = await call.compute(lambda: make_sampling_plan(body, rules, scores, max_tokens=given))
    messages = checked_messages(body, rules.limits)
    return await respond(
        call,
        body,
        plan,
        _render(call, body, messages, given),
        lambda prompts: ChatAnswer(call, body, plan, prompts),
    )


def chat_params(call: Call, body: ChatBody) -> ChatParams:
    """How to render the messages. Raises InvalidRequestError for a template from the client."""
    options = call.state.options
    if body.chat_template is not None and not options.trust_request_chat_template:
        raise InvalidRequestError(
            "chat_template is not accepted from clients: templates come from the operator "
            "(--chat-template), who may allow it with --trust-request-chat-template",
            "chat_template",
        )
    variables: dict[str, Any] = {
        **options.default_chat_template_kwargs,
        **(body.chat_template_kwargs or {}),
    }
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
        variables.setdefault("enable_thinking", body.reasoning_effort != "none")
    return ChatParams(
        chat_template=body.chat_template or options.chat_template,
        chat_template_content_format=options.chat_template_content_format,
        chat_template_kwargs=variables,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        documents=body.documents,
    )


def checked_messages(body: ChatBody, limits: RequestLimits) -> list[dict[str, Any]]:
    """The messages, at least one. Raises InvalidRequestError where there are too many."""
    messages = body.messages
    if not messages:
        raise InvalidRequestError("messages must have at least one message", "messages")
    if len(messages) > limits.max_messages:
        raise invalid("messages", f"must be at most {limits.max_messages}", len(messages))
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and len(content) > limits.max_content_parts:
            raise invalid(
                "messages",
                f"must have at most {limits.max_content_parts} parts of content each",
                len(content),
            )
    return messages


def _num_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


async def _render(
    call: Call, body: ChatBody, messages: list[dict[str, Any]], max_tokens: int | None
) -> list[RenderedPrompt]:
    renderer = call.state.engine.renderer
    _, prompts = await renderer.render_chat_async(
        [messages],
        chat_params(call, body),
        tokenize_params(body, renderer.default_chat_tok_params, call.config, max_tokens),
        prompt_extras=prompt_extras(body),
    )
    return prompts


class ChatAnswer(Answer[ChatChunkChoice]):
    """Writes chat completions and their chunks."""

    def __init__(
        self, call: Call, body: ChatBody, plan: SamplingPlan, prompts: list[RenderedPrompt]
    ) -> None:
        super().__init__(call, body, plan, prompts)
        (prompt,) = prompts
        self._prompt_ids = prompt.token_ids if self.returns_ids else None
        self._prompt_text = prompt.text if body.return_prompt_text else None
        last = (body.messages or [{}])[-1]
        self._role = call.state.options.response_role
        if body.add_generation_prompt is False and isinstance(last.get("role"), str):
            self._role = last["role"]
        self._echo = _text(last) if body.echo and last.get("role") == self._role else ""

    def openings(self, choice: int) -> list[ChatChunkChoice]:
        role = ChatChunkChoice(choice, ChatDelta(self._role, ""))
        if not self._echo:
            return [role]
        return [role, ChatChunkChoice(choice, ChatDelta(content=self._echo))]

    def delta(self, choice: int, output: CompletionOutput) -> ChatChunkChoice:
        return ChatChunkChoice(
            choice,
            ChatDelta(content=output.text),
            self._logprobs(output),
            output.finish_reason,
            UNSET if output.finish_reason is None else output.stop_reason,
            self.token_ids(output),
        )

    def chunk(self, choices: list[ChatChunkChoice], frame: ChunkFrame) -> ChatChunk:
        return ChatChunk(
            self.id,
            self.created,
            self.model,
            choices,
            frame.usage,
            frame.fingerprint,
            self._prompt_ids if frame.is_first else UNSET,
            self._prompt_text if frame.is_first else UNSET,
            effective_params=frame.effective_params,
            weight_version=frame.weight_version,
        )

    def whole(self, choices: list[CompletionOutput], usage: Usage) -> ChatResponse:
        return ChatResponse(
            self.id,
            self.created,
            self.model,
            [self._choice(index, output) for index, output in enumerate(choices)],
            self.fingerprint,
            usage,
            self._prompt_ids,
            self._prompt_text,
            prompt_logprobs=self.prompt_logprobs(0),
            effective_params=self.effective,
            weight_version=self.weight_version,
        )

    def _choice(self, index: int, output: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            index,
            ChatMessage(self._echo + output.text, self._role),
            self._logprobs(output),
            output.finish_reason,
            output.stop_reason,
            self.token_ids(output),
        )

    def _logprobs(self, output: CompletionOutput) -> ChatLogprobs | None:
        num_top = self.plan.num_logprobs
        if num_top is None or output.logprobs is None:
            return None
        return self.scores.chat(output.token_ids, output.logprobs, num_top)


def _text(message: Mapping[str, Any]) -> str:
    """The content of a message; of one in parts, their texts."""
    content = message.get("content")
    if isinstance(content, list):
        texts = [part if isinstance(part, str) else part.get("text") for part in content]
        return "\n".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""
