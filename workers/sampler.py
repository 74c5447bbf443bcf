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

On native kernels, steps 5 to 9 are one call; the torch code here is their reference.

The scores that come back beside the token are taken at 2, or after 4 or 8, as `logprobs` says.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.configs.config import LogprobsMode
from headrace.configs.sampling_params import SamplingParams
from headrace.kernels.native import DrawRow, NativeKernels
from headrace.kernels.sampling import gumbel_max, seed_to_int64
from headrace.workers.logit_edits import LogitEdits, apply_edits
from headrace.workers.logprobs import score_sampled
from headrace.workers.protocol import RequestFault, TokenLogprobs

# Scores handled at once: small enough that the noise of a chunk stays in the processor's cache.
_CHUNK_ELEMENTS = 1 << 18
# The native kernels take a row at a time, and a turn between torch's threads and theirs costs time.
_NATIVE_CHUNK_ELEMENTS = 1 << 20
_FLOAT32 = torch.finfo(torch.float32)
_FIRST_HEAD = 256  # tokens looked at first by top-p
_HEAD_GROWTH = 8


@dataclass(frozen=True)
class SamplingRow:
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
    def is_plain_greedy(self) -> bool:
        """Whether the token is simply that of the largest logit."""
        return self.params.is_greedy and (self.edits is None or not self.edits.is_active)


@dataclass(frozen=True)
class SampledRow:
    """A token, with scores if asked, or a fault (then `token_id` is -1)."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    fault: RequestFault | None = None


class Sampler:
    """Samples a step's rows; keeps no state between calls."""

    def __init__(
        self, logprobs_mode: LogprobsMode = "raw_logprobs", kernels: NativeKernels | None = None
    ) -> None:
        """Steps 5 to 9 run on `kernels`, or on the torch references without them."""
        self._kernels = kernels
        self._mode: LogprobsMode = logprobs_mode
        self._reports_processed = logprobs_mode.startswith("processed")

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledRow]:
        """Sample every row of `logits` [num_rows, vocab], float32, which stays as it is."""
        if logits.shape[0] != len(rows):
            raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} sampling rows")
        if not rows:
            return []
        maxima, argmaxima = logits.max(dim=-1)  # NaN wins over all; the lowest id among equals
        token_ids: list[int] = argmaxima.tolist()
        faults = [
            _refusal(row, maximum) for maximum, row in zip(maxima.tolist(), rows, strict=True)
        ]
        entries: list[TokenLogprobs | None] = [None] * len(rows)
        drawn = [i for i, row in enumerate(rows) if faults[i] is None and not row.is_plain_greedy]
        per_chunk = self._rows_per_chunk(logits.shape[1])
        for start in range(0, len(drawn), per_chunk):
            chunk = drawn[start : start + per_chunk]
            chosen, scored = self._draw(logits[chunk], [rows[i] for i in chunk])
            for i, token_id, entry in zip(chunk, chosen, scored, strict=True):
                token_ids[i], entries[i] = token_id, entry
                if token_id < 0:
                    faults[i] = _nothing_left(rows[i])
        if any(row.num_logprobs is not None for row in rows):
            self._add_raw_entries(logits, rows, token_ids, faults, entries)
        return [
            SampledRow(-1, fault=fault) if fault is not None else SampledRow(token_id, entry)
            for token_id, entry, fault in zip(token_ids, entries, faults, strict=True)
        ]

    def _rows_per_chunk(self, vocab: int) -> int:
        """How many rows to draw at once; with native kernels, as many for each thread."""
        if self._kernels is None:
            return max(1, _CHUNK_ELEMENTS // vocab)
        num_threads = self._kernels.num_threads
        return max(1, _NATIVE_CHUNK_ELEMENTS // (vocab * num_threads)) * num_threads

    def _add_raw_entries(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        token_ids: Sequence[int],
        faults: Sequence[RequestFault | None],
        entries: list[TokenLogprobs | None],
    ) -> None:
        """Scores of the rows that have none yet: of all in raw modes, else of the plain ones."""
        wanted = [
            None if entries[i] is not None or faults[i] is not None else row.num_logprobs
            for i, row in enumerate(rows)
        ]
        for i, entry in enumerate(score_sampled(logits, token_ids, wanted, self._mode)):
            entries[i] = entry or entries[i]

    def _draw(
        self, scores: torch.Tensor, rows: list[SamplingRow]
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Steps 3 to 9 for rows that need more than the plain maximum. Overwrites `scores`.

        Returns token ids, -1 where no token is left, and in processed modes their scores.
        """
        apply_edits(scores, [row.edits for row in rows])
        maxima, argmaxima = scores.max(dim=-1)
        token_ids: list[int] = torch.where(maxima > -math.inf, argmaxima, -1).tolist()
        random = [i for i, row in enumerate(rows) if token_ids[i] >= 0 and not row.params.is_greedy]
        if random:
            part = scores if len(random) == len(rows) else scores[random]
            drawn = self._draw_random(part, maxima[random], [rows[i] for i in random])
            for i, token_id in zip(random, drawn, strict=True):
                token_ids[i] = token_id
            if part is not scores and self._reports_processed:
                scores[random] = part
        if not self._reports_processed:
            return token_ids, [None] * len(rows)
        num_logprobs = [
            row.num_logprobs if token_id >= 0 else None
            for row, token_id in zip(rows, token_ids, strict=True)
        ]
        return token_ids, score_sampled(scores, token_ids, num_logprobs, self._mode)

    def _draw_random(
        self, scores: torch.Tensor, maxima: torch.Tensor, rows: list[SamplingRow]
    ) -> list[int]:
        """Steps 5 to 9, in place. A quotient too large for float32 becomes -Inf: probability 0.

        In the mode that reports processed logits, leaves those in `scores`.
        """
        logits = scores.clone() if self._mode == "processed_logits" else None
        temperatures = torch.tensor(
            [_temperature(row) for row in rows],
            dtype=torch.float32,
            device=scores.device,
        ).unsqueeze(-1)
        if self._kernels is None:
            scores -= maxima.unsqueeze(-1)
            scores /= temperatures
            token_ids = _filter_and_draw(scores, rows)
        else:
            draw_rows = (DrawRow * len(rows))(*(_draw_row(row) for row in rows))
            token_ids = self._kernels.draw(scores, draw_rows)
        if logits is not None:
            # What was drawn from had its maximum subtracted; what is reported has not.
            scaled = (logits / temperatures).clamp_(_FLOAT32.min, _FLOAT32.max)
            torch.where(scores > -math.inf, scaled, scores, out=scores)
        return token_ids


def _temperature(row: SamplingRow) -> float:
    return min(row.params.temperature, _FLOAT32.max)


def _draw_row(row: SamplingRow) -> DrawRow:
    params = row.params
    return DrawRow(
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
