"""How to tokenize a prompt and how to render messages: the parameters of the renderer."""

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from headrace.configs.errors import InvalidRequestError

logger = logging.getLogger(__name__)

TOO_LONG = "input_tokens"  # the parameter at fault where a prompt has too many tokens
ContentFormat = Literal["auto", "string", "openai"]


class PromptTokenizer(Protocol):
    """What padding, cutting and checking need of a tokenizer."""

    @property
    def pad_token_id(self) -> int | None: ...
    @property
    def max_chars_per_token(self) -> int: ...
    @property
    def num_added_tokens(self) -> tuple[int, int]: ...


@dataclass(frozen=True)
class TokenizeParams:
    """Tokenizing of one prompt. Raises InvalidRequestError for sizes that contradict each other.

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

    def __post_init__(self) -> None:
        if self.max_total_tokens is None:
            return
        if self.max_output_tokens > self.max_total_tokens:
            raise InvalidRequestError(
                f"{self.max_output_tokens_param}={self.max_output_tokens} is above "
                f"{self.max_total_tokens_param}={self.max_total_tokens}",
                self.max_output_tokens_param,
            )
        limit = self.max_total_tokens - self.max_output_tokens
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens > limit:
            raise InvalidRequestError(
                f"{self.truncate_prompt_tokens_param}={self.truncate_prompt_tokens} is above the "
                f"input limit {limit} ({self.max_total_tokens_param}={self.max_total_tokens} less "
                f"{self.max_output_tokens} output tokens)",
                self.truncate_prompt_tokens_param,
            )

    @property
    def max_input_tokens(self) -> int | None:
        """What is left for the prompt; None: no limit."""
        if self.max_total_tokens is None:
            return None
        return self.max_total_tokens - self.max_output_tokens

    def with_kwargs(self, tokenization_kwargs: Mapping[str, Any]) -> "TokenizeParams":
        """New parameters from options in the style of tokenizers; unknown ones are warned about."""
        options = dict(tokenization_kwargs)
        changes: dict[str, Any] = {}
        max_length = options.pop("max_length", None)
        padding = options.pop("padding", None)
        if padding == "max_length":
            changes["pad_prompt_tokens"] = -1 if max_length is None else max_length
        elif padding in (False, "do_not_pad"):
            changes["pad_prompt_tokens"] = None
        elif padding is not None:
            options["padding"] = padding  # a batch is not padded to its longest prompt here
        truncation = options.pop("truncation", None)
        if truncation in (True, "longest_first"):
            changes["truncate_prompt_tokens"] = -1 if max_length is None else max_length
        elif truncation in (False, "do_not_truncate"):
            changes["truncate_prompt_tokens"] = None
        elif truncation is not None:
            options["truncation"] = truncation
        for name in (
            "pad_prompt_tokens", "truncate_prompt_tokens", "truncation_side", "do_lower_case",
            "add_special_tokens", "needs_detokenization",
        ):  # fmt: skip
            if name in options:
                changes[name] = options.pop(name)
        if options:
            logger.warning("tokenization options that are not known: %s", sorted(options))
        return dataclasses.replace(self, **changes)

    def prepare_text(self, text: str, tokenizer: PromptTokenizer) -> str:
        """The text to encode. Refuses one that is certainly too long, before it costs anything."""
        limit = self.max_input_tokens
        if limit is not None and self.truncate_prompt_tokens is None:
            longest = limit * tokenizer.max_chars_per_token
            if len(text) > longest:
                raise InvalidRequestError(
                    f"the prompt has {len(text)} characters, but {limit} input tokens "
                    f"({self._sizes()}) hold at most {longest}; shorten the prompt",
                    TOO_LONG,
                )
        return text.lower() if self.do_lower_case else text

    def finish(
        self, ids: list[int], tokenizer: PromptTokenizer | None, was_text: bool = False
    ) -> list[int]:
        """Pad, truncate and check the length, in this order.

        `was_text`: the ids were encoded just now, so the tokens that `add_special_tokens` put
        around the text stay when it is cut.
        """
        ids = self._pad(ids, tokenizer)
        around = (0, 0)
        if was_text and tokenizer is not None and self.add_special_tokens:
            around = tokenizer.num_added_tokens
        ids = self._truncate(ids, *around)
        limit = self.max_input_tokens
        if limit is not None and len(ids) > limit:
            most = limit if self.max_output_tokens else limit - 1  # one output token at the least
            raise InvalidRequestError(
                f"the prompt has {len(ids)} tokens, but at most {most} fit ({self._sizes()}); "
                "shorten the prompt",
                TOO_LONG,
            )
        return ids

    def _sizes(self) -> str:
        requested = f", {self.max_output_tokens} output tokens requested"
        return (
            f"context length {self.max_total_tokens}{requested if self.max_output_tokens else ''}"
        )

    def _pad(self, ids: list[int], tokenizer: PromptTokenizer | None) -> list[int]:
        size = self.pad_prompt_tokens
        if size is not None and size < 0:
            size = self.max_input_tokens
        if size is None or len(ids) >= size:
            return ids
        pad = None if tokenizer is None else tokenizer.pad_token_id
        if pad is None:
            missing = "there is no tokenizer" if tokenizer is None else "the tokenizer has none"
            raise InvalidRequestError(f"padding needs a pad token: {missing}", "pad_prompt_tokens")
        return ids + [pad] * (size - len(ids))

    def _truncate(self, ids: list[int], num_before: int, num_behind: int) -> list[int]:
        size = self.truncate_prompt_tokens
        if size is not None and size < 0:
            size = self.max_input_tokens
        if size is None or len(ids) <= size:
            return ids
        if num_before + num_behind >= size:
            num_before = num_behind = 0
        end = len(ids) - num_behind
        keep = size - num_before - num_behind
        if self.truncation_side == "left":
            middle = ids[end - keep : end]
        else:
            middle = ids[num_before : num_before + keep]
        return ids[:num_before] + middle + ids[end:]


@dataclass(frozen=True)
class ChatParams:
    """Rendering of messages. `chat_template` None: the model's own.

    `chat_template_kwargs`: variables for the template; those it does not read are left out.
    """

    chat_template: str | None = None
    chat_template_content_format: ContentFormat = "auto"
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        known = ("auto", "string", "openai")
        if self.chat_template_content_format not in known:
            raise InvalidRequestError(
                f"chat_template_content_format must be one of {', '.join(known)}, got "
                f"{self.chat_template_content_format!r}",
                "chat_template_content_format",
            )

    def overridden_by(self, chat_template_kwargs: Mapping[str, Any] | None) -> "ChatParams":
        """The rule of the Python API: these go before the arguments of the same name.

        The rest of them become template variables, on top of those already there.
        """
        given = dict(chat_template_kwargs or {})
        names = (
            "chat_template", "add_generation_prompt", "continue_final_message", "tools", "documents"
        )  # fmt: skip
        changes: dict[str, Any] = {name: given.pop(name) for name in names if name in given}
        variables = {**self.chat_template_kwargs, **given}
        return dataclasses.replace(self, **changes, chat_template_kwargs=variables)
