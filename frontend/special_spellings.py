"""Keeps control tokens that are merely spelled in user text from becoming control tokens.

Before rendering, a character of every such spelling is swapped for a private-use one, so that the
rendered text can be searched for the spellings that the template itself wrote; afterwards the
characters are swapped back.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from headrace.configs.errors import InvalidRequestError

_PRIVATE = re.compile("[\U000f0000-\U0010fffd]")
_PLANES = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))  # private use, supplementary
PLAIN_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class SpellingSet:
    """All special-token spellings of a tokenizer, prepared for searching in linear time."""

    def __init__(self, spellings: tuple[str, ...]) -> None:
        words = [word for word in spellings if word]
        self.alphabet = sorted({char for word in words for char in word})
        self.pattern = re.compile(_trie_pattern(words)) if words else None
        self.starts = re.compile(f"(?={_trie_pattern(words)})(.)", re.DOTALL) if words else None
        self.proper_prefixes = frozenset(word[:k] for word in words for k in range(1, len(word)))
        self.max_length = max(map(len, words), default=0)

    def split(self, text: str) -> Iterator[tuple[str, bool]]:
        """`text` in pieces, each with whether it is a special token's spelling (the longest)."""
        start = 0
        for match in self.pattern.finditer(text) if self.pattern else ():
            if match.start() > start:
                yield text[start : match.start()], False
            yield match.group(), True
            start = match.end()
        if start < len(text):
            yield text[start:], False


@lru_cache(maxsize=8)
def spelling_set(spellings: tuple[str, ...]) -> SpellingSet:
    """Prepare, or find the prepared form of, a tokenizer's special spellings."""
    return SpellingSet(spellings)


class SpellingGuard:
    """Marks spellings in user values for one rendering.

    `end_mark` is one more private character, for the caller.
    """

    def __init__(self, spellings: SpellingSet, user_values: Any, template_source: str) -> None:
        self._spellings = spellings
        used = set(_PRIVATE.findall(template_source))
        for text in _strings(user_values):
            if not text.isascii():
                used.update(_PRIVATE.findall(text))
        alphabet = spellings.alphabet
        first = _free_block(len(alphabet) + 1, used)
        self.end_mark = chr(first + len(alphabet))
        self._to_private = {char: chr(first + i) for i, char in enumerate(alphabet)}
        self._to_plain = {first + i: char for i, char in enumerate(alphabet)}
        self._marks = re.compile(f"[{chr(first)}-{chr(first + len(alphabet))}]")

    def mark(self, value: Any) -> Any:
        """A copy of `value` (any JSON value) whose strings and keys spell no special token."""
        if isinstance(value, str):
            return value if value in PLAIN_ROLES else self._mark_text(value)
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return value

    def has_marks(self, text: str) -> bool:
        return not text.isascii() and self._marks.search(text) is not None

    def unmark(self, text: str) -> str:
        return text if text.isascii() else text.translate(self._to_plain)

    def _mark_text(self, text: str) -> str:
        spellings = self._spellings
        if spellings.starts is None:
            return text
        # The unfinished spelling at the end comes first: the next string could complete it.
        ends = {len(text), len(text.rstrip())}
        cuts = {
            end - k
            for end in ends
            for k in range(1, min(spellings.max_length, end + 1))
            if text[end - k : end] in spellings.proper_prefixes
        }
        cuts.update(match.start() for match in spellings.starts.finditer(text))
        if not cuts:
            return text
        pieces, start = [], 0
        for cut in sorted(cuts):
            pieces += [text[start:cut], self._to_private[text[cut]]]
            start = cut + 1
        return "".join([*pieces, text[start:]])


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _free_block(size: int, used: set[str]) -> int:
    """The first code point of `size` private ones of which none is in `used`."""
    taken = {ord(char) for char in used}
    for plane in _PLANES:
        for first in range(plane.start, plane.stop - size, size):
            if taken.isdisjoint(range(first, first + size)):
                return first
    raise InvalidRequestError(
        "the messages use private-use characters all over the two supplementary planes", "messages"
    )


def _trie_pattern(words: list[str]) -> str:
    """A pattern that matches the longest of `words`, without trying them one after another."""
    trie: dict[str, Any] = {}
    for word in words:
        node = trie
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    return _node_pattern(trie)


def _node_pattern(node: dict[str, Any]) -> str:
    branches = []
    for char, child in sorted(node.items()):
        if not char:
            continue
        literal = re.escape(char)
        while len(child) == 1 and "" not in child:  # a chain needs no groups
            (char, child), *_ = child.items()
            literal += re.escape(char)
        branches.append(literal + (_node_pattern(child) if set(child) != {""} else ""))
    joined = f"(?:{'|'.join(branches)})"
    return joined + "?" if "" in node else joined
