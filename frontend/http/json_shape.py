"""How deep and how manifold a JSON text is, found before it is decoded.

Decoding is one call that keeps every other thread waiting, and its time goes with the number of
values, not of bytes. So the text is looked through in pieces, between which others run, and what
has too much of something is not decoded at all.
"""

import itertools
import re
from collections.abc import Iterator

from headrace.frontend.http.limits import KIB, RequestLimits

PIECE_BYTES = 64 * KIB

_MARKS = b'[]{}:,"'
_NO_MARKS = bytes(set(range(256)) - set(_MARKS))
_STRING = re.compile(rb'"[^"]*"?')
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


class JsonShape:
    """Counts of a JSON text, or of its beginning. For text that is no JSON they are of no use.

    depth: levels of arrays and objects. num_items: arrays, objects and names of fields.
    num_commas: between values.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.num_items = 0
        self.num_commas = 0
        self._level = 0

    def add(self, marks: bytes) -> None:
        """Count brackets, braces, colons and commas outside of strings; the next in the text."""
        self.num_commas += marks.count(b",")
        brackets = marks.translate(None, b",:")
        num_openings = brackets.count(b"[") + brackets.count(b"{")
        self.num_items += num_openings + marks.count(b":")
        steps = map(_STEP.__getitem__, brackets)
        self.depth = max(self.depth, *itertools.accumulate(steps, initial=self._level))
        self._level += num_openings - (len(brackets) - num_openings)

    def excess(self, limits: RequestLimits) -> str | None:
        """What there is too much of."""
        if self.depth > limits.max_json_depth:
            most = f"{limits.max_json_depth} levels of arrays and objects"
            return f"the body is nested too deeply: at most {most} are accepted"
        if self.num_items > limits.max_json_items:
            most = f"{limits.max_json_items} arrays, objects and names"
            return f"the body has too many parts: at most {most} are accepted"
        if self.num_commas > limits.max_json_commas:
            most = f"{limits.max_json_commas} commas between values"
            return f"the body has too many values: at most {most} are accepted"
        return None


def find_excess(data: bytes, limits: RequestLimits) -> str | None:
    """What a JSON text has too much of; None for nearly all texts, after counting their marks."""
    num_openings = data.count(b"[") + data.count(b"{")
    if (
        num_openings <= limits.max_json_depth
        and num_openings + data.count(b":") <= limits.max_json_items
        and data.count(b",") <= limits.max_json_commas
    ):
        return None
    shape = JsonShape()
    for marks in _marks_outside_strings(data):
        shape.add(marks)
        if (excess := shape.excess(limits)) is not None:
            return excess
    return None


def _marks_outside_strings(data: bytes) -> Iterator[bytes]:
    in_string, kept = False, b""
    for start in range(0, len(data), PIECE_BYTES):
        piece = kept + data[start : start + PIECE_BYTES]
        num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
        kept = piece[len(piece) - num_backslashes % 2 :]  # it escapes the next piece's first byte
        piece = piece[: len(piece) - len(kept)]
        unescaped = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        marks = b'"' * in_string + unescaped.translate(None, _NO_MARKS)
        in_string = marks.count(b'"') % 2 == 1
        yield _STRING.sub(b"", marks)
