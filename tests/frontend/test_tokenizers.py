"""Tokenizers from GGUF metadata against plain-Python references."""

import json
import struct
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import regex
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from headrace.configs.errors import InvalidRequestError, ModelFileError
from headrace.frontend.tokenizers import Tokenizer, load_tokenizer
from headrace.frontend.tokenizers.from_gguf import build_tokenizer_json, merges_from_scores

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "The capital of France is Paris.",
    "  two  three   four    spaces\tand\ttabs \t mixed \n",
    "line\nline\r\nline\n\n\n\nend\n",
    "it's we're I'll they'd you've I'm DON'T can't 'tis 'S",
    "0 1 12 123 1234 3.14159 1,000,000 ½ ² ٣ 四 Ⅷ v2.0.1",
    "def f(x: int) -> int:\n    return x**2 + 1  # squared\n\n\nclass A:\n\tpass\n",
    "for (int i=0;i<n;++i){a[i]+=b[i]*0x1F;}",
    "naïve café Ünïcödé Straße ΑΒΓδ Привет мир 你好,世界 こんにちは 안녕하세요 مرحبا שלום नमस्ते",
    "🤯👩‍👩‍👧‍👦🇫🇷 ✨ a\u0301 e\u0308 \u200b\u2028\u00a0\u3000\ufeff",
    "<|im_start|>user\nhi<|im_end|>\n<bos><eos><start_of_turn>x<end_of_turn><0x0A> [multimodal]",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa bbbbbbbbbbbbbbbbbbb ababababababababab",
    "======== -------- ........ !!!!!!!! ///// \\\\\\ ____ ((((()))))",
    "\x00\x01\x1c\x1d\x7f\x85",
    "https://example.org/a?b=c&d=%20#frag <html><table></table></html>",
    "▁already▁marked Ġĉ",
]

# Assigned characters only: libraries differ in the newest Unicode version they know.
any_text = st.text(st.characters(exclude_categories=("Cs", "Cn", "Co")), max_size=60)
# Few characters, so that many merges overlap.
dense_text = st.text(st.sampled_from("aabe  th\n\n\t019.,-'s"), max_size=60)
some_text = st.one_of(
    any_text, dense_text, st.lists(st.sampled_from(TEXTS), max_size=3).map("".join)
)


# References: nothing of headrace, nothing of `tokenizers`.


def reference_byte_alphabet() -> dict[int, str]:
    shown = [b for b in range(256) if chr(b).isprintable() and not chr(b).isspace() and b != 0xAD]
    names = {b: chr(b) for b in shown}
    for b in range(256):
        if b not in names:
            names[b] = chr(256 + len(names) - len(shown))
    return names


def reference_words(pre: str, text: str) -> list[str]:
    space = r"\p{White_Space}"  # the \s of `regex` has U+001C to U+001F too
    gpt2 = (
        rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^{space}\p{{L}}\p{{N}}]+"
        rf"|{space}+(?![^{space}])|{space}+"
    )
    if pre == "gpt-2":
        return regex.findall(gpt2, text)
    if pre == "smollm":
        pieces = [piece for piece in regex.split(r"(\p{N})", text) if piece]
        return [word for piece in pieces for word in regex.findall(gpt2, piece)]
    digits = {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}[pre]
    return regex.findall(
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        rf"| ?[^{space}\p{{L}}\p{{N}}]+[\r\n]*|{space}*[\r\n]+|{space}+(?![^{space}])|{space}+",
        text,
    )


class ReferenceSplitter:
    """Cuts a text at the leftmost, then longest, of `tokens` each time."""

    def __init__(self, tokens: list[str]) -> None:
        self.by_first: dict[str, list[str]] = {}
        for token in sorted(tokens, key=len, reverse=True):
            self.by_first.setdefault(token[0], []).append(token)

    def split(self, text: str) -> list[tuple[bool, str]]:
        """Pieces as (is one of the tokens, piece)."""
        pieces: list[tuple[bool, str]] = []
        position = 0
        while position < len(text):
            candidates = self.by_first.get(text[position], [])
            match = next((t for t in candidates if text.startswith(t, position)), None)
            if match is None and pieces and not pieces[-1][0]:
                pieces[-1] = (False, pieces[-1][1] + text[position])
            else:
                pieces.append((match is not None, match or text[position]))
            position += len(match or text[position])
        return pieces


