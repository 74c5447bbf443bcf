"""The waiting queue: a heap whose order never changes with time, with removal in O(1)."""

import heapq
from typing import Literal

from headrace.engine_core.request import Choice, Rank

_COMPACT_ABOVE = 64  # dead heap entries that are not worth a rebuild


def make_rank(
    policy: Literal["fcfs", "priority"],
    *,
    priority: int,
    arrival_time: float,
    ageing_s: float,
    number: int,
    index: int,
) -> Rank:
    """Position among all choices; lower runs first, and no two are equal.

    fcfs: by arrival. priority: by priority, where each `ageing_s` of waiting is worth one level. As
    all choices age at one speed, `priority - waited / ageing_s` orders like `priority * ageing_s +
    arrival_time`, which is constant.
    """
    if policy == "fcfs":
        score = arrival_time
    elif 0 < ageing_s < float("inf"):
        score = priority * ageing_s + arrival_time
    else:
        score = float(priority)
    return (score, arrival_time, number, index)


class RequestQueue:
    """Waiting choices in order of rank; with fcfs, preempted ones come before all others.

    (With priorities they keep the place of their rank: in front, they would take back at once what
    a more important choice was given.)
    """

    def __init__(self, policy: Literal["fcfs", "priority"]) -> None:
        self._preempted_first = policy == "fcfs"
        self._heap: list[tuple[bool, Rank, int, Choice]] = []
        self._live: dict[Choice, int] = {}  # choice -> the number of its heap entry
        self._wanted: dict[Choice, int] = {}  # its tokens to compute
        self.num_wanted_tokens = 0  # of all
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, choice: Choice) -> bool:
        return choice in self._live

    def push(self, choice: Choice) -> None:
        """Add a choice that is not in the queue."""
        self._num_pushed += 1
        self._live[choice] = self._num_pushed
        wanted = self._wanted[choice] = len(choice.token_ids) - choice.num_computed_tokens
        self.num_wanted_tokens += wanted
        behind = self._preempted_first and choice.num_preemptions == 0
        heapq.heappush(self._heap, (behind, choice.rank, self._num_pushed, choice))

    def peek(self) -> Choice | None:
        """The first choice, or None."""
        while self._heap:
            _, _, number, choice = self._heap[0]
            if self._live.get(choice) == number:
                return choice
            heapq.heappop(self._heap)
        return None

    def remove(self, choice: Choice) -> None:
        """Take a choice out, wherever it is; nothing happens if it is not in the queue."""
        if self._live.pop(choice, None) is None:
            return
        self.num_wanted_tokens -= self._wanted.pop(choice)
        if len(self._heap) > 2 * len(self._live) + _COMPACT_ABOVE:
            self._heap = [entry for entry in self._heap if self._live.get(entry[3]) == entry[2]]
            heapq.heapify(self._heap)
