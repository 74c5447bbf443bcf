"""Admission: the first fence.

A rendered prompt and its parameters become an `EngineCoreRequest`, or an error.

Everything that can be known to be wrong is refused here, with the value and the range; what passes
needs no further checks. `max_tokens` is clamped to what the window and the KV pool can hold; a
prompt is never cut.
"""

import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.configs.config import ModelConfig, SchedulingPolicy
from headrace.configs.errors import InvalidRequestError, UnsupportedFeatureError
from headrace.configs.sampling_params import WHOLE_VOCABULARY, SamplingParams, WordEncoder
from headrace.engine_core.messages import ChoiceState, EngineCoreRequest, Ready
from headrace.frontend.render_params import TOO_LONG

_UNSUPPORTED = ("logits_processors", "guided_decoding")


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt as token ids, ready for admission: what the renderer makes.

    `arrival_time`: wall clock, in seconds, when rendering began; None: now.
    """

    text: str | None
    token_ids: list[int]
    warnings: tuple[str, ...] = ()
    cache_salt: str | None = None
    arrival_time: float | None = None


class Admission:
    """Checks requests against one engine's limits and gives them their ids and seeds."""

    def __init__(
        self,
        model_config: ModelConfig,
        ready: Ready,
        tokenizer: WordEncoder | None = None,
        policy: SchedulingPolicy = "fcfs",
    ) -> None:
        """Without a tokenizer, whatever needs text is refused: stop strings and bad words."""
        self._model = model_config
        self._limit = min(model_config.max_model_len, ready.max_request_tokens)
        self._pool_tokens = ready.max_request_tokens
        self.tokenizer = tokenizer
        self._policy = policy
        self._num_requests = itertools.count()
        self._prefix = secrets.token_hex(4)

    def admit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        arrival_time: float,
        priority: int = 0,
        cache_salt: str | None = None,
        ignores_unused_priority: bool = False,
    ) -> EngineCoreRequest:
        """The request for the engine core; raises InvalidRequestError. `params` is not modified.

        A `priority` is refused where the scheduling policy does not look at it, or, with
        `ignores_unused_priority`, left out.
        """
        prompt = list(prompt_token_ids)
        if params.truncate_prompt_tokens is not None:
            prompt = prompt[-params.truncate_prompt_tokens :]
        self._check_prompt(prompt)
        if priority and self._policy != "priority":
            if not ignores_unused_priority:
                raise InvalidRequestError(
                    f"priority {priority} needs scheduling_policy='priority', this engine has "
                    f"{self._policy!r}",
                    "priority",
                )
            priority = 0
        number = next(self._num_requests)
        return EngineCoreRequest(
            request_id=f"{self._prefix}-{number}",
            prompt_token_ids=prompt,
            sampling_params=self._resolve(params, len(prompt), number),
            eos_token_id=self._model.eos_token_id,
            arrival_time=arrival_time,
            choices=[ChoiceState(index) for index in range(params.n)],
            priority=priority,
            cache_salt=cache_salt or None,
            weight_version=self._model.weight_version,
        )

    def _check_prompt(self, prompt: list[int]) -> None:
        if not prompt:
            raise InvalidRequestError("the prompt is empty; it needs at least one token", "prompt")
        check_token_ids(prompt, self._model.vocab_size, "prompt")
        length = len(prompt)
        if length >= self._model.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {length} tokens and the context length is "
                f"{self._model.max_model_len}, which leaves no room for one output token; "
                "shorten the prompt",
                TOO_LONG,
            )
        if length >= self._pool_tokens:
            raise InvalidRequestError(
                f"the prompt has {length} tokens and needs {length + 1} with one output token, but "
                f"the KV cache holds {self._pool_tokens} (context length "
                f"{self._model.max_model_len}); shorten the prompt or start with a larger "
                "--kv-cache-memory",
                TOO_LONG,
            )

    def _resolve(
        self, params: SamplingParams, num_prompt_tokens: int, number: int
    ) -> SamplingParams:
        self._check_params(params)
        resolved = params.clone()
        if params.num_returned < params.n:
            resolved.rank_by_logprobs()
        resolved.logprobs = self._num_logprobs(resolved.logprobs)
        resolved.prompt_logprobs = self._num_logprobs(resolved.prompt_logprobs)
        room = self._limit - num_prompt_tokens
        if self._model.max_output_tokens is not None:
            room = min(room, self._model.max_output_tokens)
        resolved.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        resolved.min_tokens = min(params.min_tokens, resolved.max_tokens)
        resolved.seed = self._seed(number) if params.seed is None else params.seed % 2**64
        resolved.extra_args = None  # for plug-ins of the front end; may not be serializable
        resolved.update_from_generation_config(
            {"eos_token_id": list(self._model.extra_eos_token_ids)}, self._model.eos_token_id
        )
        self._encode_bad_words(resolved)
        return resolved

    def _check_params(self, params: SamplingParams) -> None:
        for name in _UNSUPPORTED:
            if getattr(params, name) is not None:
                raise UnsupportedFeatureError(f"{name} is not supported yet; leave it out", name)
        vocab_size = self._model.vocab_size
        check_token_ids(params.stop_token_ids or [], vocab_size, "stop_token_ids")
        check_token_ids(params.logit_bias or {}, vocab_size, "logit_bias")
        check_token_ids(params.allowed_token_ids or [], vocab_size, "allowed_token_ids")
        if params.allowed_token_ids is not None and not params.allowed_token_ids:
            raise InvalidRequestError(
                "allowed_token_ids is empty, so no token could be sampled; leave it out to allow "
                f"all ids in [0, {vocab_size})",
                "allowed_token_ids",
            )
        self._check_num_logprobs(params.logprobs, "logprobs")
        self._check_num_logprobs(params.prompt_logprobs, "prompt_logprobs")
        if self.tokenizer is None and params.stop_strings:
            raise InvalidRequestError(
                "stop strings need a tokenizer and this engine runs without one "
                "(skip_tokenizer_init); use stop_token_ids",
                "stop",
            )

    def _check_num_logprobs(self, number: int | None, name: str) -> None:
        limit = self._model.max_logprobs
        if number is None or limit == WHOLE_VOCABULARY:
            return
        if number == WHOLE_VOCABULARY or number > limit:
            raise InvalidRequestError(
                f"{name} must be in [0, {limit}] (--max-logprobs), got {number}", name
            )

    def _num_logprobs(self, number: int | None) -> int | None:
        vocab_size = self._model.vocab_size
        if number is None:
            return None
        return vocab_size if number == WHOLE_VOCABULARY else min(number, vocab_size)

    def _encode_bad_words(self, params: SamplingParams) -> None:
        if not params.bad_words:
            return
        if self.tokenizer is None:
            raise InvalidRequestError(
                "bad_words need a tokenizer and this engine runs without one "
                "(skip_tokenizer_init); use logit_bias",
                "bad_words",
            )
        try:
            params.update_from_tokenizer(self.tokenizer)
        except ValueError as error:
            raise InvalidRequestError(str(error), "bad_words") from None

    def _seed(self, number: int) -> int:
        if self._model.seed is None:
            return secrets.randbits(64)
        # An odd multiplier permutes the 64-bit numbers, so that requests of one engine never share
        # a seed.
        return (self._model.seed + (number + 1) * 0x9E3779B97F4A7C15) % 2**64


def check_token_ids(ids: object, vocab_size: int, parameter: str) -> None:
    """Raise InvalidRequestError unless every id is an int (not a bool) in [0, vocab_size)."""
    for token in ids:  # type: ignore[attr-defined]
        if isinstance(token, bool) or not isinstance(token, int):
            raise InvalidRequestError(
                f"{parameter} must hold ints, got {repr(token)[:40]} ({type(token).__name__})",
                parameter,
            )
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"{parameter} has token id {token}, which is outside [0, {vocab_size})", parameter
            )
