"""How to tokenize a prompt and how to render messages: the parameters of the renderer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

ContentFormat = Literal["auto", "string", "openai"]


@dataclass(frozen=True)
class TokenizeParams:
    """Tokenizing of one prompt.

    `max_total_tokens` is the limit of input plus output, None for no limit; `max_output_tokens` of
    them are reserved for output. `truncate_prompt_tokens` keeps that many tokens (negative: as many
    as the limit allows), None never cuts. The `*_param` fields name the parameters in messages.
    """

    max_total_tokens: int | None
    max_output_tokens: int = 0
    pad_prompt_tokens: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"  # left: keep the end
    do_lower_case: bool = False
    add_special_tokens: bool = True
    needs_detokenization: bool = False
    max_total_tokens_param: str = "max_total_tokens"
    max_output_tokens_param: str = "max_output_tokens"
    truncate_prompt_tokens_param: str = "truncate_prompt_tokens"


@dataclass(frozen=True)
class ChatParams:
    """Rendering of messages. `chat_template` None: the model's own."""

    chat_template: str | None = None
    chat_template_content_format: ContentFormat = "auto"
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
