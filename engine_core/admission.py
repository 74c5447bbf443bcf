"""The core's own fence: what is malformed or can never fit is refused before anything is kept.

The front end checks the same things earlier and with friendlier messages; this fence is what keeps
the step loop safe whoever sends the request. What passes becomes a `Request` with its choices.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from headrace.configs.config import EngineConfig
from headrace.configs.errors import InvalidRequestError
from headrace.configs.sampling_params import SamplingParams
from headrace.engine_core.block_hash import root_hash
from headrace.engine_core.kv_cache_manager import KVCacheManager
from headrace.engine_core.messages import ChoiceState, EngineCoreRequest
from headrace.engine_core.request import Choice, Request
from headrace.engine_core.request_queue import make_rank
from headrace.workers.protocol import ChoiceId


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
        received = request.num_prompt_logprobs_received
        if type(received) is not int or not 0 <= received <= len(request.prompt_token_ids):
            raise InvalidRequestError(
                f"num_prompt_logprobs_received must be from 0 to {len(request.prompt_token_ids)},"
                f" got {received!r}",
                "num_prompt_logprobs_received",
            )

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
        for sequence in params.bad_words_token_ids or ():
            self._check_ids(sequence, "bad_words")
            if not sequence:
                raise InvalidRequestError("a bad word has no tokens", "bad_words")
        for token, bias in (params.logit_bias or {}).items():
            if not isinstance(bias, (int, float)) or math.isnan(bias):
                raise InvalidRequestError(
                    f"logit_bias of token {token} must be a number, got {bias!r}", "logit_bias"
                )
        _check_something_is_allowed(params)

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


def _check_something_is_allowed(params: SamplingParams) -> None:
    """Raise InvalidRequestError if the allowed ids are none, or all forbidden from the start."""
    if params.allowed_token_ids is None:
        return
    left = set(params.allowed_token_ids)
    left -= {ids[0] for ids in params.bad_words_token_ids or () if len(ids) == 1}
    if params.min_tokens > 0:
        left -= params.all_stop_token_ids
    if not left:
        raise InvalidRequestError(
            f"allowed_token_ids has {len(params.allowed_token_ids)} ids, and bad_words and"
            f" min_tokens={params.min_tokens} leave none of them; allow at least one more",
            "allowed_token_ids",
        )


class Admission:
    """Turns request messages into requests that the scheduler can run to their end."""

    def __init__(
        self, config: EngineConfig, kv: KVCacheManager, clock: Callable[[], float]
    ) -> None:
        self._config = config.scheduler_config
        self._clock = clock
        model = config.model_config
        self._model_identity = repr(
            (model.path, model.dtype, model.quantization, model.weight_version)
        )
        self._weights_key = ""  # "": a request's own weight version
        self._num_seen = 0
        self._limits = AdmissionLimits(
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            max_pool_tokens=kv.max_request_tokens(),
            num_blocks=kv.num_usable_blocks,
            block_size=kv.block_size,
        )

    @property
    def max_pool_tokens(self) -> int:
        """Prompt plus output tokens that the pool can hold for one choice."""
        return self._limits.max_pool_tokens

    def admit(self, message: EngineCoreRequest) -> Request:
        """The request with its choices, not queued yet.

        Raises InvalidRequestError if it is malformed or can never fit.
        """
        self._limits.check(message)
        self._num_seen += 1
        params = message.sampling_params
        request = Request(
            request_id=message.request_id,
            num_prompt_tokens=len(message.prompt_token_ids),
            sampling_params=params,
            eos_token_id=message.eos_token_id,
            stop_token_ids=frozenset(params.stop_token_ids or ()),
            priority=message.priority,
            hash_root=self._hash_root(message.weight_version, message.cache_salt),
            reads_prefix_cache=params.prompt_logprobs is None,
            cache_salt=message.cache_salt,
        )
        max_total = self._limits.max_request_tokens
        if params.max_tokens is not None:
            max_total = min(max_total, request.num_prompt_tokens + params.max_tokens)
        for state in message.choices:
            choice = self._make_choice(message, request, state, max_total)
            request.choices[state.index] = choice
        return request

    def use_weights(self, key: str, requests: Iterable[Request]) -> None:
        """From now on what is computed depends on weights that `key` names and nothing else does.

        That goes for `requests`, too, none of which has blocks.
        """
        self._weights_key = key
        for request in requests:
            request.hash_root = self._hash_root(key, request.cache_salt)
            for choice in request.choices.values():
                choice.block_hashes.clear()

    def _hash_root(self, weight_version: str, cache_salt: str | None) -> bytes:
        return root_hash(
            model_identity=self._model_identity,
            weight_version=self._weights_key or weight_version,
            cache_salt=cache_salt,
        )

    def _make_choice(
        self, message: EngineCoreRequest, request: Request, state: ChoiceState, max_total: int
    ) -> Choice:
        prompt = message.prompt_token_ids
        return Choice(
            id=ChoiceId(message.request_id, state.index),
            request=request,
            rank=make_rank(
                self._config.policy,
                priority=message.priority,
                arrival_time=min(message.arrival_time, self._clock()),
                ageing_s=self._config.ageing_s,
                number=self._num_seen,
                index=state.index,
            ),
            # The n choices share the prompt's list until each of them runs.
            token_ids=prompt + state.output_token_ids if state.output_token_ids else prompt,
            max_total_tokens=max_total,
            runs_alone_until=state.runs_alone_until,
            num_scored=max(1, message.num_prompt_logprobs_received),
        )