def merge_by(symbols: list[str], rank: Callable[[str, str], float | None]) -> list[str]:
    """Merge the adjacent pair of lowest rank, leftmost first, until none has a rank."""
    symbols = list(symbols)
    while True:
        ranks = [rank(a, b) for a, b in pairwise(symbols)]
        best = min((r for r in ranks if r is not None), default=None)
        if best is None:
            return symbols
        at = ranks.index(best)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


class ReferenceByteLevel:
    def __init__(self, tokens: list[str], merges: list[str], added: list[str], pre: str) -> None:
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
        self.splitter, self.pre = ReferenceSplitter(added), pre
        self.alphabet = reference_byte_alphabet()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for is_token, piece in self.splitter.split(text):
            if is_token:
                ids.append(self.ids[piece])
                continue
            for word in reference_words(self.pre, piece):
                symbols = [self.alphabet[b] for b in word.encode()]
                if self.pre == "llama-bpe" and "".join(symbols) in self.ids:
                    ids.append(self.ids["".join(symbols)])
                    continue
                merged = merge_by(symbols, lambda a, b: self.ranks.get((a, b)))
                ids += [self.ids[symbol] for symbol in merged if symbol in self.ids]
        return ids


class ReferenceSentencePiece:
    def __init__(
        self, tokens: list[str], scores: list[float], types: list[int], *, adds_space: bool
    ) -> None:
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.costs = {t: -s for t, s, k in zip(tokens, scores, types, strict=True) if k == NORMAL}
        added = [t for t, k in zip(tokens, types, strict=True) if k in (2, 3, 4)]
        self.splitter = ReferenceSplitter(added)
        self.adds_space = adds_space

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for is_token, piece in self.splitter.split(text):
            if is_token:
                ids.append(self.ids[piece])
                continue
            marked = ("▁" if self.adds_space else "") + piece.replace(" ", "▁")
            for symbol in merge_by(list(marked), lambda a, b: self.costs.get(a + b)):
                if symbol in self.ids:
                    ids.append(self.ids[symbol])
                else:
                    ids += [self.ids[f"<0x{b:02X}>"] for b in symbol.encode()]
        return ids


# Small GGUF files.


