"""The core's own fence: what is malformed or can never fit is refused before anything is kept.

The front end checks the same things earlier and with friendlier messages; this fence is what keeps
the step loop safe whoever sends the request.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.configs.errors import InvalidRequestError
from headrace.configs.sampling_params import SamplingParams
from headrace.engine_core.messages import EngineCoreRequest


@dataclass(frozen=True)
class AdmissionLimits:
    """What requests are checked against. Lengths in tokens."""

    vocab_size: int
    max_model_len: int
    max_pool_tokens: int  # the longest choice that the whole pool holds
    num_blocks: int  # usable ones
    block_size: int

    @property
    def max_request_tokens(self) -> int:
        """Prompt plus output that one choice can reach."""
        return min(self.max_model_len, self.max_pool_tokens)

    def check(self, request: EngineCoreRequest) -> None:
        """Raise InvalidRequestError unless the request can run to its end."""
        if not isinstance(request.request_id, str) or not request.request_id:
            raise InvalidRequestError("request_id must be a non-empty string", "request_id")
        if not math.isfinite(request.arrival_time):
            raise InvalidRequestError(
                f"arrival_time must be finite, got {request.arrival_time}", "arrival_time"
            )
        if not request.prompt_token_ids:
            raise InvalidRequestError("the prompt is empty; it needs at least one token", "prompt")
        self._check_ids(request.prompt_token_ids, "prompt")
        self._check_params(request.sampling_params)
        self._check_choices(request)

    def _check_ids(self, token_ids: Sequence[int] | Iterable[int], parameter: str) -> None:
        for token in token_ids:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise InvalidRequestError(
                    f"{parameter} contains {token!r}; token ids are integers from 0 to"
                    f" {self.vocab_size - 1}",
                    parameter,
                )

    def _check_params(self, params: SamplingParams) -> None:
        self._check_ids(params.stop_token_ids or (), "stop_token_ids")
        self._check_ids(params.all_stop_token_ids, "stop_token_ids")
        self._check_ids(params.allowed_token_ids or (), "allowed_token_ids")
        self._check_ids(params.logit_bias or (), "logit_bias")

    def _check_choices(self, request: EngineCoreRequest) -> None:
        n = request.sampling_params.n
        indices = [choice.index for choice in request.choices]
        if not indices or len(set(indices)) != len(indices):
            raise InvalidRequestError(f"choices must be distinct and not empty, got {indices}", "n")
        if any(type(index) is not int or not 0 <= index < n for index in indices):
            raise InvalidRequestError(f"choices must be from 0 to n-1={n - 1}, got {indices}", "n")
        num_prompt = len(request.prompt_token_ids)
        max_tokens = request.sampling_params.max_tokens
        for choice in request.choices:
            num_output = len(choice.output_token_ids)
            self._check_ids(choice.output_token_ids, "output_token_ids")
            if max_tokens is not None and num_output >= max_tokens:
                raise InvalidRequestError(
                    f"choice {choice.index} has {num_output} output tokens already, with"
                    f" max_tokens={max_tokens}: nothing is left to run",
                    "max_tokens",
                )
            self._check_length(num_prompt, num_output)

    def _check_length(self, num_prompt: int, num_output: int) -> None:
        need = num_prompt + num_output + 1
        if need > self.max_request_tokens:
            accepted = f" and {num_output} output tokens" if num_output else ""
            raise InvalidRequestError(
                f"the prompt of {num_prompt} tokens{accepted} needs room for {need} tokens with the"
                f" next one; the KV cache holds {self.max_pool_tokens} ({self.num_blocks} blocks of"
                f" {self.block_size} tokens) and max_model_len is {self.max_model_len}. Shorten the"
                " prompt, or raise max_model_len or the KV-cache memory",
                "prompt",
            )
