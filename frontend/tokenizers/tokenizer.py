"""The front end's tokenizer: text to ids, ids to bytes and text, special tokens, template."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import tokenizers

from headrace.configs.errors import InvalidRequestError, ModelFileError
from headrace.frontend.tokenizers.token_bytes import TokenBytes, read_decoder


@dataclass(frozen=True)
class TokenizerFacts:
    """What a model's files say beside the vocabulary itself.

    `source` names the file in error messages.
    """

    source: str
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    chat_template: str | None = None
    pad_token_id: int | None = None


class Tokenizer:
    """A `tokenizers.Tokenizer` with the model's facts beside it.

    All methods may be called from several threads.

    Ids outside of the vocabulary (models often have more logits than tokens) are legal everywhere:
    they decode to nothing and are never special.
    """

    def __init__(self, backend: tokenizers.Tokenizer, facts: TokenizerFacts) -> None:
        """Takes over `backend`: truncation and padding of its file are switched off."""
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        kind = read_decoder(backend, facts.source)
        self._backend = backend
        self._facts = facts
        self._token_bytes = TokenBytes(
            backend, kind, {i: token.content for i, token in added.items()}
        )
        self._without_specials: tokenizers.Tokenizer | None = None
        self._lock = threading.Lock()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_tokens: dict[str, int] = {
            added[i].content: i for i in sorted(self._special_ids)
        }
        self.strips_leading_space: bool = kind.strips_leading_space
        self.bos_token_id: int | None = facts.bos_token_id
        self.eos_token_id: int | None = facts.eos_token_id
        self.pad_token_id: int | None = facts.pad_token_id
        self.bos_token: str | None = self._name_of(facts.bos_token_id)
        self.eos_token: str | None = self._name_of(facts.eos_token_id)
        self.chat_template: str | None = facts.chat_template
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.add_bos_token: bool = facts.bos_token_id is not None and backend.encode("").ids[
            :1
        ] == [facts.bos_token_id]

    def encode(
        self, text: str, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of `text`.

        `add_special_tokens` adds what the model's files ask for (usually a BOS). With
        `parse_special=False` the spelling of a special token inside `text` is ordinary text and
        never gives its id (rule S12). Raises InvalidRequestError for text that is not valid Unicode
        (a lone surrogate).
        """
        backend = self._backend if parse_special else self._backend_without_specials()
        try:
            # As a batch of one: unlike `encode`, that lets other threads run meanwhile.
            batch = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = batch[0].ids
        except TypeError:  # all that the library says about a str that is not Unicode
            if isinstance(text, str):
                _refuse_surrogates(text)
            raise
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`: the joined `token_bytes`, with U+FFFD for bytes that are not UTF-8."""
        special = self._special_ids if skip_special_tokens else frozenset()
        token_bytes = self._token_bytes
        text = b"".join([token_bytes(i) for i in ids if i not in special]).decode(
            "utf-8", "replace"
        )
        return text.removeprefix(" ") if self.strips_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes that the token adds to the text, possibly part of a character.

        b"" for an id outside the vocabulary.
        """
        return self._token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves the token out."""
        return token_id in self._special_ids

    def id_to_token(self, token_id: int) -> str | None:
        """The token's spelling in the vocabulary (not its text), or None."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a token spelled as in the vocabulary, or None."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    @cached_property
    def max_token_id(self) -> int:
        """The highest id in the vocabulary (ids may have gaps)."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @cached_property
    def max_chars_per_token(self) -> int:
        """Length of the longest token, so that a text of n tokens is at most n times as long."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    @cached_property
    def num_added_tokens(self) -> tuple[int, int]:
        """How many tokens `add_special_tokens` puts before a text, and how many behind it."""
        mask: list[int] = self._backend.encode("a").special_tokens_mask
        before = mask.index(0) if 0 in mask else len(mask)
        return before, sum(mask) - before

    def _name_of(self, token_id: int | None) -> str | None:
        if token_id is None:
            return None
        name = self.id_to_token(token_id) if isinstance(token_id, int) else None
        if name is None:
            raise ModelFileError(
                f"{self._facts.source}: BOS or EOS id {token_id!r} is not in the vocabulary of "
                f"{self._backend.get_vocab_size()} tokens; the file is damaged or was converted "
                "wrongly"
            )
        return name

    def _backend_without_specials(self) -> tokenizers.Tokenizer:
        with self._lock:
            if self._without_specials is None:
                self._without_specials = _copy_without_specials(self._backend)
            return self._without_specials


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the text is not valid Unicode: lone surrogate U+{ord(text[error.start]):04X} at "
            f"character {error.start}"
        ) from None


def _copy_without_specials(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tokenizer with the same vocabulary and merges that does not look for special tokens.

    `encode_special_tokens` is a switch on the whole object, so flipping it per call would race.
    """
    copy = tokenizers.Tokenizer(backend.model)
    copy.normalizer = backend.normalizer
    copy.pre_tokenizer = backend.pre_tokenizer
    copy.post_processor = backend.post_processor
    copy.decoder = backend.decoder
    added = backend.get_added_tokens_decoder()
    copy.add_tokens([added[i] for i in sorted(added)])
    if copy.get_added_tokens_decoder() != added:  # ids with gaps cannot be rebuilt one by one
        copy = tokenizers.Tokenizer.from_str(backend.to_str())
    copy.encode_special_tokens = True
    return copy
