"""The sampler: one token (or one fault) for each row of logits.

A row is one position of one choice, so a step may hold none, one or several rows of a choice. What
a row gets depends on its logits, its parameters, its choice index and its output index, and on
nothing else. Order of operations:

1. Rows with NaN or +Inf, or with -Inf everywhere, fail alone.
2. Raw log-probabilities are taken from the logits as the model made them, whatever follows.
3. `min_tokens`: until that many tokens are out, no id of `all_stop_token_ids` can be sampled.
4. Greedy (temperature below 1e-5): the largest logit, the lowest id among equals. The end for
   greedy rows.
5. The maximum is subtracted, then the row is divided by the temperature, in float32: scores from
   -Inf to 0.
6. `min_p`: tokens less likely than `min_p` times the likeliest are dropped.
7. `top_k`: the k best scores stay, and all that equal the k-th. A k above the vocabulary size keeps
   all.
8. `top_p`: of what is left, renormalized, the shortest head of the tokens by descending score
   (lower id first among equals) with at least that mass; the best token always stays.
9. Gumbel-max draw with the counter-based noise of `headrace.kernels.sampling`.
"""

import math
from dataclasses import dataclass

import torch

from headrace.configs.sampling_params import SamplingParams
from headrace.kernels.sampling import gumbel_max, seed_to_int64
from headrace.workers.protocol import RequestFault, TokenLogprobs

# Scores handled at once: small enough that the noise of a chunk stays in the processor's cache.
_CHUNK_ELEMENTS = 1 << 18
_MAX_TEMPERATURE = torch.finfo(torch.float32).max
_FIRST_HEAD = 256  # tokens looked at first by top-p
_HEAD_GROWTH = 8


@dataclass(frozen=True)
class SamplingRow:
    """What to do with one row of logits.

    `params.seed` must be concrete unless the row is greedy. `output_index` is the index of the
    output token that this row samples: the position of the random stream. `num_logprobs`: how many
    top log-probabilities to return beside the sampled token's; None returns no log-probabilities at
    all.
    """

    params: SamplingParams
    choice_index: int
    output_index: int
    num_logprobs: int | None = None


@dataclass(frozen=True)
class SampledRow:
    """A token, with log-probabilities if asked, or a fault (then `token_id` is -1)."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    fault: RequestFault | None = None


class Sampler:
    """Samples a step's rows; keeps no state between calls."""

    def sample(self, logits: torch.Tensor, rows: list[SamplingRow]) -> list[SampledRow]:
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
        drawn = [i for i, row in enumerate(rows) if faults[i] is None and not _is_plain_greedy(row)]
        per_chunk = max(1, _CHUNK_ELEMENTS // logits.shape[1])
        for start in range(0, len(drawn), per_chunk):
            chunk = drawn[start : start + per_chunk]
            chosen = _draw(logits[chunk], [rows[i] for i in chunk])
            for i, token_id in zip(chunk, chosen, strict=True):
                token_ids[i] = token_id
                if token_id < 0:
                    faults[i] = _nothing_left(rows[i])
        return [
            SampledRow(-1, fault=fault)
            if fault is not None
            else SampledRow(token_id, _row_logprobs(row_logits, row, token_id))
            for row_logits, row, token_id, fault in zip(
                logits, rows, token_ids, faults, strict=True
            )
        ]


def token_logprobs(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities of one position from its raw logits, [vocab] float32.

    First `token_id` with its rank: 1 + the number of tokens with a strictly larger log-probability.
    Then the `num_top` best (fewer if fewer have a probability above 0), descending, the lower id
    first among equals.
    """
    logprobs = logits.log_softmax(dim=-1)
    token_logprob = logprobs[token_id]
    rank = 1 + int((logprobs > token_logprob).sum())
    token_ids, values = [token_id], [float(token_logprob)]
    if num_top > 0:
        best = _best_tokens(logprobs, num_top)[:num_top]
        token_ids += best.tolist()
        values += logprobs[best].tolist()
    return TokenLogprobs(token_ids, values, rank)


def _row_logprobs(logits: torch.Tensor, row: SamplingRow, token_id: int) -> TokenLogprobs | None:
    return None if row.num_logprobs is None else token_logprobs(logits, token_id, row.num_logprobs)


def _is_plain_greedy(row: SamplingRow) -> bool:
    return row.params.is_greedy and not _is_below_min_tokens(row)


def _is_below_min_tokens(row: SamplingRow) -> bool:
    return row.output_index < row.params.min_tokens and bool(row.params.all_stop_token_ids)


def _draw(scores: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    """Token ids for rows that need more than the plain maximum, -1 where no token is left.

    Overwrites `scores`.
    """
    for row_scores, row in zip(scores, rows, strict=True):
        if _is_below_min_tokens(row):
            _mask_stop_tokens(row_scores, row.params)
    maxima, argmaxima = scores.max(dim=-1)
    token_ids: list[int] = torch.where(maxima > -math.inf, argmaxima, -1).tolist()
    random = [i for i, row in enumerate(rows) if token_ids[i] >= 0 and not row.params.is_greedy]
    if not random:
        return token_ids
    if len(random) < len(rows):
        scores, maxima = scores[random], maxima[random]
    drawn = _draw_random(scores, maxima, [rows[i] for i in random])
    for i, token_id in zip(random, drawn, strict=True):
        token_ids[i] = token_id
    return token_ids


def _draw_random(scores: torch.Tensor, maxima: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    """Steps 5 to 9. A quotient too large for float32 becomes -Inf: probability 0, never NaN."""
    temperatures = [min(row.params.temperature, _MAX_TEMPERATURE) for row in rows]
    scores -= maxima.unsqueeze(-1)
    scores /= torch.tensor(temperatures, dtype=torch.float32, device=scores.device).unsqueeze(-1)
    for row_scores, row in zip(scores, rows, strict=True):
        _filter(row_scores, row.params)
    seeds = [seed_to_int64(row.params.seed) for row in rows if row.params.seed is not None]
    token_ids = gumbel_max(
        scores,
        torch.tensor(seeds, device=scores.device),
        torch.tensor([row.choice_index for row in rows], device=scores.device),
        torch.tensor([row.output_index for row in rows], device=scores.device),
    )
    result: list[int] = token_ids.tolist()
    return result


def _mask_stop_tokens(logits: torch.Tensor, params: SamplingParams) -> None:
    vocab = logits.shape[0]
    stop_ids = sorted(token for token in params.all_stop_token_ids if 0 <= token < vocab)
    logits[torch.tensor(stop_ids, dtype=torch.int64, device=logits.device)] = -math.inf


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
    return RequestFault(
        "request_failed",
        f"min_tokens={row.params.min_tokens} leaves nothing to sample for output token "
        f"{row.output_index}: all tokens with a finite logit are among the "
        f"{len(row.params.all_stop_token_ids)} stop tokens",
    )
