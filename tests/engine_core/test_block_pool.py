"""The block pool against a plain model of it, and its self-check."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.engine_core.block_pool import NULL_BLOCK, BlockPool

NUM_BLOCKS = 7


def key(number: int) -> tuple[int, bytes]:
    return (0, bytes([number]))


class PoolMachine(RuleBasedStateMachine):
    """`holds` is a list of references; `keys` and `freed_at` say what must still be findable."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.holds: list[int] = []
        self.keys: dict[int, int] = {}  # block -> key number
        self.freed_at: dict[int, int] = {}  # cached free block -> when it became free
        self.now = 0

    def free_blocks(self) -> set[int]:
        return set(range(1, NUM_BLOCKS)) - set(self.holds)

    @precondition(lambda self: self.free_blocks())
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        free = self.free_blocks()
        count = data.draw(st.integers(1, len(free)))
        blanks = free - self.keys.keys()
        oldest = sorted(free & self.keys.keys(), key=lambda block: self.freed_at[block])
        got = self.pool.allocate(count)
        assert len(set(got)) == count and NULL_BLOCK not in got
        assert set(got[: len(blanks)]) <= blanks
        assert got[len(blanks) :] == oldest[: max(0, count - len(blanks))]
        for block in got:
            self.keys.pop(block, None)
        self.holds += got

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), number=st.integers(0, 4))
    def register(self, data: st.DataObject, number: int) -> None:
        block = data.draw(st.sampled_from(self.holds))
        self.pool.register(block, key(number))
        if block not in self.keys and number not in self.keys.values():
            self.keys[block] = number

    @rule(number=st.integers(0, 4))
    def share_found(self, number: int) -> None:
        block = self.pool.find(key(number))
        expected = [block for block, found in self.keys.items() if found == number]
        assert ([block] if block is not None else []) == expected
        if block is not None:
            self.pool.share(block)
            self.holds.append(block)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.holds))
        self.holds.remove(block)
        self.pool.release([block])
        self.now += 1
        self.freed_at[block] = self.now

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.keys.clear()

    @invariant()
    def accounts_balance(self) -> None:
        references = {block: self.holds.count(block) for block in self.holds}
        assert self.pool.check(references) == []
        assert self.pool.num_free == len(self.free_blocks())
        assert self.pool.num_cached == len(self.keys)


TestBlockPool = PoolMachine.TestCase


def test_tainted_blocks_are_zeroed_once_free_and_never_cached() -> None:
    pool = BlockPool(4)
    mine, shared = pool.allocate(2)
    pool.share(shared)
    pool.register(mine, key(1))
    pool.taint([mine, shared])
    pool.register(shared, key(2))
    assert pool.find(key(1)) is None and pool.find(key(2)) is None
    pool.release([mine, shared])
    assert pool.take_blocks_to_zero() == [mine]
    assert pool.take_blocks_to_zero() == []
    pool.release([shared])
    assert pool.take_blocks_to_zero() == [shared]
    pool.taint([shared])  # free already: at once
    assert pool.take_blocks_to_zero() == [shared]
    assert pool.check({}) == []


def test_mismatches_are_described_and_healed() -> None:
    pool = BlockPool(5)
    first, second = pool.allocate(2)
    pool.register(first, key(1))
    pool.share(first)  # a reference that nobody holds
    problems = pool.check({first: 1, second: 1})
    assert problems == [f"block {first} has reference count 2, but 1 holders"]
    assert pool.check({first: 1, second: 1}) == []
    assert pool.find(key(1)) is None, "the cache is in doubt, so it is forgotten"
    problems = pool.check({first: 1})  # a block leaked
    assert len(problems) == 2 and "2 of 4 blocks are listed as free, but 3 are" in problems[1]
    assert pool.check({first: 1}) == [] and pool.num_free == 3
    pool.release([second])  # released twice
    assert pool.num_free == 3
    assert pool.check({first: 1}) == ["1 releases of blocks that were free already"]
    pool.release([first])
    assert pool.check({}) == []
