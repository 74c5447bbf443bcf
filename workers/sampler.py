"""The sampler: one token (or one fault) for each row of logits.

A row is one position of one choice, so a step may hold none, one or several rows of a choice. What
a row gets depends on its logits, its parameters, its choice index and the choice's tokens before
it, and on nothing else. All in float32. Order of operations:

 1. Rows with NaN or +Inf, or with -Inf everywhere, fail alone.
 2. Raw scores are taken from the logits as the model made them, whatever follows.
 3. Edits, as `logit_edits` says: allowed ids; bad words; logit bias; `min_tokens`; penalties. A row
    where they leave no token fails alone.
 4. Greedy (temperature below 1e-5): the largest logit, the lowest id among equals. The end for
    greedy rows.
 5. The maximum is subtracted, then the row is divided by the temperature: scores from -Inf to 0.
 6. `min_p`: tokens less likely than `min_p` times the likeliest are dropped.
 7. `top_k`: the k best scores stay, and all that equal the k-th. A k above the vocabulary size
    keeps all.
 8. `top_p`: of what is left, renormalized, the shortest head of the tokens by descending score
    (lower id first among equals) with at least that mass; the best token always stays.
 9. Gumbel-max draw with the counter-based noise of `headrace.kernels.sampling`.

On native kernels the maxima of 1 and 4 are one pass over the logits, and steps 5 to 9 are one call
that leaves the logits alone; only rows with edits are copied. The torch code here is the reference.

The scores that come back beside the token are taken at 2, or after 4 or 8, as `logprobs` says.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from headrace.configs.config import LogprobsMode
from headrace.configs.sampling_params import SamplingParams
from headrace.kernels.native import DrawRow, NativeKernels
from headrace.kernels.sampling import gumbel_max, seed_to_int64
from headrace.workers.argmax import argmax_rows
from headrace.workers.logit_edits import LogitEdits, apply_edits
from headrace.workers.logprobs import score_rows
from headrace.workers.protocol import RequestFault, TokenLogprobs

# Scores handled at once: small enough that the noise of a chunk stays in the processor's cache.
_CHUNK_ELEMENTS = 1 << 18
# The native kernels take a row at a time; this bounds the copy of rows with edits.
_NATIVE_CHUNK_ELEMENTS = 1 << 22
_FLOAT32 = torch.finfo(torch.float32)
_FIRST_HEAD = 256  # tokens looked at first by top-p
_HEAD_GROWTH = 8


class SamplingRow(msgspec.Struct, frozen=True, gc=False):
    """What to do with one row of logits.

    `params.seed` must be concrete unless the row is greedy. `output_index` is the index of the
    output token that this row samples: the position of the random stream. `num_logprobs`: how many
    of the best scores to return beside the sampled token's; None returns no scores at all. `edits`
    hold the choice's tokens up to this position; None where the parameters edit nothing.
    """

    params: SamplingParams
    choice_index: int
    output_index: int
    num_logprobs: int | None = None
    edits: LogitEdits | None = None

    @property
    def is_edited(self) -> bool:
        """Whether its logits are edited."""
        return self.edits is not None and self.edits.is_active

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the token is simply that of the largest logit."""
        return self.params.is_greedy and not self.is_edited


