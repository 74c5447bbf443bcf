"""Beam search over ordinary requests: each step, every live beam asks for one more token."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.configs.beam_search_params import BeamSearchParams
from headrace.frontend.outputs import Logprob

TokenScores = dict[int, Logprob]
# Next-token scores of each sequence of tokens: the 2 * beam_width best of them, and maybe one more.
Scorer = Callable[[list[list[int]]], Sequence[TokenScores | None]]


@dataclass
class BeamSearchSequence:
    """One beam: prompt and generated tokens, and what they cost.

    `logprobs` has the scores of every generated position; `text` is filled in at the end, with the
    prompt in it.
    """

    tokens: list[int]
    logprobs: list[TokenScores]
    lora_request: Any = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    multi_modal_data: Any = None
    mm_processor_kwargs: dict[str, Any] | None = None


@dataclass
class BeamSearchOutput:
    """The best beams of one prompt, the best first."""

    sequences: list[BeamSearchSequence]


@dataclass
class _Search:
    """One prompt's beams."""

    live: list[BeamSearchSequence]
    completed: list[BeamSearchSequence] = field(default_factory=list)


def beam_search(
    prompts: Sequence[list[int]],
    params: BeamSearchParams,
    *,
    score: Scorer,
    eos_token_ids: frozenset[int],
    max_prompt_tokens: int,
    steps: Iterable[int],
) -> list[BeamSearchOutput]:
    """Search each prompt for its `beam_width` best continuations.

    Scores are cumulative log-probability / length ** length_penalty, over all tokens of a beam but
    a last EOS. A beam that ends in EOS is completed, and takes no place among the live ones. Beams
    that are longer than `max_prompt_tokens`, or get no scores, are dropped.
    """
    searches = [_Search([BeamSearchSequence(list(prompt), [])]) for prompt in prompts]

    def rank(beam: BeamSearchSequence) -> float:
        return -beam_score(beam, params.length_penalty, eos_token_ids)

    for number in steps:
        if number > 0:  # a prompt that is too long is the scorer's to refuse
            for search in searches:
                search.live = [b for b in search.live if len(b.tokens) <= max_prompt_tokens]
        beams = [beam for search in searches for beam in search.live]
        if not beams:
            break
        scores = iter(score([beam.tokens for beam in beams]))
        for search in searches:
            candidates: list[BeamSearchSequence] = []
            for beam in search.live:
                for candidate in _continuations(beam, next(scores)):
                    ended = candidate.tokens[-1] in eos_token_ids and not params.ignore_eos
                    (search.completed if ended else candidates).append(candidate)
            search.live = sorted(candidates, key=rank)[: params.beam_width]
    return [
        BeamSearchOutput(sorted(search.completed + search.live, key=rank)[: params.beam_width])
        for search in searches
    ]


def beam_score(
    beam: BeamSearchSequence, length_penalty: float, eos_token_ids: frozenset[int]
) -> float:
    """What beams are ranked by; the larger, the better."""
    length = len(beam.tokens) - (beam.tokens[-1] in eos_token_ids)
    return float(beam.cum_logprob / max(1, length) ** length_penalty)


def _continuations(
    beam: BeamSearchSequence, scores: TokenScores | None
) -> Iterable[BeamSearchSequence]:
    for token, entry in (scores or {}).items():
        yield BeamSearchSequence(
            tokens=[*beam.tokens, token],
            logprobs=[*beam.logprobs, scores or {}],
            cum_logprob=beam.cum_logprob + entry.logprob,
        )
