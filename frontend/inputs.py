"""Types of the prompts of the Python API; plain values at run time."""

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt as text. `cache_salt` separates entries of the prefix cache."""

    prompt: str
    multi_modal_data: NotRequired[Mapping[str, Any]]
    mm_processor_kwargs: NotRequired[dict[str, Any]]
    multi_modal_uuids: NotRequired[Mapping[str, Any]]
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids, which are run as they are. `prompt`: their text, if known."""

    prompt_token_ids: list[int]
    token_type_ids: NotRequired[list[int]]
    multi_modal_data: NotRequired[Mapping[str, Any]]
    mm_processor_kwargs: NotRequired[dict[str, Any]]
    multi_modal_uuids: NotRequired[Mapping[str, Any]]
    cache_salt: NotRequired[str]
    prompt: NotRequired[str]


class EmbedsPrompt(TypedDict):
    """A prompt as embeddings, shape [num_tokens, hidden_size]; refused by this version."""

    prompt_embeds: Any
    cache_salt: NotRequired[str]


class ExplicitEncoderDecoderPrompt(TypedDict):
    """Both prompts of an encoder-decoder model; refused by this version."""

    encoder_prompt: "SingletonPrompt"
    decoder_prompt: "SingletonPrompt | None"
    mm_processor_kwargs: NotRequired[dict[str, Any]]


# A list of ids is a prompt, too.
SingletonPrompt = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt
PromptType = SingletonPrompt | ExplicitEncoderDecoderPrompt
