"""Chat messages to text and token ids, by the model's own template.

The one way from messages to ids for every entry point: nothing is added to what the template writes
(no second start token), and only what the template itself wrote can become a control token.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from headrace.configs.errors import InvalidRequestError
from headrace.frontend.render_params import ChatParams, ContentFormat
from headrace.frontend.special_spellings import SpellingGuard, SpellingSet, spelling_set
from headrace.frontend.template_budget import DEFAULT_LIMITS, TemplateLimits
from headrace.frontend.template_sandbox import CompiledTemplate, compile_template

# Names that a request may not set through chat_template_kwargs.
RESERVED_VARIABLES = frozenset(
    {
        "messages", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token",
        "tools", "documents", "chat_template", "conversation", "tokenize", "raise_exception",
        "strftime_now", "loop", "self",
    }
)  # fmt: skip
MAX_DEPTH = 64  # of lists and objects in messages and template arguments
TEXT_PART_KEYS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}


class ChatTokenizer(Protocol):
    """What rendering needs of a tokenizer."""

    @property
    def chat_template(self) -> str | None: ...
    @property
    def bos_token(self) -> str | None: ...
    @property
    def eos_token(self) -> str | None: ...
    @property
    def special_tokens(self) -> dict[str, int]: ...
    def encode(
        self, text: str, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]: ...


class RenderedChat(NamedTuple):
    """`text` as the template wrote it, its token ids, and the messages as the template got them."""

    text: str
    token_ids: list[int]
    conversation: list[dict[str, Any]]


DEFAULT_CHAT_PARAMS = ChatParams()


def render_chat(
    tokenizer: ChatTokenizer,
    messages: Sequence[Mapping[str, Any]],
    params: ChatParams = DEFAULT_CHAT_PARAMS,
    limits: TemplateLimits = DEFAULT_LIMITS,
) -> RenderedChat:
    """Render `messages` with the template of `params` (the operator's) or the model's, and encode.

    Raises InvalidRequestError: no template, bad messages, an error raised by the template, a limit
    passed.
    """
    source = params.chat_template or tokenizer.chat_template
    if not source:
        raise InvalidRequestError(
            "this model has no chat template, so it cannot answer messages; give one (headrace "
            "serve --chat-template, LLM.chat(chat_template=...)), or have plain text continued "
            "(headrace complete, /v1/completions, LLM.generate)",
            "messages",
        )
    if params.continue_final_message and params.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message goes with add_generation_prompt=false: a prompt cannot both "
            "continue the last message and start a new one",
            "continue_final_message",
        )
    template = compile_template(source)
    plain = _normalize(messages, template, params.chat_template_content_format)
    values = {
        **_template_variables(template, params.chat_template_kwargs),
        "tools": params.tools,  # None, not undefined: that is what templates are written for
        "documents": params.documents,
    }
    _check_depth(plain, "messages")
    _check_depth(values["tools"], "tools")
    _check_depth(values["documents"], "documents")
    _check_depth(values, "chat_template_kwargs")
    spellings = spelling_set(tuple(sorted(tokenizer.special_tokens)))
    guard = SpellingGuard(spellings, [plain, values], source)
    conversation = guard.mark(plain)
    if params.continue_final_message:
        _append_to_final(conversation, guard.end_mark)
    text = template.render(
        {
            **guard.mark(values),
            "messages": conversation,
            "add_generation_prompt": params.add_generation_prompt,
            "bos_token": tokenizer.bos_token or "",
            "eos_token": tokenizer.eos_token or "",
        },
        limits,
    )
    if params.continue_final_message:
        text, found, _ = text.rpartition(guard.end_mark)
        if not found:
            raise InvalidRequestError(
                "the chat template does not render the final message, so it cannot be continued",
                "continue_final_message",
            )
    return RenderedChat(guard.unmark(text), _encode(tokenizer, text, spellings, guard), plain)


def _encode(
    tokenizer: ChatTokenizer, text: str, spellings: SpellingSet, guard: SpellingGuard
) -> list[int]:
    """Ids of the rendered text, in which the spellings in user text are marked."""
    if not guard.has_marks(text):
        return tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    special_tokens = tokenizer.special_tokens
    token_ids: list[int] = []
    for piece, is_special in spellings.split(text):
        if is_special:
            token_ids.append(special_tokens[piece])
        else:
            token_ids += tokenizer.encode(
                guard.unmark(piece), add_special_tokens=False, parse_special=False
            )
    return token_ids


def _template_variables(template: CompiledTemplate, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    reserved = sorted(name for name in kwargs if name in RESERVED_VARIABLES or name.startswith("_"))
    if reserved:
        raise InvalidRequestError(
            f"chat_template_kwargs may not set {', '.join(reserved)}", "chat_template_kwargs"
        )
    return {name: value for name, value in kwargs.items() if name in template.variables}


def _check_depth(value: Any, parameter: str) -> None:
    """Refuse what is nested so deeply that walking it, here or in a template, could overflow."""
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, Mapping | list | tuple) and item]:
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidRequestError(
                f"{parameter} is nested deeper than {MAX_DEPTH} levels", parameter
            )
        level = [
            inner
            for item in level
            for inner in (item.values() if isinstance(item, Mapping) else item)
        ]


def _normalize(
    messages: Sequence[Mapping[str, Any]],
    template: CompiledTemplate,
    content_format: ContentFormat,
) -> list[dict[str, Any]]:
    """Checked copies of the messages with content in the form that the template expects."""
    if not messages:
        raise InvalidRequestError("messages must have at least one message", "messages")
    conversation = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequestError(
                f"messages[{index}] must be an object with a role (a string)", "messages"
            )
        copy = dict(message)
        copy["content"] = _content(copy.get("content"), index, template, content_format)
        reasoning = copy.get("reasoning", copy.get("reasoning_content"))
        if reasoning is not None:
            copy["reasoning"] = copy["reasoning_content"] = reasoning
        if calls := copy.get("tool_calls"):
            if not isinstance(calls, list | tuple):
                raise InvalidRequestError(
                    f"messages[{index}].tool_calls must be a list", "messages"
                )
            copy["tool_calls"] = [_tool_call(call, index) for call in calls]
        conversation.append(copy)
    return conversation


def _content(
    content: Any, index: int, template: CompiledTemplate, content_format: ContentFormat
) -> Any:
    """A string, or the list of text parts that the format "openai" asks for.

    "auto" decides by the template; one that knows both forms gets what the message has.
    """
    if content is None:
        content = ""
    with_parts = content_format == "openai" or (
        content_format == "auto" and template.loops_over_parts
    )
    if isinstance(content, str):
        if not with_parts or (content_format == "auto" and template.tests_for_string):
            return content
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"messages[{index}].content must be a string or a list of parts", "messages"
        )
    texts = [_part_text(part, f"messages[{index}].content[{k}]") for k, part in enumerate(content)]
    return [{"type": "text", "text": text} for text in texts] if with_parts else "\n".join(texts)


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        raise InvalidRequestError(f"{where} must be an object with a type", "messages")
    if kind not in TEXT_PART_KEYS:
        raise InvalidRequestError(
            f"{where} has type {kind[:40]!r}, but the model is not a multimodal model; its parts "
            "have type text",
            "messages",
        )
    text = part.get(TEXT_PART_KEYS[kind])
    if not isinstance(text, str):
        raise InvalidRequestError(
            f"{where} must have a string under {TEXT_PART_KEYS[kind]!r}", "messages"
        )
    return text


def _tool_call(call: Any, index: int) -> dict[str, Any]:
    """A past tool call with its arguments as an object, which is what templates print."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(
            f"messages[{index}].tool_calls must hold objects with function.name", "messages"
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"messages[{index}].tool_calls: the arguments of {function['name'][:40]!r} are "
                "not JSON",
                "messages",
            ) from error
    return {**call, "function": {**function, "arguments": arguments}}


def _append_to_final(conversation: list[dict[str, Any]], end_mark: str) -> None:
    """Put `end_mark` behind the last message's text, to find where it ends in the rendered text."""
    final = conversation[-1]
    content = final["content"]
    if isinstance(content, str):
        final["content"] = content + end_mark
    elif content:
        content[-1] = {**content[-1], "text": content[-1]["text"] + end_mark}
    else:
        final["content"] = [{"type": "text", "text": end_mark}]