def write_gguf(path: Path, fields: dict[str, object]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in fields.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value)
    writer.add_tensor("x", np.zeros((1, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_fields(pre: str = "smollm") -> dict[str, object]:
    """A byte-level vocabulary trained on `TEXTS`, with two control tokens in front."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(TEXTS, trainer)
    state = json.loads(backend.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages }}",
    }


def sentencepiece_fields(*, adds_space: bool) -> dict[str, object]:
    pieces = ["▁t", "he", "▁the", "aa", "aaa", "aaaa", "ab", "aba", "bab", "abab", "▁▁", "th", "01"]
    pieces += ["e.", "es", "▁a", "ba", "bb", "▁b", "▁ab", "is", "▁is", "France", "an", "ran"]
    chars = [*"▁abehstFrnci.,-'01", "é", "你"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "\n\n", "<table>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, USER_DEFINED, USER_DEFINED]
    scores = [0.0] * len(tokens)
    tokens += pieces + chars
    types += [NORMAL] * len(pieces + chars)
    scores += [-float(i) for i in range(len(pieces + chars))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": adds_space,
    }


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return load_tokenizer(write_gguf(path, byte_level_fields()), None)


@pytest.fixture(scope="module", params=[False, True], ids=["no-prefix", "prefix"])
def sentencepiece(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, ReferenceSentencePiece]:
    fields = sentencepiece_fields(adds_space=request.param)
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return load_tokenizer(write_gguf(path, fields), None), reference_sentencepiece(fields)


def reference_sentencepiece(fields: Mapping[str, Any]) -> ReferenceSentencePiece:
    tokens, scores, types = (
        fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type")
    )
    adds_space = bool(fields["tokenizer.ggml.add_space_prefix"])
    return ReferenceSentencePiece(tokens, scores, types, adds_space=adds_space)


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
def test_byte_level_ids_equal_the_reference(pre: str, tmp_path: Path) -> None:
    fields = byte_level_fields(pre)
    tokenizer = load_tokenizer(write_gguf(tmp_path / "t.gguf", fields), None)
    tokens = fields["tokenizer.ggml.tokens"]
    merges = fields["tokenizer.ggml.merges"]
    assert isinstance(tokens, list) and isinstance(merges, list)
    reference = ReferenceByteLevel(tokens, merges, tokens[:3], pre)

    @settings(max_examples=100, deadline=None)
    @given(some_text)
    def check(text: str) -> None:
        if pre == "qwen2":
            import unicodedata

            text = unicodedata.normalize("NFC", text)
        assert tokenizer.encode(text) == reference.encode(text)

    for text in TEXTS:
        check.hypothesis.inner_test(text)  # type: ignore[attr-defined]
    check()


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=some_text)
@example(text="aaaaaaa abababab the  France\n\n\n<table>é你🤯")
def test_sentencepiece_ids_equal_the_reference(
    text: str, sentencepiece: tuple[Tokenizer, ReferenceSentencePiece]
) -> None:
    tokenizer, reference = sentencepiece
    assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text)
    assert tokenizer.encode(text) == [1, *reference.encode(text)]


def test_merges_of_repeated_characters_go_from_the_left() -> None:
    tokens = ["a", "aa", "aaa", "aaaa", "aaaaaaa"]
    scores = [-9.0, -1.0, -2.0, -3.0, -4.0]
    merges = merges_from_scores(tokens, [NORMAL] * 5, scores)
    assert merges == ["a a", "aa a", "a aa", "aaa a", "aa aa", "a aaa", "aaaa aaa", "aaa aaaa"]


def check_bytes(tokenizer: Tokenizer, text: str, *, lossless: bool = True) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    joined = b"".join(tokenizer.token_bytes(i) for i in ids)
    if tokenizer.strips_leading_space:
        joined = joined.removeprefix(b" ")
    assert tokenizer.decode(ids, skip_special_tokens=False).encode() == joined
    if lossless:
        assert joined.decode() == text


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=some_text)
def test_bytes_of_the_tokens_join_to_the_text(text: str, byte_level: Tokenizer) -> None:
    check_bytes(byte_level, text)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=some_text.filter(lambda text: "▁" not in text))
def test_bytes_of_sentencepiece_tokens_join_to_the_text(
    text: str, sentencepiece: tuple[Tokenizer, ReferenceSentencePiece]
) -> None:
    tokenizer, _ = sentencepiece
    # With the dummy prefix, a piece behind an added token gets a space too, as in the original.
    lossless = not (tokenizer.strips_leading_space and ("\n\n" in text or "<" in text))
    check_bytes(tokenizer, text, lossless=lossless)


def test_special_spellings_are_text_when_asked(byte_level: Tokenizer) -> None:
    assert byte_level.special_tokens == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    for spelling, token_id in byte_level.special_tokens.items():
        text = f"a{spelling}b"
        assert token_id in byte_level.encode(text)
        ids = byte_level.encode(text, parse_special=False)
        assert not any(byte_level.is_special(i) for i in ids)
        assert byte_level.decode(ids) == text


def test_special_spellings_of_a_sentencepiece_tokenizer(
    sentencepiece: tuple[Tokenizer, ReferenceSentencePiece],
) -> None:
    tokenizer, _ = sentencepiece
    ids = tokenizer.encode("<s>a</s><table>", parse_special=False)
    assert ids[0] == 1 and not any(tokenizer.is_special(i) for i in ids[1:])
    assert ids[-1] == tokenizer.token_to_id("<table>")  # user-defined, but not special
    assert tokenizer.decode(ids) == "<s>a</s><table>"


def test_facts_of_a_gguf(byte_level: Tokenizer) -> None:
    assert (byte_level.bos_token, byte_level.bos_token_id) == ("<|im_start|>", 1)
    assert (byte_level.eos_token, byte_level.eos_token_id) == ("<|im_end|>", 2)
    assert byte_level.chat_template == "{{ messages }}"
    assert not byte_level.add_bos_token and not byte_level.strips_leading_space
    assert byte_level.max_token_id == byte_level.vocab_size - 1
    assert byte_level.decode([1, *byte_level.encode("hi"), 2]) == "hi"
    assert byte_level.decode([1, 2], skip_special_tokens=False) == "<|im_start|><|im_end|>"


def test_ids_outside_the_vocabulary_are_nothing(byte_level: Tokenizer) -> None:
    for token_id in (byte_level.vocab_size, 10**6, 2**32, 2**70, -1):
        assert byte_level.token_bytes(token_id) == b""
        assert byte_level.id_to_token(token_id) is None
        assert not byte_level.is_special(token_id)
        assert byte_level.decode([token_id]) == ""


def test_partial_characters_become_one_replacement(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("\U0001f9ed")
    assert len(ids) > 1
    assert byte_level.decode(ids[:-1]) == "\ufffd"
    assert b"".join(map(byte_level.token_bytes, ids)) == "\U0001f9ed".encode()


def test_lone_surrogates_are_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match=r"U\+D83E at character 2"):
        byte_level.encode("ab\ud83e")
    with pytest.raises(TypeError):
        byte_level.encode(3)  # type: ignore[arg-type]


def test_threads_encode_at_once(byte_level: Tokenizer) -> None:
    expected = [byte_level.encode(text) for text in TEXTS]
    start = threading.Barrier(8)

    def work(offset: int) -> bool:
        start.wait()
        order = range(offset, offset + 200)
        ids = [byte_level.encode(TEXTS[i % len(TEXTS)], parse_special=i % 3 > 0) for i in order]
        ids = [byte_level.encode(TEXTS[i % len(TEXTS)]) for i in order]
        return ids == [expected[i % len(TEXTS)] for i in order]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


# Cache.


def test_cache_gives_the_same_tokenizer(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", byte_level_fields())
    built = load_tokenizer(path, tmp_path / "cache")
    (cached,) = (tmp_path / "cache/tokenizers").iterdir()
    stamp = cached.stat().st_mtime_ns
    again = load_tokenizer(path, tmp_path / "cache")
    assert cached.stat().st_mtime_ns == stamp
    for text in TEXTS:
        assert again.encode(text) == built.encode(text)
    assert again.special_tokens == built.special_tokens
    fields = byte_level_fields() | {"tokenizer.ggml.eos_token_id": 0}
    load_tokenizer(write_gguf(path, fields), tmp_path / "cache")
    assert len(list((tmp_path / "cache/tokenizers").iterdir())) == 2


def test_damaged_cache_is_built_again(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", byte_level_fields())
    expected = load_tokenizer(path, tmp_path / "cache").encode(TEXTS[3])
    (cached,) = (tmp_path / "cache/tokenizers").iterdir()
    good = cached.read_bytes()
    leftover = cached.with_name(f".{cached.name}.0.tmp")
    leftover.write_bytes(b"left by a killed process")
    cached.write_bytes(good[: len(good) // 2])
    assert load_tokenizer(path, tmp_path / "cache").encode(TEXTS[3]) == expected
    assert cached.read_bytes() == good
    assert not leftover.exists()


def test_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", byte_level_fields())
    (tmp_path / "file").write_text("in the way")
    assert load_tokenizer(path, tmp_path / "file").encode("Hello")


# Files that cannot be used.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": None}, "no tokenizer"),
        ({"tokenizer.ggml.model": "bert"}, "'bert' is not supported"),
        ({"tokenizer.ggml.pre": "martian"}, "'martian'.*not supported; supported: smollm"),
        ({"tokenizer.ggml.merges": None}, "merges is missing"),
        ({"tokenizer.ggml.merges": ["q zz"]}, "cannot be built"),
        ({"tokenizer.ggml.tokens": None}, "tokens is missing"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "types; the file is damaged"),
        ({"tokenizer.ggml.token_type": ["x"] * 420}, "has the wrong type"),
        ({"tokenizer.ggml.bos_token_id": "1"}, "id '1' is not in the vocabulary of 420"),
        ({"tokenizer.ggml.bos_token_id": 99_999}, "id 99999 is not in the vocabulary of 420"),
    ],
)
def test_unusable_gguf_tokenizers(change: dict[str, object], message: str, tmp_path: Path) -> None:
    merged = byte_level_fields() | change
    fields = {key: value for key, value in merged.items() if value is not None}
    path = write_gguf(tmp_path / "t.gguf", fields)
    with pytest.raises(ModelFileError, match=message) as caught:
        load_tokenizer(path, tmp_path / "cache")
    assert str(path) in str(caught.value)
    assert not (tmp_path / "cache").exists() or "vocabulary" in message


def test_duplicate_tokens_and_short_scores() -> None:
    fields = sentencepiece_fields(adds_space=False)
    with pytest.raises(ModelFileError, match="scores is 1 long, expected one for each of"):
        build_tokenizer_json(fields | {"tokenizer.ggml.scores": [1.0]}, "x.gguf")
    tokens = fields["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    with pytest.raises(ModelFileError, match="'<s>' more than once"):
        build_tokenizer_json(fields | {"tokenizer.ggml.tokens": [*tokens[:-1], "<s>"]}, "x.gguf")


def test_a_directory_with_one_gguf(tmp_path: Path) -> None:
    write_gguf(tmp_path / "t.gguf", byte_level_fields())
    assert load_tokenizer(tmp_path, None).encode("Hello")


# Real models.


def read_metadata(path: Path) -> dict[str, Any]:
    """Key-value pairs of a GGUF file, read plainly (the `gguf` package takes ten seconds)."""
    data = path.read_bytes()
    position = 24
    formats = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}

    def number(fmt: str) -> Any:
        nonlocal position
        (value,) = struct.unpack_from(f"<{fmt}", data, position)
        position += struct.calcsize(f"<{fmt}")
        return value

    def value(kind: int) -> Any:
        nonlocal position
        if kind == 8:
            length = number("Q")
            position += length
            return data[position - length : position].decode()
        if kind == 9:
            item_kind, count = number("I"), number("Q")
            return [value(item_kind) for _ in range(count)]
        return number(formats[kind])

    (num_keys,) = struct.unpack_from("<Q", data, 16)
    return {value(8): value(number("I")) for _ in range(num_keys)}


@pytest.mark.slow
def test_smollm2_ids_equal_the_reference(smollm2_gguf: Path, tmp_path: Path) -> None:
    metadata = read_metadata(smollm2_gguf)
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    reference = ReferenceByteLevel(tokens, merges, tokens[:17], "smollm")
    # This vocabulary lacks 21 rare bytes (U+0004, U+001D, ...); its own tokenizer drops them too.
    lost = {b for b, name in reference.alphabet.items() if name not in reference.ids}
    load_tokenizer(smollm2_gguf, tmp_path)
    begin = time.perf_counter()
    tokenizer = load_tokenizer(smollm2_gguf, tmp_path)
    assert time.perf_counter() - begin < 1.0  # 0.07 s on an idle machine

    @settings(max_examples=150, deadline=None)
    @given(some_text)
    def check(text: str) -> None:
        assert tokenizer.encode(text) == reference.encode(text)
        check_bytes(tokenizer, text, lossless=lost.isdisjoint(text.encode()))

    for text in TEXTS:
        assert tokenizer.encode(text) == reference.encode(text)
    check()
    assert tokenizer.encode("2024") == [tokenizer.token_to_id(digit) for digit in "2024"]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.chat_template and "im_start" in tokenizer.chat_template


@pytest.mark.slow
def test_gemma3_ids_equal_the_reference(gemma3_gguf: Path, tmp_path: Path) -> None:
    metadata = read_metadata(gemma3_gguf)
    reference = reference_sentencepiece(metadata)
    load_tokenizer(gemma3_gguf, tmp_path)
    begin = time.perf_counter()
    tokenizer = load_tokenizer(gemma3_gguf, tmp_path)
    assert time.perf_counter() - begin < 3.0  # 0.7 s on an idle machine

    @settings(max_examples=150, deadline=None)
    @given(some_text)
    def check(text: str) -> None:
        assert tokenizer.encode(text) == [2, *reference.encode(text)]
        check_bytes(tokenizer, text, lossless="▁" not in text)

    for text in TEXTS:
        assert tokenizer.encode(text) == [2, *reference.encode(text)]
    check()
    assert tokenizer.add_bos_token and tokenizer.chat_template is None
    ids = tokenizer.encode("<end_of_turn>", parse_special=False)
    assert not any(map(tokenizer.is_special, ids[1:]))
