"""The exact bytes that each token id contributes to the decoded text.

Two alphabets cover the decoders in use: the byte-level one of GPT-2 (each byte is one printable
character) and the SentencePiece one ("▁" is a space, "<0x0A>" is the byte 10). Added tokens stand
for themselves in both.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import tokenizers

from headrace.configs.errors import ModelFileError

SPACE_MARK = "▁"  # U+2581, SentencePiece's visible space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class DecoderKind:
    """How tokens become text.

    `strips_leading_space`: one leading space of the whole text is dropped.
    """

    alphabet: Literal["byte_level", "sentencepiece"]
    has_byte_fallback: bool = False
    strips_leading_space: bool = False


def read_decoder(backend: tokenizers.Tokenizer, source: str) -> DecoderKind:
    """Classify the decoder of `backend`.

    Raises ModelFileError, naming `source`, for one that cannot be streamed exactly.
    """
    parts = _decoder_parts(backend)
    types = [part["type"] for part in parts]
    if types == ["ByteLevel"]:
        return DecoderKind("byte_level")
    if types and set(types) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        replaces = [part for part in parts if part["type"] == "Replace"]
        strips = [part for part in parts if part["type"] == "Strip"]
        metaspaces = [part for part in parts if part["type"] == "Metaspace"]
        known = (
            all(
                part["pattern"] == {"String": SPACE_MARK} and part["content"] == " "
                for part in replaces
            )
            and all(_is_one_leading_space(part) for part in strips)
            and all(part.get("replacement") == SPACE_MARK for part in metaspaces)
            and len(replaces) + len(metaspaces) == 1
        )
        if known:
            strips_space = bool(strips) or any(_metaspace_prepends(part) for part in metaspaces)
            return DecoderKind("sentencepiece", "ByteFallback" in types, strips_space)
    raise ModelFileError(
        f"{source}: the tokenizer's decoder ({' + '.join(types) or 'none'}) is not supported; "
        "headrace decodes ByteLevel, Metaspace, and Replace + ByteFallback + Fuse (+ Strip of one "
        "leading space)"
    )


def _decoder_parts(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _is_one_leading_space(strip: dict[str, Any]) -> bool:
    return strip["content"] == " " and strip["start"] == 1 and strip["stop"] == 0


def _metaspace_prepends(metaspace: dict[str, Any]) -> bool:
    return metaspace.get("prepend_scheme", "always") != "never" and metaspace.get(
        "add_prefix_space", True
    )


class TokenBytes:
    """Lazily filled table: token id -> bytes.

    Reads are safe from several threads: entries never change.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, kind: DecoderKind, added_tokens: Mapping[int, str]
    ) -> None:
        self._backend = backend
        self._kind = kind
        self._table = {token_id: text.encode() for token_id, text in added_tokens.items()}
        self._byte_of_char = _byte_level_alphabet() if kind.alphabet == "byte_level" else {}

    def __call__(self, token_id: int) -> bytes:
        """Bytes of `token_id`; b"" for an id that the vocabulary lacks."""
        known = self._table.get(token_id)
        if known is None:
            known = self._table[token_id] = self._compute(token_id)
        return known

    def _compute(self, token_id: int) -> bytes:
        if not 0 <= token_id < 2**32:
            return b""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._kind.alphabet == "byte_level":
            try:
                return bytes(self._byte_of_char[char] for char in token)
            except KeyError:  # not spelled in the byte alphabet: the token stands for itself
                return token.encode()
        if self._kind.has_byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace(SPACE_MARK, " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's map from character to byte.

    Printable Latin-1 is itself, the other 68 bytes follow U+0100 in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet
