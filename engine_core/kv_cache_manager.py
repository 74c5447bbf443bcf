"""KV-cache bookkeeping: block tables of all groups, prefix hits, forks.

The scheduler sees tokens, never blocks.

Groups share one pool. A "full" group keeps every block; a "sliding" group gives back blocks that
fell out of its window, and a prefix hit needs only those of its blocks that the window still
covers.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.engine_core.block_hash import extend_hashes
from headrace.engine_core.block_pool import NULL_BLOCK, BlockPool
from headrace.engine_core.request import Choice, ChoiceBlocks
from headrace.workers.protocol import BlockCopy, KVCacheSpec


@dataclass(frozen=True)
class PrefixHit:
    """The longest cached prefix: `num_blocks` leading blocks.

    Of these, sliding groups need only the last ones.
    """

    num_blocks: int
    tables: list[list[int]]  # per group; block 0 where not needed
    first_live: list[int]  # per group


class KVCacheManager:
    """Owns the block pool and the tables of all choices.

    Whatever it gives a choice, `free` takes back.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: int,
        *,
        enable_prefix_caching: bool,
        max_step_tokens: int,
    ) -> None:
        """`num_blocks` includes the null block; `max_step_tokens`: the most for one choice."""
        self.block_size = spec.block_size
        self._windows = [g.window if g.kind == "sliding" else None for g in spec.groups]  # tokens
        self._enable_prefix_caching = enable_prefix_caching
        self._pool = BlockPool(num_blocks)
        self._no_blocks: list[list[int]] = [[] for _ in spec.groups]  # never written to
        # The most blocks a sliding group holds: those of the window before a chunk, and its own.
        self._max_live = [
            None if window is None else _ceil_div(window - 1 + max_step_tokens, spec.block_size) + 1
            for window in self._windows
        ]

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_usable_blocks(self) -> int:
        return self._pool.num_usable

    def blocks_for(self, num_tokens: int) -> int:
        """The most blocks a choice of this length ever holds, over all groups."""
        length = _ceil_div(num_tokens, self.block_size)
        return sum(length if live is None else min(length, live) for live in self._max_live)

    def max_request_tokens(self) -> int:
        """The longest choice that the whole pool can hold, in tokens; 0 if not even one fits."""
        low, high = 0, self._pool.num_usable * self.block_size
        if all(live is not None for live in self._max_live):  # no group grows without end
            high = max(high, 2**31)
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks_for(middle) <= self._pool.num_usable:
                low = middle
            else:
                high = middle - 1
        return low

    def find_hit(self, choice: Choice) -> PrefixHit:
        """The longest cached prefix that leaves at least the last known token to compute."""
        num = (len(choice.token_ids) - 1) // self.block_size
        if not (self._enable_prefix_caching and choice.request.reads_prefix_cache):
            num = 0
        self._hash_blocks(choice, num)
        previous = -1
        while num != previous:  # groups shorten one another's hits until all agree
            previous = num
            for group in range(len(self._windows)):
                num = self._longest_hit(group, choice.block_hashes, num)
        tables, first_live = [], []
        for group in range(len(self._windows)):
            first = num - self._window_blocks(group, num)
            cached = (self._pool.find((group, key)) for key in choice.block_hashes[first:num])
            tables.append([NULL_BLOCK] * first + [block for block in cached if block is not None])
            first_live.append(first)
        return PrefixHit(num, tables, first_live)

    def _longest_hit(self, group: int, hashes: list[bytes], limit: int) -> int:
        """The most leading blocks, at most `limit`, whose needed part is cached in this group."""
        if self._windows[group] is None:
            for number in range(limit):
                if self._pool.find((group, hashes[number])) is None:
                    return number
            return limit
        end = number = limit  # blocks number … end-1 are cached
        while number > end - self._window_blocks(group, end):
            number -= 1
            if self._pool.find((group, hashes[number])) is None:
                end = number
        return end

    def _window_blocks(self, group: int, num_blocks: int) -> int:
        """How many blocks before token `num_blocks * block_size` that token can see."""
        window = self._windows[group]
        if window is None:
            return num_blocks
        return min(num_blocks, _ceil_div(window - 1, self.block_size))

    def admission_cost(self, choice: Choice, held: ChoiceBlocks | PrefixHit) -> int:
        """Free blocks that it takes for a choice, starting from `held`, to hold all known tokens.

        `held`: what it has, or the hit that it would start from.
        """
        length = _ceil_div(choice.num_tokens, self.block_size)
        cost = 0
        for table, first, limit in zip(held.tables, held.first_live, self._max_live, strict=True):
            total = length - first if limit is None else min(length - first, limit)
            in_use = sum(1 for block in table[first:] if self._pool.ref_count(block))
            cost += max(0, total - in_use)
        return cost

    def owed_blocks(self, choice: Choice) -> int:
        """Blocks that the known tokens of a running choice will still take."""
        missing = _ceil_div(choice.num_tokens, self.block_size) - len(_held(choice).tables[0])
        return max(0, missing) and sum(
            missing if live is None else min(missing, live) for live in self._max_live
        )

    def num_held_blocks(self, choice: Choice) -> int:
        """Table entries of a choice: the most blocks that preempting it can free."""
        blocks = _held(choice)
        return sum(len(blocks.tables[0]) - first for first in blocks.first_live)

    def attach(self, choice: Choice, hit: PrefixHit) -> int:
        """Give a choice without blocks those of a hit; returns the tokens they hold."""
        for table, first in zip(hit.tables, hit.first_live, strict=True):
            for block in table[first:]:
                self._pool.share(block)
        choice.blocks = ChoiceBlocks(hit.tables, hit.first_live, num_committed=hit.num_blocks)
        return hit.num_blocks * self.block_size

    def reaches(self, choice: Choice, num_tokens: int) -> bool:
        """Whether the tables of a choice with blocks reach that far, as in most decoding steps."""
        blocks = choice.blocks
        return blocks is not None and len(blocks.tables[0]) * self.block_size >= num_tokens

    def allocate(self, choice: Choice, num_tokens: int) -> bool:
        """Make the tables reach `num_tokens`, in all groups or, when blocks are short, in none.

        Blocks that fell out of a window are given back first, even if the rest fails.
        """
        blocks = _held(choice)
        missing = _ceil_div(num_tokens, self.block_size) - len(blocks.tables[0])
        if missing <= 0:
            return True
        self._drop_out_of_window(blocks, choice.num_computed_tokens)
        if missing * len(self._windows) > self._pool.num_free:
            return False
        for table in blocks.tables:
            table.extend(self._pool.allocate(missing))
        return True

    def _drop_out_of_window(self, blocks: ChoiceBlocks, num_computed: int) -> None:
        """Give back what no query from token `num_computed` on can see.

        Steps run in order, so that steps handed out earlier have read it before anything overwrites
        it.
        """
        for group, window in enumerate(self._windows):
            if window is None:
                continue
            table = blocks.tables[group]
            first = min(len(table), (num_computed - window + 1) // self.block_size)
            if first > blocks.first_live[group]:
                dropped = range(blocks.first_live[group], first)
                self._pool.release([table[entry] for entry in dropped])
                for entry in dropped:
                    table[entry] = NULL_BLOCK
                blocks.first_live[group] = first

    def take_unsent(self, choice: Choice) -> list[list[int]]:
        """Per group, the table entries that the worker does not know; it does after this."""
        blocks = _held(choice)
        sent = blocks.num_sent
        blocks.num_sent = len(blocks.tables[0])
        if sent == blocks.num_sent:
            return self._no_blocks
        return [table[sent:] for table in blocks.tables]

    def fork(self, parent: Choice, child: Choice) -> list[BlockCopy] | None:
        """Let `child` share the parent's blocks of all prompt tokens but the last.

        The last one it computes itself.

        Full blocks are shared; a last, partly filled one is to be copied by the returned copies,
        before the next step writes anything. Their sources stay referenced until
        `release_copy_sources`. None: blocks are short.
        """
        num_tokens = child.request.num_prompt_tokens - 1
        num_full, num_rest = divmod(num_tokens, self.block_size)
        num_copied = len(self._windows) if num_rest else 0
        if num_copied > self._pool.num_free:
            return None
        source = _held(parent)
        tables = [table[:num_full] for table in source.tables]
        blocks = ChoiceBlocks(tables, list(source.first_live), may_commit=source.may_commit)
        for table in tables:
            for block in table:
                if block != NULL_BLOCK:
                    self._pool.share(block)
        blocks.first_live = [min(first, num_full) for first in blocks.first_live]
        self._drop_out_of_window(blocks, num_tokens)
        copies = []
        if num_rest:
            for table, parent_table in zip(tables, source.tables, strict=True):
                self._pool.share(parent_table[num_full])
                table.extend(self._pool.allocate(1))
                copies.append(BlockCopy(parent_table[num_full], table[-1]))
        child.blocks = blocks
        return copies

    def release_copy_sources(self, copies: Iterable[BlockCopy]) -> None:
        """Drop the references that `fork` took on the sources."""
        self._pool.release([copy.source for copy in copies])

    def commit(self, choice: Choice, num_tokens: int) -> None:
        """Offer the full blocks of the first `num_tokens`, known and computed, for reuse."""
        blocks = choice.blocks
        num_full = num_tokens // self.block_size
        if blocks is None or num_full <= blocks.num_committed:
            return
        if self._enable_prefix_caching and blocks.may_commit:
            self._hash_blocks(choice, num_full)
            for group, table in enumerate(blocks.tables):
                for entry in range(max(blocks.num_committed, blocks.first_live[group]), num_full):
                    self._pool.register(table[entry], (group, choice.block_hashes[entry]))
        blocks.num_committed = num_full

    def free(self, choice: Choice, *, taint: bool = False) -> None:
        """Take back all blocks of a choice, last ones first in line for reuse.

        `taint`: their content may be bad: drop them from the prefix cache and zero them before
        reuse.
        """
        blocks = choice.blocks
        if blocks is None:
            return
        choice.blocks = None
        for table, first in zip(blocks.tables, blocks.first_live, strict=True):
            if taint:
                self._pool.taint(table[first:])
            self._pool.release(reversed(table[first:]))

    def take_blocks_to_zero(self) -> list[int]:
        """Blocks that the next step has to zero."""
        return self._pool.take_blocks_to_zero()

    def zero_again(self, block_ids: list[int]) -> None:
        """The step that had to zero these blocks failed."""
        self._pool.taint(block_ids)

    def reset_prefix_cache(self, choices: Iterable[Choice]) -> None:
        """Forget all cached prefixes.

        `choices`, computed in part, add nothing until they start afresh.
        """
        self._pool.forget_all()
        for choice in choices:
            if choice.blocks is not None:
                choice.blocks.may_commit = False

    def check(self, choices: Iterable[Choice], copies: Iterable[BlockCopy]) -> list[str]:
        """Compare the pool with all tables and the sources of pending copies, and heal it."""
        references = Counter(copy.source for copy in copies)
        for choice in choices:
            for table in choice.blocks.tables if choice.blocks else ():
                references.update(table)
        del references[NULL_BLOCK]
        return self._pool.check(references)

    def _hash_blocks(self, choice: Choice, num_blocks: int) -> None:
        root = choice.request.hash_root
        extend_hashes(choice.block_hashes, root, choice.token_ids, self.block_size, num_blocks)


def _held(choice: Choice) -> ChoiceBlocks:
    if choice.blocks is None:
        raise RuntimeError(f"choice {choice.id} holds no blocks")
    return choice.blocks


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)
