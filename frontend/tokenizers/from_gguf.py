"""Build a `tokenizer.json` from the metadata of a GGUF file.

GGUF keeps a tokenizer as parallel arrays (token texts, scores, types), a list of merges, and the
*name* of a pre-tokenizer whose regular expression the reader has to know. Two kinds are read:
`gpt2` (byte-level BPE with merges) and `llama` (SentencePiece BPE, ordered by score, with byte
fallback).
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from headrace.configs.errors import ModelFileError
from headrace.frontend.tokenizers.post_processor import bos_eos_processor
from headrace.frontend.tokenizers.token_bytes import SPACE_MARK

BUILDER_VERSION = 1  # raise it whenever the same metadata gives another tokenizer.json

# Values of tokenizer.ggml.pre
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_QWEN2_NAMES = ("qwen2", "deepseek-r1-qwen")
_GPT2_NAMES = ("gpt-2", "gpt2", "default")

# The published pre-tokenizer of Llama 3 and Qwen 2 (tokenizer.json on the hub); they differ in how
# many digits stay together.
_WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_DIGITS = r"\p{N}{1,3}"
_QWEN2_DIGITS = r"\p{N}"

# Any token carries its id in a file; more than this cannot be a vocabulary.
_MAX_TOKENS = 4_000_000


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`, with SentencePiece's numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_SPECIAL_TYPES = (TokenType.UNKNOWN, TokenType.CONTROL)


def build_tokenizer_json(metadata: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The content of a tokenizer.json for the tokenizer in GGUF `metadata`.

    Raises ModelFileError, naming `source` (the file), for a kind that is not supported or arrays
    that do not fit together.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        raise ModelFileError(
            f"{source}: the file has no tokenizer (no key tokenizer.ggml.model); use a conversion "
            "that includes it, or name a directory with tokenizer.json as the tokenizer"
        )
    if model == "gpt2":
        return _byte_level_bpe(metadata, source)
    if model == "llama":
        return _sentencepiece_bpe(metadata, source)
    raise ModelFileError(
        f"{source}: tokenizer.ggml.model {model!r} is not supported; supported: 'gpt2' (byte-level "
        "BPE), 'llama' (SentencePiece BPE)"
    )


def _byte_level_bpe(metadata: Mapping[str, Any], source: str) -> dict[str, Any]:
    tokens, types = _tokens_and_types(metadata, source)
    pre = metadata.get("tokenizer.ggml.pre", "default")
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ModelFileError(
            f"{source}: tokenizer.ggml.merges is missing; a byte-level tokenizer needs its merges"
        )
    normalizer, pre_tokenizer, ignore_merges = _pre_tokenizer(pre, source)
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", pre in _LLAMA3_NAMES)
    return _assemble(
        tokens,
        types,
        normalizer=normalizer,
        pre_tokenizer=pre_tokenizer,
        decoder=_byte_level(use_regex=True),
        post_processor=_post_processor(metadata, tokens, bool(add_bos), source),
        model={
            "merges": merges,
            "ignore_merges": ignore_merges,
            "byte_fallback": False,
            "fuse_unk": False,
        },
    )


def _pre_tokenizer(pre: str, source: str) -> tuple[dict[str, Any] | None, dict[str, Any], bool]:
    """Normalizer, pre-tokenizer and `ignore_merges` of the family named `pre`.

    `ignore_merges`: a word in the vocabulary skips the merges.
    """
    gpt2 = _byte_level(use_regex=True)
    if pre in _GPT2_NAMES:
        return None, gpt2, False
    if pre == "smollm":
        return None, _sequence({"type": "Digits", "individual_digits": True}, gpt2), False
    if pre in _LLAMA3_NAMES:
        return None, _split_words(_LLAMA3_DIGITS), True
    if pre in _QWEN2_NAMES:
        return {"type": "NFC"}, _split_words(_QWEN2_DIGITS), False
    known = ", ".join(("smollm", *_LLAMA3_NAMES, *_QWEN2_NAMES, *_GPT2_NAMES))
    raise ModelFileError(
        f"{source}: the pre-tokenizer {pre!r} (tokenizer.ggml.pre) is not supported; supported: "
        f"{known}. A directory with the model's tokenizer.json can be named as the tokenizer"
    )


def _split_words(digits: str) -> dict[str, Any]:
    pattern = _WORD_PATTERN.replace("DIGITS", digits)
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return _sequence(split, _byte_level(use_regex=False))


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    """Bytes to characters (as a decoder: back); `use_regex` splits at GPT-2's pattern first."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


def _sentencepiece_bpe(metadata: Mapping[str, Any], source: str) -> dict[str, Any]:
    tokens, types = _tokens_and_types(metadata, source)
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        found = "missing" if scores is None else f"{len(scores)} long"
        raise ModelFileError(
            f"{source}: tokenizer.ggml.scores is {found}, expected one for each of {len(tokens)} "
            "tokens"
        )
    adds_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    to_mark = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    prefix = {"type": "Prepend", "prepend": SPACE_MARK}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if adds_space:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", True)
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    return _assemble(
        tokens,
        types,
        normalizer={"type": "Sequence", "normalizers": [prefix, to_mark]}
        if adds_space
        else to_mark,
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
        post_processor=_post_processor(metadata, tokens, bool(add_bos), source),
        model={
            "merges": merges_from_scores(tokens, types, [float(score) for score in scores]),
            "ignore_merges": False,
            "byte_fallback": TokenType.BYTE in types,
            "fuse_unk": True,
            "unk_token": _token_at(tokens, unknown_id, "unknown", source),
        },
    )


def merges_from_scores(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[str] | list[list[str]]:
    """The merges that make rank-ordered BPE pick what SentencePiece picks.

    That is the best-scored piece, leftmost first.

    Every way to split a normal token into two others is a merge, ranked by the score of the whole.
    Equal scores keep the order of ids; splits of one token are ranked by the longer left half,
    since merging from the left leaves the short rest on the right.
    """
    normal = {
        token
        for token, kind in zip(tokens, types, strict=True)
        if kind in (TokenType.NORMAL, TokenType.UNUSED)
    }
    order = sorted(
        (index for index, token in enumerate(tokens) if len(token) > 1 and token in normal),
        key=lambda index: -scores[index],
    )
    pairs = [
        [left, right]
        for token in map(tokens.__getitem__, order)
        for cut in range(len(token) - 1, 0, -1)
        if (left := token[:cut]) in normal and (right := token[cut:]) in normal
    ]
    if any(" " in left or " " in right for left, right in pairs):
        return pairs
    # The older way to write the same list; a file of it loads in two thirds of the time.
    return [f"{left} {right}" for left, right in pairs]


def _tokens_and_types(metadata: Mapping[str, Any], source: str) -> tuple[list[str], list[int]]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not 0 < len(tokens) <= _MAX_TOKENS:
        raise ModelFileError(
            f"{source}: tokenizer.ggml.tokens is missing, empty or not a list of texts"
        )
    raw_types = metadata.get("tokenizer.ggml.token_type")
    types = (
        [int(kind) for kind in raw_types]
        if raw_types is not None
        else [int(TokenType.NORMAL)] * len(tokens)
    )
    if len(types) != len(tokens):
        raise ModelFileError(
            f"{source}: {len(tokens)} tokens but {len(types)} token types; the file is damaged"
        )
    if len(set(tokens)) != len(tokens):
        (twice, _), *_ = Counter(tokens).most_common(1)
        raise ModelFileError(
            f"{source}: the vocabulary holds {twice!r} more than once; the file is damaged"
        )
    return tokens, types


def _assemble(
    tokens: list[str],
    types: list[int],
    *,
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any] | None,
    decoder: dict[str, Any],
    post_processor: dict[str, Any],
    model: dict[str, Any],
) -> dict[str, Any]:
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind in _SPECIAL_TYPES,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (*_SPECIAL_TYPES, TokenType.USER_DEFINED) and token
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor,
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            **model,
            "vocab": {token: index for index, token in enumerate(tokens)},
        },
    }


def _post_processor(
    metadata: Mapping[str, Any], tokens: list[str], add_bos: bool, source: str
) -> dict[str, Any]:
    """A template that puts BOS before and EOS behind the text, as far as the file asks for them."""
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))

    def named(key: str, name: str) -> tuple[str, int] | None:
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        return None if token_id is None else (_token_at(tokens, token_id, name, source), token_id)

    processor = bos_eos_processor(
        named("bos_token_id", "BOS") if add_bos else None,
        named("eos_token_id", "EOS") if add_eos else None,
    )
    state: dict[str, Any] = json.loads(processor.__getstate__())
    return state


def _token_at(tokens: list[str], token_id: Any, name: str, source: str) -> str:
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise ModelFileError(
            f"{source}: the {name} token id {token_id} is outside of the vocabulary of "
            f"{len(tokens)} tokens; the file is damaged"
        )
    return tokens[token_id]
