"""Response bodies and stream chunks of the generation routes, key for key as the API has them.

`effective_params` is ours, and there only for clients that ask for it. Ours is `weight_version`,
too: it names the weights that made the answer; a stream has it where it has the fingerprint.
"""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

EffectiveParams = dict[str, Any] | UnsetType


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """`cached_tokens`: prompt tokens that came from the prefix cache. The others are not known."""

    cached_tokens: int
    created_cache_tokens: None = None
    multimodal_tokens: None = None


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a request; a prompt counts once however many choices it has."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: None = None


class PromptLogprob(msgspec.Struct, frozen=True):
    """A token's score at a position of the prompt; `rank` is 1-based."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a completion, one entry per token in each list.

    The first token of an echoed prompt has none.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One choice of a whole completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    routed_experts: None = None


class CompletionResponse(msgspec.Struct, frozen=True):
    """A whole completion."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    usage: Usage
    object: str = "text_completion"
    service_tier: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    metrics: None = None
    effective_params: EffectiveParams = UNSET
    weight_version: str | UnsetType = UNSET


class CompletionChunkChoice(msgspec.Struct, frozen=True):
    """What is new of one choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_token_ids: list[int] | None
    token_ids: list[int] | None


class CompletionChunk(msgspec.Struct, frozen=True):
    """One event of a completion stream; `usage` is absent unless the client asked for it."""

    id: str
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
    object: str = "text_completion"
    effective_params: EffectiveParams = UNSET
    weight_version: str | UnsetType = UNSET


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the likeliest tokens at a position; `bytes` are exact where `token` cannot be."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """The sampled token at a position and its likeliest rivals."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a chat choice."""

    content: list[TokenLogprob]


class ChatMessage(msgspec.Struct, frozen=True):
    """The assistant's message."""

    content: str
    role: str = "assistant"
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One choice of a whole chat completion."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    routed_experts: None = None


class ChatResponse(msgspec.Struct, frozen=True):
    """A whole chat completion."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    system_fingerprint: str
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    object: str = "chat.completion"
    service_tier: None = None
    prompt_logprobs: PromptLogprobs | None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    metrics: None = None
    effective_params: EffectiveParams = UNSET
    weight_version: str | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True):
    """What is new of a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """What is new of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET


class ChatChunk(msgspec.Struct, frozen=True):
    """One event of a chat stream; `usage` is absent unless the client asked for it."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_text: str | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"
    effective_params: EffectiveParams = UNSET
    weight_version: str | UnsetType = UNSET
