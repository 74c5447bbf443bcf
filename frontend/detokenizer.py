"""Token ids to text, one token at a time. Torch-free.

The text of a token list is the bytes of its tokens, joined, decoded as UTF-8 with U+FFFD for what
is invalid (as Python's `errors="replace"` does); `Tokenizer.decode` gives it in one go.
`IncrementalDetokenizer` gives the same text in pieces: what it has returned is never taken back, so
bytes that may still become a character are held until that is decided.
"""

import codecs
from typing import Protocol


class TokenTable(Protocol):
    """What decoding needs of a tokenizer."""

    @property
    def strips_leading_space(self) -> bool:
        """Whether one space at the start of a text belongs to the encoding and not to the text."""

    def token_bytes(self, token_id: int, /) -> bytes:
        """The bytes that a token adds to the text; b"" for an id outside of the vocabulary."""

    def is_special(self, token_id: int, /) -> bool:
        """Whether `skip_special_tokens` leaves the token out."""


class IncrementalDetokenizer:
    """Text of one choice, as its tokens arrive. The cost of a token is that of its own bytes."""

    def __init__(self, tokenizer: TokenTable, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strips_space = tokenizer.strips_leading_space

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before: often a word, sometimes nothing."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        return self._strip(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        """The rest, at the end: at most one U+FFFD, for a character that was never completed."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if self._strips_space and text:
            self._strips_space = False
            return text.removeprefix(" ")
        return text
