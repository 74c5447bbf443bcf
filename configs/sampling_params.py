"""Sampling parameters: the public `SamplingParams`, checked at construction.

Differences from vLLM 0.9, on purpose: a temperature below 1e-5 is greedy and every larger one is
used as given; NaN is refused everywhere; `logit_bias` is always clamped; `logprobs=-1` asks for the
whole vocabulary; nothing here modifies an object that the caller still holds.
"""

import copy
import math
from collections.abc import Mapping
from enum import IntEnum
from functools import cached_property
from typing import Any, Protocol

import msgspec

from headrace.configs.beam_search_params import BeamSearchParams
from headrace.configs.guided_decoding_params import GuidedDecodingParams

__all__ = [
    "BeamSearchParams",
    "GuidedDecodingParams",
    "RequestOutputKind",
    "SamplingParams",
    "SamplingType",
]

GREEDY_EPSILON = 1e-5
MAX_LOGIT_BIAS = 100.0
MAX_SEED = 2**64 - 1
WHOLE_VOCABULARY = -1  # for logprobs and prompt_logprobs


class RequestOutputKind(IntEnum):
    """What each streamed output carries."""

    CUMULATIVE = 0  # everything generated so far
    DELTA = 1  # only what is new
    FINAL_ONLY = 2  # one output, at the end


class SamplingType(IntEnum):
    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class WordEncoder(Protocol):
    """What turning bad words into ids needs of a tokenizer."""

    @property
    def max_token_id(self) -> int: ...
    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...


