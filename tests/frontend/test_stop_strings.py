"""Stop strings against a brute-force definition on the whole text (rule PP32, case A1)."""

import itertools
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.frontend.detokenizer import IncrementalDetokenizer
from headrace.frontend.stop_strings import StopStrings


def run(
    pieces: list[str], stops: list[str], include: bool, allowed: list[bool] | None = None
) -> tuple[list[str], str | None]:
    """Deltas of every push (and of the flush, if nothing matched) and the matched string."""
    search = StopStrings(stops, include)
    deltas = []
    for piece, can_stop in zip(pieces, allowed or [True] * len(pieces), strict=True):
        text, matched = search.push(piece, can_stop)
        deltas.append(text)
        if matched is not None:
            return deltas, matched
    return [*deltas, search.flush()], None


def definition(
    text: str, stops: list[str], include: bool, first_end: int
) -> tuple[str, str | None]:
    """Earliest end wins, then earliest start; a match ends at character `first_end` or later."""
    matches = [
        (start + len(stop), start, stop)
        for stop in stops
        for start in range(len(text) - len(stop) + 1)
        if text.startswith(stop, start) and start + len(stop) >= first_end
    ]
    if not matches:
        return text, None
    end, start, stop = min(matches)
    return text[: end if include else start], stop


def longest_held(text: str, stops: list[str]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of a stop string."""
    return max(n for n in range(len(text) + 1) for s in [*stops, "x"] if n < len(s) and
    text.endswith(s[:n]))  # fmt: skip


def cuttings(pieces: list[str], max_cuts: int) -> Iterator[list[str]]:
    """The text as given, per character, and cut at every choice of up to `max_cuts` places."""
    text = "".join(pieces)
    yield pieces
    yield list(text)
    for num_cuts in range(max_cuts + 1):
        for cuts in itertools.combinations(range(1, len(text)), num_cuts):
            yield [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]


small = st.text(alphabet="ab", min_size=1, max_size=5)
stop_lists = st.lists(st.one_of(small, st.text(alphabet="abc", min_size=1, max_size=3)), max_size=4)


@settings(max_examples=300)
@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=6), max_size=12),
    stops=stop_lists,
    include=st.booleans(),
    num_ignored=st.integers(0, 12),
)
def test_every_cutting_gives_the_defined_text(
    pieces: list[str], stops: list[str], include: bool, num_ignored: int
) -> None:
    allowed = [i >= num_ignored for i in range(len(pieces))]
    deltas, matched = run(pieces, stops, include, allowed)
    # A match must end in a piece that may stop: after the last character of the ignored ones.
    first_end = len("".join(pieces[:num_ignored])) + 1
    expected = definition("".join(pieces), stops, include, first_end)
    assert ("".join(deltas), matched) == expected


@given(pieces=st.lists(st.text(alphabet="abc", max_size=6), max_size=12), stops=stop_lists)
def test_only_a_proper_prefix_of_a_stop_string_is_held(pieces: list[str], stops: list[str]) -> None:
    search = StopStrings(stops, include=False)
    seen = shown = ""
    for piece in pieces:
        text, matched = search.push(piece, can_stop=True)
        shown += text
        seen += piece
        if matched is not None:
            return
        assert shown == seen[: len(seen) - longest_held(seen, stops)]
    assert shown + search.flush() == seen


A1 = ["Ready", " set", ".", "\n", "Cust", "omer", ":", " hi"]
A1_TWIN = ["Ready", " set", ".", "\n", "Cust", "ard", " tart"]
A1_STOP = ["\nCustomer:"]


def test_a1_stops_without_leaking() -> None:
    for pieces in cuttings(A1, max_cuts=2):
        deltas, matched = run(pieces, A1_STOP, include=False)
        assert "".join(deltas) == "Ready set." and matched == "\nCustomer:"
        assert not any("\n" in delta or "Cust" in delta for delta in deltas)
        deltas, matched = run(pieces, A1_STOP, include=True)
        assert "".join(deltas) == "Ready set.\nCustomer:" and matched == "\nCustomer:"


def test_a1_twin_releases_what_was_disproved() -> None:
    for include in (False, True):
        for pieces in cuttings(A1_TWIN, max_cuts=2):
            deltas, matched = run(pieces, A1_STOP, include)
            assert "".join(deltas) == "Ready set.\nCustard tart" and matched is None
    deltas, _ = run(A1_TWIN, A1_STOP, include=False)
    assert deltas == ["Ready", " set", ".", "", "", "\nCustard", " tart", ""]


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("xabcd", ["abcd", "bc"], ("xa", "bc")),  # ends first, although it starts later
        ("xabc", ["c", "bc", "abc"], ("x", "abc")),  # end together: starts first
        ("xabc", ["abc", "ab"], ("x", "ab")),
        ("aaab", ["aab"], ("a", "aab")),
        ("ababac", ["abac"], ("ab", "abac")),
        ("one two", ["three"], ("one two", None)),
        ("é\u0301🧭!", ["🧭"], ("é\u0301", "🧭")),
        ("abc", [], ("abc", None)),
        ("ab", ["ab", "ab"], ("", "ab")),
    ],
)
def test_which_match_wins(text: str, stops: list[str], expected: tuple[str, str | None]) -> None:
    for pieces in cuttings([text], max_cuts=len(text)):
        deltas, matched = run(pieces, stops, include=False)
        assert ("".join(deltas), matched) == expected


def test_text_after_the_match_is_dropped() -> None:
    search = StopStrings(["END"], include=True)
    assert search.push("a END and more", can_stop=True) == ("a END", "END")
    assert search.push("late", can_stop=True) == ("", "END")
    assert search.flush() == ""


def test_min_tokens_ignores_matches_but_not_their_beginnings() -> None:
    search = StopStrings(["stop", "topper"], include=False)
    assert search.push("a stop", can_stop=False) == ("a s", None)  # "top" may become "topper"
    assert search.push("per", can_stop=True) == ("", "topper")


class ByteTokens:
    """Token i is one byte, of an alphabet that makes whole, partial and broken characters."""

    strips_leading_space = False
    alphabet = b"ab\xc3\xa9\xff"

    def token_bytes(self, token_id: int) -> bytes:
        return self.alphabet[token_id : token_id + 1]

    def is_special(self, token_id: int) -> bool:
        return False


@settings(max_examples=200)
@given(
    token_ids=st.lists(st.integers(0, 4), max_size=25),
    stops=st.lists(st.text(alphabet="abé\ufffd", min_size=1, max_size=3), max_size=3),
    include=st.booleans(),
)
def test_streamed_tokens_stop_where_the_decoded_text_does(
    token_ids: list[int], stops: list[str], include: bool
) -> None:
    """Detokenizer and stop strings together, as a choice runs them."""
    detokenizer = IncrementalDetokenizer(ByteTokens())
    pieces = [*map(detokenizer.push, token_ids), detokenizer.flush()]
    deltas, matched = run(pieces, stops, include)
    whole = bytes(ByteTokens.alphabet[i] for i in token_ids).decode("utf-8", "replace")
    assert ("".join(deltas), matched) == definition(whole, stops, include, first_end=1)


def repeated(size: int) -> float:
    """CPU seconds for `size` characters, one at a time, of a text that nearly matches all along."""
    best = float("inf")
    for _ in range(5):
        search = StopStrings(["a" * size + "b", "a" * (size // 2) + "c"], include=False)
        start = time.thread_time()
        for _ in range(2 * size):
            search.push("a", can_stop=True)
        search.push("x" * size, can_stop=True)
        best = min(best, time.thread_time() - start)
    return best


def test_cost_is_linear() -> None:
    assert repeated(20_000) < 2.5 * repeated(10_000)
