"""The pool of KV blocks: reference counts, free lists, the prefix cache's map of keys.

A block is in exactly one of three places: in use (reference count above 0), free and cached (its
content can still be found by key), or free and blank. Blank blocks are handed out first, then the
cached one that was freed longest ago.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

NULL_BLOCK = 0  # stands for pages that are never read; never handed out

BlockKey = tuple[int, bytes]  # KV group, block hash


class BlockPool:
    """Blocks 1 … num_blocks-1. All operations are O(blocks touched)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_usable = num_blocks - 1
        self.num_errors = 0  # operations refused because the accounting was wrong
        self._ref_counts = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, 0, -1))  # a stack: low ids come out first
        self._cached_free: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._block_of: dict[BlockKey, int] = {}
        self._key_of: dict[int, BlockKey] = {}
        self._tainted: set[int] = set()  # in use, and to be zeroed once free
        self._to_zero: dict[int, None] = {}  # free, and to be zeroed by the next step

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        return len(self._blank) + len(self._cached_free)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by key, in use or not."""
        return len(self._key_of)

    def ref_count(self, block: int) -> int:
        """How many holders the block has."""
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks with one reference each. The caller has checked `num_free`."""
        blocks = []
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            else:
                block, _ = self._cached_free.popitem(last=False)
                self._forget_key(block)
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def share(self, block: int) -> None:
        """Add a reference to a block that is in use or cached."""
        if self._ref_counts[block] == 0:
            del self._cached_free[block]
        self._ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each, in this order: what comes first is evicted first."""
        for block in blocks:
            count = self._ref_counts[block]
            if count == 0:
                self.num_errors += 1
                continue
            self._ref_counts[block] = count - 1
            if count == 1:
                self._add_free(block)

    def find(self, key: BlockKey) -> int | None:
        """The block with this content, or None."""
        return self._block_of.get(key)

    def register(self, block: int, key: BlockKey) -> None:
        """Make a full, computed block findable, unless another block has that content already."""
        if key in self._block_of or block in self._key_of or block in self._tainted:
            return
        self._block_of[key] = block
        self._key_of[block] = key

    def taint(self, blocks: Iterable[int]) -> None:
        """Drop blocks from the prefix cache and have them zeroed once nobody uses them."""
        for block in blocks:
            self._uncache(block)
            if self._ref_counts[block]:
                self._tainted.add(block)
            else:
                self._to_zero[block] = None

    def take_blocks_to_zero(self) -> list[int]:
        """Blocks that the next step has to zero before anything else writes them."""
        blocks = list(self._to_zero)
        self._to_zero.clear()
        return blocks

    def forget_all(self) -> None:
        """Empty the prefix cache; blocks in use stay with their holders."""
        for block in list(self._key_of):
            self._uncache(block)

    def _add_free(self, block: int) -> None:
        if block in self._tainted:
            self._tainted.discard(block)
            self._to_zero[block] = None
        if block in self._key_of:
            self._cached_free[block] = None
        else:
            self._blank.append(block)

    def _uncache(self, block: int) -> None:
        self._forget_key(block)
        if block in self._cached_free:
            del self._cached_free[block]
            self._blank.append(block)

    def _forget_key(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            self._block_of.pop(key, None)

    def check(self, references: Mapping[int, int]) -> list[str]:
        """Compare with the references that really exist; describe the mismatches and heal them."""
        problems = [
            f"block {block} has reference count {count}, but {references.get(block, 0)} holders"
            for block, count in enumerate(self._ref_counts)
            if count != references.get(block, 0)
        ]
        free = [*self._blank, *self._cached_free]
        expected = {block for block in range(1, len(self._ref_counts)) if block not in references}
        if len(free) != len(expected) or set(free) != expected:
            problems.append(
                f"{len(free)} of {self.num_usable} blocks are listed as free, but"
                f" {len(expected)} are free"
            )
        problems += self._check_keys()
        if self.num_errors:
            problems.append(f"{self.num_errors} releases of blocks that were free already")
            self.num_errors = 0
        if problems:
            self._heal(references, sorted(expected, reverse=True))
        return problems

    def _check_keys(self) -> list[str]:
        problems = []
        if {block: key for key, block in self._block_of.items()} != self._key_of:
            problems.append("the prefix cache's two maps disagree")
        if any(block not in self._key_of for block in self._cached_free):
            problems.append("a free block without a key is listed as cached")
        if any(block in self._key_of for block in self._blank):
            problems.append("a cached block is listed as blank")
        return problems

    def _heal(self, references: Mapping[int, int], free: Sequence[int]) -> None:
        """Take the holders' word for what is in use.

        The prefix cache is forgotten: its content is in doubt.
        """
        self._block_of.clear()
        self._key_of.clear()
        self._cached_free.clear()
        self._ref_counts = [references.get(block, 0) for block in range(len(self._ref_counts))]
        self._blank = list(free)
        self._to_zero.update(dict.fromkeys(self._tainted.intersection(free)))
        self._tainted.difference_update(free)
