"""Log-probabilities in the two forms of the API. No number in them is ever infinite or NaN."""

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

from headrace.frontend.http.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    TokenLogprob,
    TopLogprob,
)
from headrace.frontend.outputs import CompletionOutput, Logprob

FLOOR = -9999.0  # stands for minus infinity, which JSON does not have


class TokenTexts(Protocol):
    """What is needed of the tokenizer."""

    def token_bytes(self, token_id: int) -> bytes: ...


class LogprobFormat:
    """Writes tokens as text, or as `token_id:<n>` where the client asked for that."""

    def __init__(self, tokenizer: TokenTexts, as_token_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids

    def completion(self, output: CompletionOutput, text_offset: int) -> CompletionLogprobs | None:
        """The completions form; offsets count characters, beginning at `text_offset`."""
        if output.logprobs is None:
            return None
        offsets, values, tokens, tops = [], [], [], []
        for token_id, entries in _positions(output):
            sampled = self._text(token_id, entries[token_id])
            offsets.append(text_offset)
            text_offset += len(sampled)
            tokens.append(sampled)
            values.append(finite(entries[token_id].logprob))
            top: dict[str, float] = {}
            for other_id, entry in entries.items():
                text = self._text(other_id, entry)  # two partial characters may look the same
                top[text] = max(top.get(text, FLOOR), finite(entry.logprob))
            tops.append(top)
        return CompletionLogprobs(offsets, values, tokens, tops)

    def chat(self, output: CompletionOutput, num_top: int) -> ChatLogprobs | None:
        """The chat form: `num_top` rivals at most, by rank."""
        if output.logprobs is None:
            return None
        content = []
        for token_id, entries in _positions(output):
            entry = entries[token_id]
            ranked = sorted(
                (rival for rival in entries.items() if _is_within(rival[1].rank, num_top)),
                key=lambda rival: rival[1].rank or 0,
            )
            content.append(
                TokenLogprob(
                    self._text(token_id, entry),
                    finite(entry.logprob),
                    list(self._tokenizer.token_bytes(token_id)),
                    [self._top(rival_id, rival) for rival_id, rival in ranked[:num_top]],
                )
            )
        return ChatLogprobs(content)

    def _top(self, token_id: int, entry: Logprob) -> TopLogprob:
        text = self._text(token_id, entry)
        return TopLogprob(text, finite(entry.logprob), list(self._tokenizer.token_bytes(token_id)))

    def _text(self, token_id: int, entry: Logprob) -> str:
        if self._as_token_ids:
            return f"token_id:{token_id}"
        if entry.decoded_token is not None:
            return entry.decoded_token
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def finite(value: float) -> float:
    """`value`, or the floor if it is below it or not a number."""
    return max(value, FLOOR) if math.isfinite(value) else FLOOR


def _positions(output: CompletionOutput) -> Iterator[tuple[int, dict[int, Logprob]]]:
    token_ids: Sequence[int] = output.token_ids
    return zip(token_ids, output.logprobs or [], strict=False)


def _is_within(rank: int | None, num_top: int) -> bool:
    return rank is None or rank <= num_top
