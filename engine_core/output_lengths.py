"""How long outputs become, learnt from those that ended: what a request is expected to cost."""

# Before anything is known, outputs are taken to have this many tokens, or their limit if less.
UNKNOWN_LENGTH = 1024
_PRIOR = 2  # outputs that this guess counts as
_MAX_COUNT = 512  # outputs of one size of limit, after which the older ones count half


class OutputLengths:
    """Limits (`max_tokens`) are told apart by their power of two.

    A limit of 100 is mostly one that a caller has chosen and the text reaches; one of 4096 is
    mostly what the window left. For each size the share of the limit that was used is kept.
    """

    def __init__(self) -> None:
        self._used: dict[int, float] = {}
        self._allowed: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    def expected(self, limit: int) -> int:
        """Output tokens that a sequence with this limit will probably have, at least 1."""
        size = limit.bit_length()
        used = self._used.get(size, 0.0) + _PRIOR * min(limit, UNKNOWN_LENGTH)
        allowed = self._allowed.get(size, 0.0) + _PRIOR * limit
        return max(1, min(limit, round(limit * used / allowed))) if limit > 0 else 1

    def add(self, limit: int, num_tokens: int) -> None:
        """A sequence with this limit has ended by itself, with that many output tokens."""
        size = limit.bit_length()
        self._counts[size] = self._counts.get(size, 0) + 1
        self._used[size] = self._used.get(size, 0.0) + num_tokens
        self._allowed[size] = self._allowed.get(size, 0.0) + limit
        if self._counts[size] >= _MAX_COUNT:
            self._counts[size] //= 2
            self._used[size] /= 2
            self._allowed[size] /= 2