class SampledRow(msgspec.Struct, frozen=True, gc=False):
    """A token, with scores if asked, or a fault (then `token_id` is -1)."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    fault: RequestFault | None = None


@dataclass
class _Batch:
    """Rows on their way; the lists have an entry for each.

    `maxima` and `token_ids` begin with the best of the logits; -1 where no token is left.
    """

    logits: torch.Tensor
    rows: Sequence[SamplingRow]
    maxima: list[float]
    token_ids: list[int]
    entries: list[TokenLogprobs | None]


class Sampler:
    """Samples a step's rows; keeps no state between calls."""

    def __init__(
        self, logprobs_mode: LogprobsMode = "raw_logprobs", kernels: NativeKernels | None = None
    ) -> None:
        """Rows as wide as the vocabulary are for `kernels`, or torch without them."""
        self._kernels = kernels
        self._mode: LogprobsMode = logprobs_mode
        self._reports_processed = logprobs_mode.startswith("processed")

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledRow]:
        """Sample every row of `logits` [num_rows, vocab], float32, which stays as it is."""
        if logits.shape[0] != len(rows):
            raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} sampling rows")
        if not rows:
            return []
        logits = logits.contiguous()
        maxima, token_ids = argmax_rows(logits, self._kernels)
        batch = _Batch(logits, rows, maxima, token_ids, [None] * len(rows))
        faults = [_refusal(row, maximum) for maximum, row in zip(maxima, rows, strict=True)]
        drawn = [i for i, row in enumerate(rows) if faults[i] is None and not row.is_plain_greedy]
        per_chunk = self._rows_per_chunk(logits.shape[1])
        for start in range(0, len(drawn), per_chunk):
            self._draw(batch, drawn[start : start + per_chunk])
        for i in drawn:
            if token_ids[i] < 0:
                faults[i] = _nothing_left(rows[i])
        # Of all rows in raw modes, else of the plain ones.
        self._add_entries(
            batch, logits, maxima, [(i, i) for i, fault in enumerate(faults) if fault is None]
        )
        return [
            SampledRow(token_id, entry) if fault is None else SampledRow(-1, fault=fault)
            for token_id, entry, fault in zip(token_ids, batch.entries, faults, strict=True)
        ]

    def _rows_per_chunk(self, vocab: int) -> int:
        """How many rows to draw at once; with native kernels, as many for each thread."""
        if self._kernels is None:
            return max(1, _CHUNK_ELEMENTS // vocab)
        num_threads = self._kernels.num_threads
        return max(1, _NATIVE_CHUNK_ELEMENTS // (vocab * num_threads)) * num_threads

    def _add_entries(
        self,
        batch: _Batch,
        logits: torch.Tensor,
        maxima: Sequence[float],
        places: Sequence[tuple[int, int]],
    ) -> None:
        """Scores of rows that have none yet and want some, from `logits` with these maxima.

        `places`: rows of the batch, with where they are in the logits.
        """
        wanted = [
            (row, place, num_top)
            for row, place in places
            if (num_top := batch.rows[row].num_logprobs) is not None and batch.entries[row] is None
        ]
        if not wanted:
            return
        rows, numbers, num_tops = zip(*wanted, strict=True)
        token_ids = [batch.token_ids[row] for row in rows]
        known = [maxima[number] for number in numbers]
        scored = score_rows(logits, numbers, token_ids, num_tops, known, self._mode, self._kernels)
        for row, entry in zip(rows, scored, strict=True):
            batch.entries[row] = entry

    def _draw(self, batch: _Batch, chunk: list[int]) -> None:
        """Steps 3 to 9 for rows that need more than the plain maximum.

        Puts their tokens into the batch and, in processed modes, their scores.
        """
        rows = [batch.rows[i] for i in chunk]
        logits, numbers = batch.logits, chunk
        maxima = batch.maxima
        is_edited = any(row.is_edited for row in rows)
        if is_edited or self._kernels is None:  # rows of a copy, which may be changed
            logits, numbers = logits[chunk], list(range(len(chunk)))
            maxima = [maxima[i] for i in chunk]
        if is_edited:
            apply_edits(logits, [row.edits for row in rows])
            maxima, best = argmax_rows(logits, self._kernels)
            for i, maximum, token_id in zip(chunk, maxima, best, strict=True):
                batch.token_ids[i] = token_id if maximum > -math.inf else -1
        places = [(i, n) for i, n in zip(chunk, numbers, strict=True) if batch.token_ids[i] >= 0]
        random = [(i, number) for i, number in places if not batch.rows[i].params.is_greedy]
        scores = None
        if random:
            scores = self._draw_random(batch, logits, maxima, random)
        if not self._reports_processed:
            return
        if scores is not None:
            drawn = [(row, number) for number, (row, _) in enumerate(random)]
            self._add_entries(batch, scores, [0.0] * len(random), drawn)
        self._add_entries(
            batch, logits, maxima, [(i, n) for i, n in places if batch.rows[i].params.is_greedy]
        )

    def _draw_random(
        self,
        batch: _Batch,
        logits: torch.Tensor,
        maxima: Sequence[float],
        places: Sequence[tuple[int, int]],
    ) -> torch.Tensor | None:
        """Steps 5 to 9 for rows of the batch, with where they are in the logits.

        Returns what they were drawn from, or what of it the mode reports, [len(places), vocab]; in
        raw modes perhaps None. A quotient too large for float32 becomes -Inf: probability 0.
        """
        rows = [batch.rows[i] for i, _ in places]
        numbers = [number for _, number in places]
        is_reported = self._reports_processed and any(row.num_logprobs is not None for row in rows)
        reports_logits = is_reported and self._mode == "processed_logits"
        scaled = _scaled(logits[numbers], rows) if reports_logits else None
        scores: torch.Tensor | None = None
        if self._kernels is None:
            scores = logits if len(rows) == len(logits) else logits[numbers]
            scores -= torch.tensor([[maxima[number]] for number in numbers], device=scores.device)
            scores /= _temperatures(rows, scores.device)
            token_ids = _filter_and_draw(scores, rows)
        else:
            if is_reported:
                scores = torch.empty(len(rows), logits.shape[1])
            draw_rows = (DrawRow * len(rows))(
                *(_draw_row(batch.rows[i], number, batch.token_ids[i]) for i, number in places)
            )
            token_ids = self._kernels.draw(logits, draw_rows, scores)
        for (i, _), token_id in zip(places, token_ids, strict=True):
            batch.token_ids[i] = token_id
        if scaled is not None and scores is not None:
            # What was drawn from had its maximum subtracted; what is reported has not.
            torch.where(scores > -math.inf, scaled, scores, out=scores)
        return scores


def _temperatures(rows: Sequence[SamplingRow], device: torch.device) -> torch.Tensor:
    """[num_rows, 1] float32."""
    return torch.tensor([[_temperature(row)] for row in rows], dtype=torch.float32, device=device)


def _scaled(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Logits over temperatures, finite where the logits are."""
    return (logits / _temperatures(rows, logits.device)).clamp_(_FLOAT32.min, _FLOAT32.max)


def _temperature(row: SamplingRow) -> float:
    return min(row.params.temperature, _FLOAT32.max)


def _draw_row(row: SamplingRow, number: int, best: int) -> DrawRow:
    params = row.params
    return DrawRow(
        row=number,
        best=best,
        top_p=params.top_p,
        seed=(params.seed or 0) % 2**64,
        top_k=max(params.top_k, 0),
        min_score=math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
        choice_index=row.choice_index,
        output_index=row.output_index,
        temperature=_temperature(row),
    )


def _filter_and_draw(scores: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    """Steps 6 to 9 in torch: the reference of the native ones."""
    for row_scores, row in zip(scores, rows, strict=True):
        _filter(row_scores, row.params)
    seeds = [seed_to_int64(row.params.seed) for row in rows if row.params.seed is not None]
    token_ids: list[int] = gumbel_max(
        scores,
        torch.tensor(seeds, device=scores.device),
        torch.tensor([row.choice_index for row in rows], device=scores.device),
        torch.tensor([row.output_index for row in rows], device=scores.device),
    ).tolist()
    return token_ids


def _filter(scores: torch.Tensor, params: SamplingParams) -> None:
    """Set scores of one row, [vocab] with maximum 0, to -Inf where a filter drops the token."""
    if params.min_p > 0.0:
        scores.masked_fill_(scores < math.log(params.min_p), -math.inf)
    if 0 < params.top_k < scores.shape[0]:
        kept = _best_tokens(scores, params.top_k)
        if params.top_p < 1.0:
            mass = _running_mass(scores[kept])
            kept = kept[: _head_length(mass, mass[-1] * params.top_p)]
    elif params.top_p < 1.0:
        kept = _nucleus(scores, params.top_p)
    else:
        return
    kept_scores = scores[kept]
    scores.fill_(-math.inf)
    scores[kept] = kept_scores


def _nucleus(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Ids of the shortest head of the sorted tokens that has at least `top_p` of the mass.

    The head is sorted in growing pieces, since it is mostly short and a full sort is slow.
    """
    target = _running_mass(scores)[-1] * top_p
    size = _FIRST_HEAD
    while True:
        best = _best_tokens(scores, size)
        length = _head_length(_running_mass(scores[best]), target)
        if length < len(best) or len(best) < size or size >= scores.shape[0]:
            return best[:length]
        size *= _HEAD_GROWTH


def _running_mass(scores: torch.Tensor) -> torch.Tensor:
    """Running sums of exp(score), float64; unlike other sums, independent of the threads."""
    return scores.double().exp().cumsum(dim=0)


def _head_length(mass: torch.Tensor, target: torch.Tensor) -> int:
    """How many tokens it takes to reach `target`: one stays if those before it fall short."""
    return 1 + int((mass[:-1] < target).sum())


def _best_tokens(scores: torch.Tensor, size: int) -> torch.Tensor:
    """Ids of the `size` best scores and of all equal to the last of them, without those at -Inf.

    Descending, the lower id first among equals.
    """
    allowed = scores > -math.inf
    if size < scores.shape[0]:
        # topk does not say which of equal values it returns, so it only gives the least one.
        allowed &= scores >= torch.topk(scores, size).values[-1]
    token_ids = allowed.nonzero().squeeze(-1)
    order = scores[token_ids].sort(descending=True, stable=True).indices
    return token_ids[order]


def _refusal(row: SamplingRow, maximum: float) -> RequestFault | None:
    """Why a row whose largest logit (NaN if it has one) is `maximum` cannot be sampled, or None."""
    if not math.isfinite(maximum):
        return RequestFault(
            "non_finite_logits",
            f"the model produced NaN or infinite logits for output token {row.output_index}",
        )
    if row.params.seed is None and not row.params.is_greedy:
        return RequestFault("request_failed", "random sampling needs a concrete seed, got None")
    return None


def _nothing_left(row: SamplingRow) -> RequestFault:
    rules = "" if row.edits is None else row.edits.rules.describe(row.output_index)
    return RequestFault(
        "request_failed",
        f"{rules} leave nothing to sample for output token {row.output_index}: no token with a "
        "finite logit is left",
    )
