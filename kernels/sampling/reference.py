"""Random choice of a token by the Gumbel-max method, with counter-based noise.

Source: Philox4x32-10 from J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC
2011); Gumbel-max: the index of the largest `score + g`, with `g` independent standard Gumbel noise,
has the softmax of the scores as its law.

There is no generator state. The noise of a token follows from the seed, the token id and the place
it is drawn for, so a draw does not depend on batch mates, on the order of the vocabulary, on how it
is sharded, or on earlier draws:

    key      = the 64-bit seed, low word first
    counter  = (token_id >> 2, output index, choice index, purpose)
    word w   = output word `token_id & 3`
    u        = (w + 0.5) * 2^-32     in float64, exact, in the open interval (0, 1)
    g        = -log(-log(u))         in float64, then rounded to float32

Hence -3.13 < g < 22.88, and a token whose score is more than 22.88 below the best sum so far cannot
win: it is skipped without changing the result. Everything here runs on any torch device.
"""

import torch

PURPOSE_SAMPLE = 0  # last counter word: one stream for each use of randomness

# No noise is larger: a little above its largest value, 22.8739, so that no rounding can cross it.
GUMBEL_MAX = 22.88

_LANES = 4  # output words of one Philox call
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # key increments: golden ratio, sqrt(3) - 1
_WORD = 0xFFFFFFFF

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Philox4x32-10 over int64 tensors that hold 32-bit words (0 … 2^32-1); inputs broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product of two words needs 64 bits; int64 wraps, but holds the right ones. What is
        # only combined by xor is not cut to 32 bits until it becomes a factor, or at the end.
        p0 = c0 * _MULTIPLIERS[0]
        p1 = c2 * _MULTIPLIERS[1]
        c0 = ((p1 >> 32) ^ c1 ^ k0) & _WORD
        c2 = ((p0 >> 32) ^ c3 ^ k1) & _WORD
        c1, c3 = p1, p0
        k0 = k0 + _WEYL[0]
        k1 = k1 + _WEYL[1]
    return c0, c1 & _WORD, c2, c3 & _WORD


def seed_to_int64(seed: int) -> int:
    """The bits of a seed (-2^63 … 2^64-1) as the signed integer that an int64 tensor can hold."""
    return (seed + 2**63) % 2**64 - 2**63


def gumbel_noise(
    token_ids: torch.Tensor,
    seeds: torch.Tensor,
    choice_indices: torch.Tensor,
    output_indices: torch.Tensor,
    purpose: int = PURPOSE_SAMPLE,
) -> torch.Tensor:
    """Noise of (row, token) pairs: the definition. Int64 tensors of one shape, float32 result."""
    groups = _group_noise(token_ids >> 2, seeds, choice_indices, output_indices, purpose)
    return groups.gather(-1, (token_ids & 3).unsqueeze(-1)).squeeze(-1)


def gumbel_max(
    scores: torch.Tensor,
    seeds: torch.Tensor,
    choice_indices: torch.Tensor,
    output_indices: torch.Tensor,
    purpose: int = PURPOSE_SAMPLE,
) -> torch.Tensor:
    """Draw one token per row from softmax(scores).

    `scores` is [num_rows, vocab] float32 without NaN or +Inf; -Inf excludes a token, and each row
    has a finite score. The other tensors are [num_rows] int64 (`seeds` by `seed_to_int64`). Returns
    token ids, [num_rows] int64; equal sums go to the lowest id. Only tokens that can still win get
    noise, which is the same as giving it to all.
    """
    num_rows, vocab = scores.shape
    if vocab % _LANES:
        scores = torch.nn.functional.pad(scores, (0, -vocab % _LANES), value=float("-inf"))
    best = scores.argmax(dim=-1)
    noise = gumbel_noise(best, seeds, choice_indices, output_indices, purpose)
    to_beat = scores.gather(-1, best.unsqueeze(-1)) + noise.unsqueeze(-1)
    # Rounding is monotonic, so `score + noise` rounded is never above `score + GUMBEL_MAX` rounded.
    can_win = (scores + GUMBEL_MAX) >= to_beat
    rows, groups = can_win.view(torch.int32).nonzero(as_tuple=True)  # four tokens at a time
    noise = _group_noise(
        groups, seeds[rows], choice_indices[rows], output_indices[rows], purpose
    )  # [num_groups, 4]
    sums = scores.view(num_rows, -1, _LANES)[rows, groups] + noise
    return _first_maximum(sums, rows, groups, num_rows)


def _group_noise(
    groups: torch.Tensor,
    seeds: torch.Tensor,
    choice_indices: torch.Tensor,
    output_indices: torch.Tensor,
    purpose: int,
) -> torch.Tensor:
    """Noise of tokens 4*group … 4*group+3: int64 arguments of shape [...] give [..., 4] float32."""
    counter = (groups, output_indices, choice_indices, torch.full_like(groups, purpose))
    words = torch.stack(philox4x32(counter, (seeds & _WORD, (seeds >> 32) & _WORD)), dim=-1)
    uniform = (words.to(torch.float64) + 0.5) * 2.0**-32
    return uniform.log_().neg_().log_().neg_().to(torch.float32)


def _first_maximum(
    sums: torch.Tensor, rows: torch.Tensor, groups: torch.Tensor, num_rows: int
) -> torch.Tensor:
    """Token id of each row's largest sum; the lowest id among equals. `sums` is [num_groups, 4]."""
    maxima, lanes = sums.max(dim=-1)  # the first lane among equals
    row_maxima = maxima.new_full((num_rows,), float("-inf"))
    row_maxima.scatter_reduce_(0, rows, maxima, "amax")
    wins = maxima == row_maxima[rows]
    token_ids = groups * _LANES + lanes
    winners = token_ids.new_full((num_rows,), torch.iinfo(torch.int64).max)
    winners.scatter_reduce_(0, rows[wins], token_ids[wins], "amin")
    return winners
