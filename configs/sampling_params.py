"""Sampling parameters: the public `SamplingParams`, checked at construction.

Differences from vLLM 0.9, on purpose: a temperature below 1e-5 is greedy and every larger one is
used as given; NaN is refused everywhere; nothing here modifies an object that the caller still
holds.
"""

import copy
import math
from enum import IntEnum
from functools import cached_property
from typing import Any

import msgspec

from headrace.configs.errors import UnsupportedFeatureError

GREEDY_EPSILON = 1e-5
MAX_SEED = 2**64 - 1


class RequestOutputKind(IntEnum):
    """What each streamed output carries."""

    CUMULATIVE = 0  # everything generated so far
    DELTA = 1  # only what is new
    FINAL_ONLY = 2  # one output, at the end


class SamplingType(IntEnum):
    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class SamplingParams(msgspec.Struct, omit_defaults=True, dict=True, kw_only=False):
    """How to sample one request.

    Raises ValueError (TypeError for a `top_k` of another type) on a bad value.

    Fields, ranges and order follow the public API; `n` sequences are sampled, each by its own
    random stream.
    """

    n: int = 1
    best_of: int | None = None
    _real_n: int | None = None
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
    guided_decoding: Any | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    _bad_words_token_ids: list[list[int]] | None = None

    def __post_init__(self) -> None:
        if self.seed == -1:
            self.seed = None
        self.stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        self.stop_token_ids = self.stop_token_ids or []
        self.bad_words = self.bad_words or []
        if self.logprobs is True:
            self.logprobs = 1
        if self.prompt_logprobs is True:
            self.prompt_logprobs = 1
        self._check_counts()
        self._check_ranges()
        self._check_stops()
        if self.stop and not self.include_stop_str_in_output:
            self.output_text_buffer_length = max(map(len, self.stop)) - 1
        if self.temperature < GREEDY_EPSILON:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
            if self.n > 1:
                raise ValueError(
                    f"n must be 1 at temperature {self.temperature} (greedy), got {self.n}"
                )
        self._all_stop_token_ids.update(self.stop_token_ids)

    def _check_counts(self) -> None:
        if not _is_int(self.n):
            raise ValueError(f"n must be an int, got {self.n!r}")
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got {self.n}")
        if self.best_of is not None:
            if not _is_int(self.best_of) or self.best_of < self.n:
                raise ValueError(
                    f"best_of must be an int of at least n={self.n}, got {self.best_of!r}"
                )
            if self.best_of != self.n:
                raise UnsupportedFeatureError(
                    "best_of is not implemented; sample n and choose", "best_of"
                )

    def _check_ranges(self) -> None:
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not 0.0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty must be above 0, got {self.repetition_penalty}")
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < -1:
            raise ValueError(f"top_k must be 0 or -1 (all) or at least 1, got {self.top_k}")
        if not _is_int(self.top_k):
            raise TypeError(f"top_k must be an int, got {type(self.top_k).__name__}")
        _check_range("min_p", self.min_p, 0.0, 1.0)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must be at least 0, got {self.min_tokens}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}"
            )
        if self.logprobs is not None and self.logprobs < 0:
            raise ValueError(f"logprobs must be at least 0, got {self.logprobs}")
        if self.prompt_logprobs is not None and self.prompt_logprobs < 0:
            raise ValueError(f"prompt_logprobs must be at least 0, got {self.prompt_logprobs}")
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < 1:
            raise ValueError(
                f"truncate_prompt_tokens must be at least 1, got {self.truncate_prompt_tokens}"
            )
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
            raise ValueError("stop cannot contain an empty string")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True")

    @cached_property
    def sampling_type(self) -> SamplingType:
        if self.temperature < GREEDY_EPSILON:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as the list that construction made of it."""
        return self.stop if isinstance(self.stop, list) else []

    @property
    def all_stop_token_ids(self) -> set[int]:
        """Every id that may not be sampled before `min_tokens`."""
        return self._all_stop_token_ids

    def clone(self) -> "SamplingParams":
        """Deep copy; logits processors are shared unless they have a `clone()`."""
        processors = self.logits_processors
        memo = {id(p): p.clone() if hasattr(p, "clone") else p for p in processors or []}
        return copy.deepcopy(self, memo)

    def add_eos_token_ids(self, eos_token_id: int | None, extra: tuple[int, ...]) -> None:
        """Apply the model's EOS set to this (private) copy.

        All but `eos_token_id` act as stop tokens, unless `ignore_eos`.
        """
        eos = {token for token in (eos_token_id, *extra) if token is not None}
        self._all_stop_token_ids.update(eos)
        if not self.ignore_eos:
            others = sorted(eos - {eos_token_id})
            known = self.stop_token_ids or []
            self.stop_token_ids = known + [token for token in others if token not in known]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} must be in [{low:g}, {high:g}], got {value}")
