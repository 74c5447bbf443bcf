"""Stop strings in streamed text. Torch-free.

The text is searched by an Aho-Corasick automaton (A. Aho and M. Corasick, "Efficient string
matching: an aid to bibliographic search", CACM 1975), so its result does not depend on how the text
was cut into pieces and a character costs constant time on average, however long the stop strings
are.

The match that ends first wins; of those that end together, the one that starts first, which is the
longest. Text is held back only while it is a proper prefix of some stop string, and since it then
equals the beginning of that stop string it needs no buffer.
"""

from typing import NamedTuple


class StopResult(NamedTuple):
    """Text that may be shown now, and the stop string that ended the text, if one did."""

    text_to_emit: str
    matched: str | None = None


class StopStrings:
    """Searches the text of one choice for stop strings, as it arrives."""

    def __init__(self, stops: list[str], include: bool) -> None:
        """`include`: the text ends after the matched stop string instead of before it."""
        self._stops = stops
        self._include = include
        self._matched: str | None = None
        self._node = 0  # longest suffix of the text that begins a stop string
        self._held = 0  # characters not emitted yet ...
        self._held_stop = ""  # ... which are the first ones of this stop string
        self._build()

    def push(self, text: str, can_stop: bool) -> StopResult:
        """Add text. Without `can_stop`, a stop string that ends in it is passed over as plain text.

        After a match everything is dropped: the rest of this text and all that comes later.
        """
        if self._matched is not None:
            return StopResult("", self._matched)
        if not self._stops:
            return StopResult(text)
        node = self._node
        for index, char in enumerate(text):
            while node and char not in self._children[node]:
                node = self._fallbacks[node]
            node = self._children[node].get(char, 0)
            if can_stop and (matched := self._matches[node]) is not None:
                self._matched = matched
                end = self._held + index + 1
                return StopResult(
                    self._head(text, end if self._include else end - len(matched)), matched
                )
        self._node = node
        held, held_stop = self._holds[node]
        emitted = self._head(text, self._held + len(text) - held)
        self._held, self._held_stop = held, held_stop
        return StopResult(emitted)

    def flush(self) -> str:
        """What is still held when the text ends without a match."""
        rest = "" if self._matched is not None else self._held_stop[: self._held]
        self._node, self._held, self._held_stop = 0, 0, ""
        return rest

    def _head(self, text: str, length: int) -> str:
        """The first `length` characters of what was held followed by `text`."""
        if length <= self._held:
            return self._held_stop[:length]
        return self._held_stop[: self._held] + text[: length - self._held]

    def _build(self) -> None:
        """Tables by node; a node is a prefix of a stop string, node 0 the empty one.

        `_children`: character to node. `_fallbacks`: the longest proper suffix that is a node.
        `_matches`: the longest stop string that the node ends with. `_holds`: length of the longest
        suffix that is a proper prefix of a stop string (a node with children), and that stop
        string.
        """
        self._children: list[dict[str, int]] = [{}]
        self._fallbacks = [0]
        self._matches: list[str | None] = [None]
        self._holds: list[tuple[int, str]] = [(0, "")]
        for stop in self._stops:
            self._insert(stop)
        queue = list(self._children[0].values())  # by depth: fallbacks come before their users
        for node in queue:
            fallback = self._fallbacks[node]
            if self._matches[node] is None:
                self._matches[node] = self._matches[fallback]
            if not self._children[node]:
                self._holds[node] = self._holds[fallback]
            for char, child in self._children[node].items():
                suffix = fallback
                while suffix and char not in self._children[suffix]:
                    suffix = self._fallbacks[suffix]
                self._fallbacks[child] = self._children[suffix].get(char, 0)
                queue.append(child)

    def _insert(self, stop: str) -> None:
        node = 0
        for depth, char in enumerate(stop, start=1):
            if char not in self._children[node]:
                self._children[node][char] = len(self._children)
                self._children.append({})
                self._fallbacks.append(0)
                self._matches.append(None)
                self._holds.append((depth, stop))
            node = self._children[node][char]
        self._matches[node] = stop
