"""Scores that are reported beside tokens: log-probabilities or logits, sampled or of the prompt.

`ModelConfig.logprobs_mode` says which scores:

* `raw_logprobs`, `raw_logits`: from the logits as the model made them.
* `processed_logprobs`, `processed_logits`: from what the token was chosen from, after all edits of
  `logit_edits` and, for random sampling, after temperature, min-p, top-k and top-p; tokens that
  these took away have -Inf. Greedy sampling divides by no temperature: its scores are those after
  the edits.

Prompt tokens were not sampled, so their scores are raw in either mode.

On native kernels one call finds the scores, ranks and best tokens of some rows: it looks at each
row three times and stores nothing as wide as the vocabulary. A log-probability is then `(logit -
maximum) - log(sum)` in float32; the sum of float32 exponentials, in float64, has one order for any
batch, number of threads and instruction set. The torch code here is the reference, which makes
scores of the whole row first; its log-probabilities are within 1e-5 of the native ones. What is
said of ranks and of equal scores holds for either.
"""

from collections.abc import Sequence

import torch

from headrace.configs.config import LogprobsMode
from headrace.kernels.native import NativeKernels
from headrace.workers.protocol import TokenLogprobs

# Rows scored at once. With `SCORE_COPIES` this bounds the memory that scores take beside the
# sampler's; `memory_budget` reserves it.
SCORE_ROWS = 32
# [SCORE_ROWS, vocab] float32 at the same time: logits, scores, and what the ranking makes of them,
# a sort of the whole vocabulary included. (The entries themselves come on top, as Python objects.)
# Native kernels need less: logits, and three times as much if the whole vocabulary is asked for.
SCORE_COPIES = 5


def reported_scores(logits: torch.Tensor, mode: LogprobsMode) -> torch.Tensor:
    """What `mode` reports of logits, raw or processed: [..., vocab] float32."""
    return logits if mode.endswith("logits") else logits.log_softmax(dim=-1)


def score_tokens(
    scores: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> list[TokenLogprobs]:
    """The entries of rows of reported scores, [num_rows, vocab] float32 without NaN.

    For each row first its entry of `token_ids`, [num_rows] int64, with its rank: 1 + the number of
    tokens with a strictly larger score. Then the `num_top` best (at most the whole vocabulary),
    descending, the lower id first among equals.
    """
    token_ids = token_ids.unsqueeze(-1)
    is_better = scores > scores.gather(-1, token_ids)
    ranks = 1 + is_better.sum(dim=-1, dtype=torch.int32)  # int64 would take twice the scores
    if num_top > 0:
        token_ids = torch.cat((token_ids, _best_tokens(scores, num_top)), dim=-1)
    values = scores.gather(-1, token_ids)
    return [
        TokenLogprobs(row_ids, row_values, rank)
        for row_ids, row_values, rank in zip(
            token_ids.tolist(), values.tolist(), ranks.tolist(), strict=True
        )
    ]


def score_rows(
    logits: torch.Tensor,
    rows: Sequence[int],
    token_ids: Sequence[int],
    num_tops: Sequence[int],
    maxima: Sequence[float],
    mode: LogprobsMode,
    kernels: NativeKernels | None,
) -> list[TokenLogprobs]:
    """Entries as `score_tokens` makes them for some `rows` of logits [*, vocab], float32.

    The logits are raw or processed as `mode` asks, and without NaN. Each of the rows has a token, a
    number of best ones and its largest logit, which is finite. `SCORE_ROWS` are handled at a time,
    on `kernels` or on torch.
    """
    entries: list[TokenLogprobs] = []
    for start in range(0, len(rows), SCORE_ROWS):
        part = slice(start, start + SCORE_ROWS)
        if kernels is None:
            entries += _score_on_torch(logits, rows[part], token_ids[part], num_tops[part], mode)
            continue
        tops = [min(num_top, logits.shape[1]) for num_top in num_tops[part]]
        known = None if mode.endswith("logits") else maxima[part]
        scores, ids, ranks = kernels.score(logits, rows[part], token_ids[part], tops, known)
        entries += (
            TokenLogprobs(row_ids[: 1 + top].tolist(), row_scores[: 1 + top].tolist(), rank)
            for row_ids, row_scores, rank, top in zip(
                ids, scores, ranks.tolist(), tops, strict=True
            )
        )
    return entries


def _score_on_torch(
    logits: torch.Tensor,
    rows: Sequence[int],
    token_ids: Sequence[int],
    num_tops: Sequence[int],
    mode: LogprobsMode,
) -> list[TokenLogprobs]:
    """Rows with one number of best tokens together."""
    entries: dict[int, TokenLogprobs] = {}
    for num_top in set(num_tops):
        alike = [i for i, num in enumerate(num_tops) if num == num_top]
        scores = reported_scores(logits[[rows[i] for i in alike]], mode)
        chosen = torch.tensor([token_ids[i] for i in alike], device=scores.device)
        entries |= zip(alike, score_tokens(scores, chosen, num_top), strict=True)
    return [entries[i] for i in range(len(rows))]


def _best_tokens(scores: torch.Tensor, num_top: int) -> torch.Tensor:
    """Ids of each row's best scores, [num_rows, min(num_top, vocab)], the lower id among equals."""
    if num_top >= scores.shape[1]:
        return scores.sort(dim=-1, descending=True, stable=True).indices
    values, token_ids = scores.topk(num_top, dim=-1)
    token_ids = token_ids.sort(dim=-1).values
    order = scores.gather(-1, token_ids).sort(dim=-1, descending=True, stable=True).indices
    token_ids = token_ids.gather(-1, order)
    # topk does not say which of equal scores it takes, so rows with a tie at the end are done over.
    least = values[:, -1:]
    is_tied = (scores >= least).sum(dim=-1, dtype=torch.int32) > num_top
    for row in is_tied.nonzero().flatten().tolist():
        candidates = (scores[row] >= least[row]).nonzero().flatten()
        order = scores[row][candidates].sort(descending=True, stable=True).indices
        token_ids[row] = candidates[order[:num_top]]
    return token_ids
