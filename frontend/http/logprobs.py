"""Log-probabilities in the forms of the API. No number in them is ever infinite or NaN."""

import math
from collections.abc import Sequence
from typing import Protocol

from headrace.frontend.http.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    TokenLogprob,
    TopLogprob,
)
from headrace.frontend.outputs import Logprob

FLOOR = -9999.0  # stands for minus infinity, which JSON does not have

Scores = dict[int, Logprob]  # of the tokens at one position


class TokenTexts(Protocol):
    """What is needed of the tokenizer."""

    def token_bytes(self, token_id: int) -> bytes: ...


class LogprobFormat:
    """Writes tokens as text, or as `token_id:<n>` where the client asked for that."""

    def __init__(self, tokenizer: TokenTexts, as_token_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids

    def completion(
        self,
        token_ids: Sequence[int],
        positions: Sequence[Scores | None],
        num_top: int,
        text_offset: int = 0,
    ) -> CompletionLogprobs:
        """The completions form; offsets count characters, beginning at `text_offset`.

        A position without scores (the first of a prompt) is null.
        """
        result = CompletionLogprobs([], [], [], [])
        for token_id, scores in zip(token_ids, positions, strict=True):
            text = self._text(token_id, scores[token_id] if scores else None)
            result.text_offset.append(text_offset)
            text_offset += len(text)
            result.tokens.append(text)
            result.token_logprobs.append(finite(scores[token_id].logprob) if scores else None)
            top: dict[str, float] = {}
            for other_id, score in (scores or {}).items():
                if other_id == token_id or _is_within(score.rank, num_top):
                    other = self._text(other_id, score)  # two partial characters may look the same
                    top[other] = max(top.get(other, FLOOR), finite(score.logprob))
            result.top_logprobs.append(top if scores else None)
        return result

    def chat(
        self, token_ids: Sequence[int], positions: Sequence[Scores], num_top: int
    ) -> ChatLogprobs:
        """The chat form: `num_top` rivals at most, by rank."""
        content = []
        for token_id, scores in zip(token_ids, positions, strict=True):
            score = scores[token_id]
            ranked = sorted(
                (rival for rival in scores.items() if _is_within(rival[1].rank, num_top)),
                key=lambda rival: rival[1].rank or 0,
            )
            content.append(
                TokenLogprob(
                    self._text(token_id, score),
                    finite(score.logprob),
                    list(self._tokenizer.token_bytes(token_id)),
                    [self._top(rival_id, rival) for rival_id, rival in ranked[:num_top]],
                )
            )
        return ChatLogprobs(content)

    def prompt(
        self, token_ids: Sequence[int], positions: Sequence[Scores | None], num_top: int
    ) -> list[dict[str, PromptLogprob] | None]:
        """The form of `prompt_logprobs`: one object of id to score per token, null at the first."""
        return [
            self._prompt_position(token_id, scores, num_top) if scores else None
            for token_id, scores in zip(token_ids, positions, strict=True)
        ]

    def _prompt_position(
        self, token_id: int, scores: Scores, num_top: int
    ) -> dict[str, PromptLogprob]:
        return {
            str(other_id): PromptLogprob(
                finite(score.logprob), score.rank, self._text(other_id, score)
            )
            for other_id, score in scores.items()
            if other_id == token_id or _is_within(score.rank, num_top)
        }

    def _top(self, token_id: int, score: Logprob) -> TopLogprob:
        text = self._text(token_id, score)
        return TopLogprob(text, finite(score.logprob), list(self._tokenizer.token_bytes(token_id)))

    def _text(self, token_id: int, score: Logprob | None) -> str:
        if self._as_token_ids:
            return f"token_id:{token_id}"
        if score is not None and score.decoded_token is not None:
            return score.decoded_token
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def finite(value: float) -> float:
    """`value`, or the floor if it is below it or not a number."""
    return max(value, FLOOR) if math.isfinite(value) else FLOOR


def _is_within(rank: int | None, num_top: int) -> bool:
    return rank is None or rank <= num_top
