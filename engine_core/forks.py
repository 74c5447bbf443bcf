"""`n > 1`: children wait for the first choice's prompt, then hold shared blocks until they run.

What a waiting child holds is a favour: it is the first thing given back when blocks are short, and
the child is then an ordinary waiting choice.
"""

from collections.abc import Iterable

from headrace.engine_core.kv_cache_manager import KVCacheManager
from headrace.engine_core.request import Choice, Rank, Request, WaitsFor
from headrace.workers.protocol import BlockCopy


class Forks:
    """Owns the blocks of forked children until they run, and copies not handed out yet."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._holders: dict[Choice, list[BlockCopy]] = {}  # waiting child -> its copies to hand out

    def pending_copies(self) -> list[BlockCopy]:
        """Copies whose sources are still referenced."""
        return [copy for copies in self._holders.values() for copy in copies]

    def holders(self) -> list[Choice]:
        """Waiting children that hold blocks."""
        return list(self._holders)

    def wait(self, parent: Choice, children: Iterable[Choice]) -> None:
        """Let `children` wait until the parent's prompt has been scheduled."""
        for child in children:
            child.waits_for = WaitsFor.FORK_PARENT
            parent.request.fork_children[child.id.index] = child

    def share(self, parent: Choice, child: Choice) -> None:
        """Give a child its blocks, as far as they reach: the parent's prompt is complete in this
        step.
        """
        copies = self._kv.fork(parent, child)
        if copies is not None:
            child.num_computed_tokens = parent.request.num_prompt_tokens - 1
            child.num_cached_tokens = parent.num_cached_tokens
            self._holders[child] = copies

    def orphan(self, parent: Choice) -> list[Choice]:
        """The parent can no longer be forked: returns its children, as ordinary waiting choices."""
        children = list(parent.request.fork_children.values())
        parent.request.fork_children.clear()
        for child in children:
            child.waits_for = WaitsFor.NOTHING
        return children

    def end(self, choice: Choice) -> list[Choice]:
        """A choice ends: take back what it held while waiting; returns the children it leaves."""
        self.release(choice)
        if choice.waits_for is WaitsFor.FORK_PARENT:
            del choice.request.fork_children[choice.id.index]
            return []
        return self.orphan(choice)

    def release(self, child: Choice) -> None:
        """Take back what a waiting child holds, if anything."""
        copies = self._holders.pop(child, None)
        if copies is not None:
            self._kv.release_copy_sources(copies)
            self._kv.free(child)
            child.num_computed_tokens = 0

    def release_last(self, after: Rank | None = None) -> bool:
        """Take back the blocks of the last ranked holder, if it ranks after `after`.

        False if there is none.
        """
        last = max(self._holders, key=lambda choice: choice.rank, default=None)
        if last is None or (after is not None and last.rank <= after):
            return False
        self.release(last)
        return True

    def release_all(self, request: Request | None = None) -> None:
        """Take back the blocks of all waiting children, or of those of one request."""
        for child in self.holders():
            if request is None or child.request is request:
                self.release(child)

    def admitted(self, child: Choice) -> None:
        """The child runs now and owns its blocks; its copies have been taken."""
        self._holders.pop(child, None)

    def take_copies(self) -> list[BlockCopy]:
        """The copies for the next step.

        They run before anything is written, so their sources are let go now.
        """
        copies = self.pending_copies()
        self._kv.release_copy_sources(copies)
        for child in self._holders:
            self._holders[child] = []
        return copies
