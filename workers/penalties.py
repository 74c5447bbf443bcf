"""Repetition, frequency and presence penalties, from sparse counts of a choice's own tokens.

With c the number of times a token is in the output:

1. `repetition_penalty` r, for tokens of the prompt or the output: a positive logit is divided by r,
   any other is multiplied by r.
2. `frequency_penalty` f: minus f * c.
3. `presence_penalty` p: minus p if c > 0.

All in float32; r is first brought into the range of normal positive float32 numbers. A finite logit
stays finite: what would overflow becomes the largest float32 of its sign. -Inf stays -Inf.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.configs.sampling_params import SamplingParams
from headrace.workers.growing_array import GrowingArray

_FLOAT32 = torch.finfo(torch.float32)


@dataclass(frozen=True)
class Penalties:
    """The three factors of one request, as float32 can hold them."""

    repetition: float
    frequency: float
    presence: float

    @classmethod
    def of(cls, params: SamplingParams) -> "Penalties | None":
        """None if nothing is penalized."""
        factors = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        if factors == (1.0, 0.0, 0.0):
            return None
        # Below the smallest normal float32 the factor would be flushed to 0.
        repetition = min(max(factors[0], _FLOAT32.tiny), _FLOAT32.max)
        return cls(repetition, *factors[1:])


class TokenCounts:
    """The distinct tokens of one choice, with how often each of them is in its output.

    Takes memory for distinct tokens only, and O(1) for each new token.
    """

    def __init__(self, prompt_ids: np.ndarray, output_ids: Iterable[int]) -> None:
        distinct = np.unique(prompt_ids)
        self._ids = GrowingArray(distinct)
        self._counts = GrowingArray(np.zeros(len(distinct), dtype=np.int64))
        self._places: dict[int, int] = {token: i for i, token in enumerate(distinct.tolist())}
        self.extend(output_ids)

    def extend(self, output_ids: Iterable[int]) -> None:
        """Count new output tokens."""
        for token in output_ids:
            place = self._places.setdefault(token, len(self._ids))
            if place == len(self._ids):
                self._ids.extend((token,))
                self._counts.extend((1,))
            else:
                self._counts.view()[place] += 1

    def view(self) -> tuple[np.ndarray, np.ndarray]:
        """(token ids, their counts in the output), int64; valid until the next `extend`."""
        return self._ids.view(), self._counts.view()


def apply_penalties(
    scores: torch.Tensor, rows: Sequence[tuple[int, Penalties, TokenCounts]]
) -> None:
    """Penalize rows of `scores`, [num_rows, vocab] float32 and contiguous, in place.

    Each entry of `rows` is a row's index with its factors and counts.
    """
    if not rows:
        return
    vocab = scores.shape[1]
    views = [counts.view() for _, _, counts in rows]
    lengths = torch.tensor([len(ids) for ids, _ in views])
    index = torch.from_numpy(
        np.concatenate(
            [row * vocab + ids for (row, _, _), (ids, _) in zip(rows, views, strict=True)]
        )
    ).to(scores.device)
    counts = torch.from_numpy(np.concatenate([count for _, count in views]))
    counts = counts.to(scores.device, torch.float32)

    def spread(factors: list[float]) -> torch.Tensor:
        column = torch.tensor(factors, dtype=torch.float32)
        return column.repeat_interleave(lengths).to(scores.device)

    flat = scores.view(-1)
    before = flat[index]
    repetition = spread([penalties.repetition for _, penalties, _ in rows])
    after = torch.where(before > 0, before / repetition, before * repetition)
    after -= spread([penalties.frequency for _, penalties, _ in rows]) * counts
    after -= spread([penalties.presence for _, penalties, _ in rows]) * (counts > 0)
    after.clamp_(_FLOAT32.min, _FLOAT32.max)
    flat[index] = torch.where(before.isneginf(), before, after)
