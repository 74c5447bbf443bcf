"""Bad words: token sequences that must not be completed."""

from collections import deque
from collections.abc import Iterable, Sequence


class BadWords:
    """The sequences of one request, found by the tokens before their last one.

    Only the last token of a sequence is ever banned, and only where the tokens before it are the
    newest output tokens. Prompt tokens do not count as generated, so a sequence cannot begin in the
    prompt; one of a single token is banned always.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        """Raises ValueError for an empty sequence."""
        if not all(sequences):
            raise ValueError("a bad word has no tokens")
        self._last_ids: dict[tuple[int, ...], set[int]] = {}
        for *before, last in sequences:
            self._last_ids.setdefault(tuple(before), set()).add(last)
        self._lengths = sorted({len(before) for before in self._last_ids})

    @property
    def longest_prefix(self) -> int:
        """How many output tokens `banned` may have to look at."""
        return self._lengths[-1]

    def banned(self, newest_ids: deque[int]) -> list[int]:
        """Ids that may not come next, ascending; `newest_ids`: the last output tokens.

        Costs O(distinct sequence lengths), whatever the number of sequences.
        """
        newest = tuple(newest_ids)
        banned: set[int] = set()
        for length in self._lengths:
            if length <= len(newest):
                banned |= self._last_ids.get(newest[len(newest) - length :], set())
        return sorted(banned)

    def newest(self, output_ids: Iterable[int]) -> deque[int]:
        """A window on output tokens that is as long as `banned` needs; append to it."""
        return deque(output_ids, maxlen=self.longest_prefix)
