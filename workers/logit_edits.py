"""What a request's parameters and a choice's own tokens do to its logits, before any randomness.

The edits of one row, in this order:

1. Allowed ids: all others get -Inf. (The bitmask of a grammar will belong here, too.)
2. Bad words (see `bad_words`): banned ids get -Inf.
3. Logit bias: added, each value clamped to -100 … 100. It cannot bring back what is at -Inf.
4. `min_tokens`: until that many tokens are out, every id of `all_stop_token_ids` gets -Inf.
5. Penalties (see `penalties`).

They are a function of the parameters, the prompt and the output so far, and cost nothing for rows
that need none of them. What depends on the parameters alone is compiled once per request
(`LogitRules`); what follows the tokens is kept per choice and grows with them (`LogitEdits`), so
that a step does not look at the whole history again.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from headrace.configs.sampling_params import SamplingParams
from headrace.workers.bad_words import BadWords
from headrace.workers.penalties import Penalties, TokenCounts, apply_penalties

MAX_BIAS = 100.0


class LogitRules:
    """What the parameters alone say; shared by the choices of a request."""

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        """Raises ValueError for token ids outside the vocabulary (stop ids are left out)."""
        self.allowed_ids = _id_tensor("allowed_token_ids", params.allowed_token_ids, vocab_size)
        bad_words = params.bad_words_token_ids
        for sequence in bad_words or ():
            _id_tensor("bad words", sequence, vocab_size)
        self.bad_words = BadWords(bad_words) if bad_words else None
        bias = sorted((params.logit_bias or {}).items())
        self.bias_ids = _id_tensor("logit_bias", [token for token, _ in bias] or None, vocab_size)
        self.bias_values = torch.tensor(
            [min(max(value, -MAX_BIAS), MAX_BIAS) for _, value in bias], dtype=torch.float32
        )
        self.min_tokens = params.min_tokens
        stop_ids = [token for token in params.all_stop_token_ids if 0 <= token < vocab_size]
        self.stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.int64)
        self.penalties = Penalties.of(params)
        self._is_lasting = (
            self.allowed_ids is not None
            or self.bad_words is not None
            or self.bias_ids is not None
            or self.penalties is not None
        )

    def is_active(self, num_output_tokens: int) -> bool:
        """Whether anything is to be edited after so many output tokens."""
        return self._is_lasting or self.masks_stops(num_output_tokens)

    def masks_stops(self, num_output_tokens: int) -> bool:
        return num_output_tokens < self.min_tokens and len(self.stop_ids) > 0

    def describe(self, num_output_tokens: int) -> str:
        """What of it takes tokens away after so many output tokens, for messages."""
        parts = []
        if self.allowed_ids is not None:
            parts.append(f"{len(self.allowed_ids)} allowed_token_ids")
        if self.bad_words is not None:
            parts.append("bad_words")
        if self.masks_stops(num_output_tokens):
            parts.append(f"min_tokens={self.min_tokens} ({len(self.stop_ids)} stop tokens)")
        return " with ".join(parts)


class LogitEdits:
    """The rules of a choice, and what they need of its tokens."""

    def __init__(
        self, rules: LogitRules, prompt_ids: np.ndarray, output_ids: Sequence[int]
    ) -> None:
        self.rules = rules
        self.num_output_tokens = len(output_ids)
        self.counts: TokenCounts | None = None
        if rules.penalties is not None:
            needs_prompt = rules.penalties.repetition != 1.0
            self.counts = TokenCounts(prompt_ids if needs_prompt else prompt_ids[:0], output_ids)
        self._newest = None if rules.bad_words is None else rules.bad_words.newest(output_ids)

    @property
    def is_active(self) -> bool:
        """Whether the next token's logits are edited."""
        return self.rules.is_active(self.num_output_tokens)

    def extend(self, output_ids: Sequence[int]) -> None:
        """Take in new output tokens."""
        self.num_output_tokens += len(output_ids)
        if self.counts is not None:
            self.counts.extend(output_ids)
        if self._newest is not None:
            self._newest.extend(output_ids)

    def banned_ids(self) -> list[int]:
        """Ids that would complete a bad word."""
        if self.rules.bad_words is None or self._newest is None:
            return []
        return self.rules.bad_words.banned(self._newest)


def apply_edits(scores: torch.Tensor, edits: Sequence[LogitEdits | None]) -> None:
    """Edit the rows of `scores`, [num_rows, vocab] float32 and contiguous, in place.

    One entry per row; None leaves the row alone. Steps other than the first run over all rows at
    once, element by element, so that no row's result depends on the others.
    """
    rows = [(row, edit) for row, edit in enumerate(edits) if edit is not None and edit.is_active]
    for row, edit in rows:
        if edit.rules.allowed_ids is not None:
            _keep_only(scores[row], edit.rules.allowed_ids)
    _set(scores, [(row, torch.tensor(ids)) for row, edit in rows if (ids := edit.banned_ids())])
    _add_bias(scores, [(row, edit.rules) for row, edit in rows])
    masked = [(row, e.rules) for row, e in rows if e.rules.masks_stops(e.num_output_tokens)]
    _set(scores, [(row, rules.stop_ids) for row, rules in masked])
    apply_penalties(
        scores,
        [
            (row, edit.rules.penalties, edit.counts)
            for row, edit in rows
            if edit.rules.penalties is not None and edit.counts is not None
        ],
    )


def _keep_only(scores: torch.Tensor, token_ids: torch.Tensor) -> None:
    token_ids = token_ids.to(scores.device)
    kept = scores[token_ids]
    scores.fill_(-math.inf)
    scores[token_ids] = kept


def _set(scores: torch.Tensor, rows: Sequence[tuple[int, torch.Tensor]]) -> None:
    """Set the given ids of the given rows to -Inf."""
    if rows:
        scores.view(-1)[_flat_index(scores, rows)] = -math.inf


def _add_bias(scores: torch.Tensor, rows: Iterable[tuple[int, LogitRules]]) -> None:
    biased = [(row, ids, rules) for row, rules in rows if (ids := rules.bias_ids) is not None]
    if biased:
        index = _flat_index(scores, [(row, ids) for row, ids, _ in biased])
        values = torch.cat([rules.bias_values for _, _, rules in biased])
        scores.view(-1)[index] += values.to(scores.device)


def _flat_index(scores: torch.Tensor, rows: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
    vocab = scores.shape[1]
    return torch.cat([row * vocab + token_ids for row, token_ids in rows]).to(scores.device)


def _id_tensor(name: str, token_ids: Iterable[int] | None, vocab_size: int) -> torch.Tensor | None:
    """Distinct ids, ascending, int64; None for None."""
    if token_ids is None:
        return None
    distinct = sorted(set(token_ids))
    if not distinct or distinct[0] < 0 or distinct[-1] >= vocab_size:
        shown = f"{distinct[0]} to {distinct[-1]}" if distinct else "no ids"
        raise ValueError(f"{name} must lie in 0 ... {vocab_size - 1}, got {shown}")
    return torch.tensor(distinct, dtype=torch.int64)
