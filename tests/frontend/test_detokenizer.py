"""Incremental detokenizing against Python's own decoder (rule PP31)."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.frontend.detokenizer import IncrementalDetokenizer
from headrace.frontend.tokenizers.tokenizer import Tokenizer, TokenizerFacts


@dataclass
class ByteTable:
    """A tokenizer that is only a table of bytes."""

    table: list[bytes]
    special: set[int] = field(default_factory=set)
    strips_leading_space: bool = False

    def token_bytes(self, token_id: int) -> bytes:
        return self.table[token_id] if token_id < len(self.table) else b""

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special


def stream(detokenizer: IncrementalDetokenizer, token_ids: list[int]) -> list[str]:
    return [*map(detokenizer.push, token_ids), detokenizer.flush()]


# Characters of 1 to 4 bytes in pieces, lone and overlong bytes, surrogates, joiners, a special
# token, an empty one.
PIECES = [
    *(b" ", b"a", b" the", b"\xc3", b"\xa9", "é".encode(), b"\xe2", b"\x80", b"\x8d", b"\xf0"),
    *(b"\x9f", b"\x9f\xa7", b"\xad", "🧭".encode(), b"\xff", b"\xc0\x80", b"\xed\xa0\x80"),
    *(b"\xf4\x90", b"<eos>", b"", b"\x9fx", b"\n"),
]
EOS = PIECES.index(b"<eos>")
ids = st.lists(st.integers(0, len(PIECES)), max_size=30)  # one id is outside of the table


@given(token_ids=ids, skip=st.booleans(), strips=st.booleans())
@example(token_ids=[10, EOS, 9, 10], skip=True, strips=True)
def test_streamed_text_is_the_decoded_text(token_ids: list[int], skip: bool, strips: bool) -> None:
    tokenizer = ByteTable(PIECES, {EOS}, strips)
    deltas = stream(IncrementalDetokenizer(tokenizer, skip), token_ids)
    kept = [i for i in token_ids if not (skip and i == EOS) and i < len(PIECES)]
    expected = b"".join(PIECES[i] for i in kept).decode("utf-8", "replace")
    if strips and expected.startswith(" "):
        expected = expected[1:]
    assert "".join(deltas) == expected


@given(text=st.text(max_size=20), data=st.data())
def test_no_replacement_characters_in_valid_text(text: str, data: st.DataObject) -> None:
    """Valid UTF-8 in any pieces: every character appears as soon as it is complete."""
    encoded = text.encode()
    cuts = data.draw(st.lists(st.integers(0, len(encoded)), max_size=10).map(sorted))
    bounds = [0, *cuts, len(encoded)]
    table = [encoded[a:b] for a, b in itertools.pairwise(bounds)]
    detokenizer = IncrementalDetokenizer(ByteTable(table))
    so_far = ""
    for token_id, end in enumerate(bounds[1:]):
        so_far += detokenizer.push(token_id)
        assert so_far == encoded[:end].decode("utf-8", "ignore")
    assert detokenizer.flush() == ""
    assert so_far == text


def test_a2_partial_characters() -> None:
    table = [b"\xf0", b"\x9f\xa7", b"\xad", b"\xc5", b"\x91", b"\xe2\x80", b"\x8d"]
    tokenizer = ByteTable(table)
    deltas = stream(IncrementalDetokenizer(tokenizer), list(range(7)))
    assert deltas == ["", "", "\U0001f9ed", "", "ő", "", "\u200d", ""]
    cut = ByteTable([b"\xf0", b"\x9f"])
    assert stream(IncrementalDetokenizer(cut), [0, 1]) == ["", "", "\ufffd"]


def test_special_tokens_are_left_out_or_kept() -> None:
    tokenizer = ByteTable([b"hi", b"<|end|>"], {1})
    assert "".join(stream(IncrementalDetokenizer(tokenizer), [0, 1, 0])) == "hihi"
    assert "".join(stream(IncrementalDetokenizer(tokenizer, False), [0, 1, 0])) == "hi<|end|>hi"


def test_the_leading_space() -> None:
    tokenizer = ByteTable([b" ", b" a", b""], strips_leading_space=True)
    assert stream(IncrementalDetokenizer(tokenizer), [2, 1, 1]) == ["", "a", " a", ""]
    assert stream(IncrementalDetokenizer(tokenizer), [0, 0, 1]) == ["", " ", " a", ""]


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """A real tokenizer whose tokens are bytes, two merged pairs and a special token."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("Ã", "©")]
    vocab = [*alphabet, *(a + b for a, b in merges)]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={token: i for i, token in enumerate(vocab)}, merges=merges)
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return Tokenizer(backend, TokenizerFacts("test"))


@given(token_ids=st.lists(st.integers(0, 260), max_size=40), skip=st.booleans())
def test_with_the_real_tokenizer(byte_level: Tokenizer, token_ids: list[int], skip: bool) -> None:
    text = "".join(stream(IncrementalDetokenizer(byte_level, skip), token_ids))
    assert text == byte_level.decode(token_ids, skip_special_tokens=skip)


@given(text=st.text(max_size=30))
def test_round_trip_with_the_real_tokenizer(byte_level: Tokenizer, text: str) -> None:
    token_ids = byte_level.encode(text, add_special_tokens=False, parse_special=False)
    assert "".join(stream(IncrementalDetokenizer(byte_level, False), token_ids)) == text


def seconds(run: Callable[[int], None], size: int) -> float:
    """CPU seconds, the best of five: other processes of the machine disturb them little."""
    best = float("inf")
    for _ in range(5):
        start = time.thread_time()
        run(size)
        best = min(best, time.thread_time() - start)
    return best


@pytest.mark.parametrize("token_id", [0, 1, 2])
def test_cost_is_linear(token_id: int) -> None:
    tokenizer = ByteTable([b" word", b"", b"\x9f"])

    def run(size: int) -> None:
        detokenizer = IncrementalDetokenizer(tokenizer)
        for _ in range(size):
            detokenizer.push(token_id)

    assert seconds(run, 40_000) < 2.5 * seconds(run, 20_000)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("spaces", [True, False])
def test_spaces_between_special_tokens_as_in_transformers(
    byte_level: Tokenizer, skip: bool, spaces: bool
) -> None:
    """Our texts have none, whatever the parameter says; nor have those of fast tokenizers."""
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level._backend)
    specials = list(byte_level.special_tokens.values())
    words = byte_level.encode("two words", add_special_tokens=False)
    token_ids = [*specials, *words, *specials, *specials, *words]
    expected = reference.decode(
        token_ids, skip_special_tokens=skip, spaces_between_special_tokens=spaces,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    assert byte_level.decode(token_ids, skip) == expected
