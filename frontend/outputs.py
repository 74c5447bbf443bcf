"""Public output objects of text generation."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

logger = logging.getLogger(__name__)


@dataclass
class Logprob:
    """Log-probability of one token; `rank` is 1-based, None if unknown."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One generated sequence of a request; delta or cumulative as the request asked."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None  # "stop", "length", "abort"; None while running
    stop_reason: int | str | None = None  # stop token id or stop string; None for EOS and length
    lora_request: Any = field(default=None, repr=False)

    def finished(self) -> bool:
        return self.finish_reason is not None

    def extend(self, new: "CompletionOutput") -> None:
        """Append a later delta of the same sequence, in place."""
        self.text += new.text
        if not isinstance(self.token_ids, list):
            self.token_ids = list(self.token_ids)
        self.token_ids.extend(new.token_ids)
        if new.logprobs:
            if self.logprobs is None:
                raise AssertionError("logprobs appeared in the middle of a request")
            self.logprobs.extend(new.logprobs)
        self.cumulative_logprob = new.cumulative_logprob
        self.finish_reason = new.finish_reason
        self.stop_reason = new.stop_reason


@dataclass
class RequestMetrics:
    """Wall-clock times of a request, in seconds since the epoch; None: not reached yet."""

    arrival_time: float
    last_token_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    time_in_queue: float | None = None  # s
    finished_time: float | None = None
    scheduler_time: float | None = None
    model_forward_time: float | None = None  # ms
    model_execute_time: float | None = None


class RequestOutput:
    """Output of one request: prompt, sequences so far, whether it is done."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int] | None,
        prompt_logprobs: list[dict[int, Logprob] | None] | None,
        outputs: list[CompletionOutput],
        finished: bool,
        metrics: RequestMetrics | None = None,
        lora_request: Any = None,
        encoder_prompt: str | None = None,
        encoder_prompt_token_ids: list[int] | None = None,
        num_cached_tokens: int | None = None,
        *,
        multi_modal_placeholders: dict[str, Any] | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
        weight_version: str | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs:  # later versions may send more; ignoring it keeps older callers working
            _warn_of_unknown(tuple(sorted(kwargs)))
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.prompt_logprobs = prompt_logprobs
        self.outputs = outputs
        self.finished = finished
        self.metrics = metrics
        self.lora_request = lora_request
        self.encoder_prompt = encoder_prompt
        self.encoder_prompt_token_ids = encoder_prompt_token_ids
        self.num_cached_tokens = num_cached_tokens
        self.multi_modal_placeholders = multi_modal_placeholders or {}
        self.kv_transfer_params = kv_transfer_params
        self.weight_version = weight_version  # of the weights that made the newest tokens

    def add(self, next_output: "RequestOutput", aggregate: bool) -> None:
        """Merge a later output of the same request: append deltas (`aggregate`) or replace."""
        self.finished |= next_output.finished
        self.kv_transfer_params = next_output.kv_transfer_params
        self.weight_version = next_output.weight_version
        by_index = {output.index: i for i, output in enumerate(self.outputs)}
        for new in next_output.outputs:
            position = by_index.get(new.index)
            if position is None:
                self.outputs.append(new)
            elif aggregate:
                self.outputs[position].extend(new)
            else:
                self.outputs[position] = new

    def __repr__(self) -> str:
        shown = (
            "request_id", "prompt", "prompt_token_ids", "encoder_prompt",
            "encoder_prompt_token_ids", "prompt_logprobs", "outputs", "finished", "metrics",
            "lora_request", "num_cached_tokens", "multi_modal_placeholders",
        )  # fmt: skip
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
        return f"RequestOutput({fields})"


@lru_cache(maxsize=64)
def _warn_of_unknown(names: tuple[str, ...]) -> None:
    """Once for each set of names, or a stream would repeat it for every token."""
    logger.warning("RequestOutput ignores unknown fields %s", list(names))