class SamplingParams(msgspec.Struct, omit_defaults=True, dict=True, kw_only=False):
    """How to sample one request.

    Raises ValueError on a bad value (TypeError for a `top_k` of another type, AssertionError for
    `stop` and `stop_token_ids` that are not lists).

    Fields, ranges and order follow the public API; `n` sequences are sampled, each by its own
    random stream. With `best_of`, that many are sampled (`n` is set to it) and the `num_returned`
    best are returned.
    """

    n: int = 1
    best_of: int | None = None
    _real_n: int | None = None  # n as given, when best_of has replaced it
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logits_processors: list[Any] | None = None
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    output_text_buffer_length: int = 0
    _all_stop_token_ids: set[int] = msgspec.field(default_factory=set)
    guided_decoding: Any | None = None  # GuidedDecodingParams
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    _bad_words_token_ids: list[list[int]] | None = None
    # Set by the engine on its copy: the logprobs were added to rank sequences, not to be returned.
    _ranks_only: bool = False

    @staticmethod
    def from_optional(
        n: int | None = 1,
        best_of: int | None = None,
        presence_penalty: float | None = 0.0,
        frequency_penalty: float | None = 0.0,
        repetition_penalty: float | None = 1.0,
        temperature: float | None = 1.0,
        top_p: float | None = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | list[str] | None = None,
        stop_token_ids: list[int] | None = None,
        ignore_eos: bool = False,
        max_tokens: int | None = 16,
        min_tokens: int = 0,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        detokenize: bool = True,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        logits_processors: list[Any] | None = None,
        include_stop_str_in_output: bool = False,
        truncate_prompt_tokens: int | None = None,
        output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
        guided_decoding: GuidedDecodingParams | None = None,
        logit_bias: Mapping[int, float] | Mapping[str, float] | None = None,
        allowed_token_ids: list[int] | None = None,
        extra_args: dict[str, Any] | None = None,
        bad_words: list[str] | None = None,
    ) -> "SamplingParams":
        """Construct from values that may be None for "the default".

        Keys of `logit_bias` may be strings that spell an int.
        """
        return SamplingParams(
            n=1 if n is None else n,
            best_of=best_of,
            presence_penalty=0.0 if presence_penalty is None else presence_penalty,
            frequency_penalty=0.0 if frequency_penalty is None else frequency_penalty,
            repetition_penalty=1.0 if repetition_penalty is None else repetition_penalty,
            temperature=1.0 if temperature is None else temperature,
            top_p=1.0 if top_p is None else top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            stop=stop,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            detokenize=detokenize,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
            logits_processors=logits_processors,
            include_stop_str_in_output=include_stop_str_in_output,
            truncate_prompt_tokens=truncate_prompt_tokens,
            output_kind=output_kind,
            guided_decoding=guided_decoding,
            logit_bias=None if logit_bias is None else {int(k): v for k, v in logit_bias.items()},
            allowed_token_ids=allowed_token_ids,
            extra_args=extra_args,
            bad_words=bad_words,
        )

    def __post_init__(self) -> None:
        self._normalise()
        self._check_counts()
        self._check_ranges()
        self._check_lengths()
        self._check_stops()
        if self.best_of != self._real_n and self.output_kind is RequestOutputKind.DELTA:
            raise ValueError(
                f"best_of={self.best_of} above n={self._real_n} cannot be streamed as deltas: "
                "which sequences are the best is known only at the end"
            )
        self.logit_bias = _clamped(self.logit_bias)
        if self.stop and not self.include_stop_str_in_output:
            self.output_text_buffer_length = max(map(len, self.stop)) - 1
        if self.temperature < GREEDY_EPSILON:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
            if self.n > 1:
                raise ValueError(
                    f"n must be 1 at temperature {self.temperature} (greedy), got {self.n}"
                )
        self._all_stop_token_ids.update(self.stop_token_ids or [])

    def _normalise(self) -> None:
        if self.best_of and _is_int(self.best_of):
            if _is_int(self.n) and self.best_of < self.n:
                raise ValueError(f"best_of must be at least n={self.n}, got {self.best_of}")
            if self._real_n is None:
                self._real_n, self.n = self.n, self.best_of
        if self.seed == -1:
            self.seed = None
        if self.stop is None:
            self.stop = []
        elif isinstance(self.stop, str):
            self.stop = [self.stop]
        self.stop_token_ids = [] if self.stop_token_ids is None else self.stop_token_ids
        self.bad_words = [] if self.bad_words is None else self.bad_words
        if isinstance(self.logprobs, bool):
            self.logprobs = int(self.logprobs)
        if isinstance(self.prompt_logprobs, bool):
            self.prompt_logprobs = int(self.prompt_logprobs)

    def _check_counts(self) -> None:
        n = self.n if self._real_n is None else self._real_n
        if not _is_int(n):
            raise ValueError(f"n must be an int, got {n!r}")
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        if self.best_of is not None:
            if not _is_int(self.best_of):
                raise ValueError(f"best_of must be an int, got {self.best_of!r}")
            if self.best_of < 1:
                raise ValueError(f"best_of must be at least 1, got {self.best_of}")
            if self.best_of < n:
                raise ValueError(f"best_of must be at least n={n}, got {self.best_of}")

    def _check_ranges(self) -> None:
        self.presence_penalty = _number("presence_penalty", self.presence_penalty)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self.frequency_penalty = _number("frequency_penalty", self.frequency_penalty)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self.repetition_penalty = _number("repetition_penalty", self.repetition_penalty)
        if not 0.0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty must be above 0, got {self.repetition_penalty}")
        self.temperature = _number("temperature", self.temperature)
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        self.top_p = _number("top_p", self.top_p)
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if isinstance(self.top_k, int | float) and not self.top_k >= -1:
            raise ValueError(f"top_k must be 0 or -1 (all) or at least 1, got {self.top_k}")
        if not _is_int(self.top_k):
            raise TypeError(f"top_k must be an int, got {type(self.top_k).__name__}")
        self.min_p = _number("min_p", self.min_p)
        _check_range("min_p", self.min_p, 0.0, 1.0)

    def _check_lengths(self) -> None:
        _check_int("max_tokens", self.max_tokens, 1)
        _check_int("min_tokens", self.min_tokens, 0, optional=False)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}"
            )
        _check_int("logprobs", self.logprobs, WHOLE_VOCABULARY)
        _check_int("prompt_logprobs", self.prompt_logprobs, WHOLE_VOCABULARY)
        _check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, 1)
        if self.seed is not None and not (_is_int(self.seed) and -(2**63) <= self.seed <= MAX_SEED):
            raise ValueError(f"seed must be an int of at most 64 bits, got {self.seed!r}")

    def _check_stops(self) -> None:
        if not isinstance(self.stop_token_ids, list):
            raise AssertionError(f"stop_token_ids must be a list, got {self.stop_token_ids!r}")
        if not all(_is_int(token) for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids must contain only ints, got {self.stop_token_ids}")
        if not isinstance(self.stop, list):
            raise AssertionError(f"stop must be a string or a list of strings, got {self.stop!r}")
        if not all(isinstance(stop, str) and stop for stop in self.stop):
            raise ValueError("stop must hold strings, none of them empty")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True")
        if isinstance(self.bad_words, str):
            raise ValueError(f"bad_words must be a list of strings, got {self.bad_words!r:.60}")

    @cached_property
    def sampling_type(self) -> SamplingType:
        """Computed once: later changes of `temperature` and `seed` are not seen."""
        if self.temperature < GREEDY_EPSILON:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    @property
    def num_returned(self) -> int:
        """How many of the `n` sampled sequences are returned: all, unless `best_of` is larger."""
        return self.n if self._real_n is None else self._real_n

    @property
    def returns_logprobs(self) -> bool:
        """Whether outputs carry logprobs: not when they only serve to find the best sequences."""
        return self.logprobs is not None and not self._ranks_only

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as the list that construction made of it."""
        return self.stop if isinstance(self.stop, list) else []

    @property
    def all_stop_token_ids(self) -> set[int]:
        """Every id that may not be sampled before `min_tokens`."""
        return self._all_stop_token_ids

    @property
    def bad_words_token_ids(self) -> list[list[int]] | None:
        """`bad_words` as token ids; None before `update_from_tokenizer`."""
        return self._bad_words_token_ids

    def clone(self) -> "SamplingParams":
        """Deep copy; logits processors are shared unless they have a `clone()`."""
        processors = self.logits_processors
        memo = {id(p): p.clone() if hasattr(p, "clone") else p for p in processors or []}
        return copy.deepcopy(self, memo)

    def rank_by_logprobs(self) -> None:
        """Have the sampled tokens scored, for `best_of`, on this (private) copy."""
        if self.logprobs is None:
            self.logprobs, self._ranks_only = 0, True

    def update_from_generation_config(
        self, generation_config: Mapping[str, Any], model_eos_token_id: int | None = None
    ) -> None:
        """Apply the model's EOS set to this (private) copy.

        All of `generation_config["eos_token_id"]` (an int or a list) but `model_eos_token_id` act
        as stop tokens, unless `ignore_eos`.
        """
        if model_eos_token_id is not None:
            self._all_stop_token_ids.add(model_eos_token_id)
        eos = generation_config.get("eos_token_id")
        if eos is None:
            return
        others = sorted({eos} if isinstance(eos, int) else set(eos))
        others = [token for token in others if token != model_eos_token_id]
        self._all_stop_token_ids.update(others)
        if not self.ignore_eos:
            known = list(dict.fromkeys(self.stop_token_ids or []))
            self.stop_token_ids = known + [token for token in others if token not in known]

    def update_from_tokenizer(self, tokenizer: WordEncoder) -> None:
        """Turn `bad_words` into token ids, on this (private) copy.

        A word is forbidden as such and, where that is another sequence of the same length, behind
        a space. Raises ValueError for a blank word and for ids that the tokenizer does not have.
        """
        if not self.bad_words:
            return
        sequences: list[list[int]] = []
        for word in self.bad_words:
            bare = word.lstrip(" ") if isinstance(word, str) else ""
            if not bare.strip():
                raise ValueError(f"bad_words must hold words that are not blank, got {word!r}")
            plain = tokenizer.encode(bare, add_special_tokens=False)
            spaced = tokenizer.encode(f" {bare}", add_special_tokens=False)
            if not plain:
                raise ValueError(f"bad_words: the tokenizer makes no tokens of {word!r}")
            sequences.append(plain)
            if len(spaced) == len(plain) and spaced[0] != plain[0]:
                sequences.append(spaced)
        top = tokenizer.max_token_id
        bad = [token for ids in sequences for token in ids if not 0 <= token <= top]
        if bad:
            raise ValueError(
                f"bad_words: the vocabulary has {top + 1} ids, so {bad} are outside [0, {top}]"
            )
        self._bad_words_token_ids = sequences

    def __repr__(self) -> str:
        shown = (
            "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature",
            "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "bad_words",
            "include_stop_str_in_output", "ignore_eos", "max_tokens", "min_tokens", "logprobs",
            "prompt_logprobs", "skip_special_tokens", "spaces_between_special_tokens",
            "truncate_prompt_tokens", "guided_decoding", "extra_args",
        )  # fmt: skip
        return f"SamplingParams({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_int(name: str, value: int | None, least: int, optional: bool = True) -> None:
    if value is None and optional:
        return
    if value is None or not _is_int(value):
        raise ValueError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _number(name: str, value: Any) -> float:
    try:
        return float(value) if not isinstance(value, str | bytes) else _refuse(name, value)
    except (TypeError, OverflowError):
        return _refuse(name, value)


def _refuse(name: str, value: Any) -> float:
    raise ValueError(f"{name} must be a number, got {value!r:.60}")


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} must be in [{low:g}, {high:g}], got {value}")


def _clamped(logit_bias: Any) -> dict[int, float] | None:
    """A copy with every value in [-100, 100]; raises ValueError for what is not a number."""
    if logit_bias is None:
        return None
    clamped: dict[int, float] = {}
    for token, value in logit_bias.items():
        bias = _number("logit_bias", value)
        if math.isnan(bias):
            raise ValueError(f"logit_bias of token {token} must be a number, got nan")
        clamped[token] = min(MAX_LOGIT_BIAS, max(-MAX_LOGIT_BIAS, bias))
    return clamped
