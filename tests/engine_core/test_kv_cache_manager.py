"""KV-cache manager: hits against brute force, windows, forks, the sizes it promises."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.configs.sampling_params import SamplingParams
from headrace.engine_core.block_hash import extend_hashes
from headrace.engine_core.kv_cache_manager import KVCacheManager
from headrace.engine_core.request import Choice, Request
from headrace.workers.protocol import ChoiceId
from tests.engine_core.factories import make_spec

BLOCK = 4
WINDOWS = st.lists(st.none() | st.integers(1, 14), min_size=1, max_size=3)


def make_manager(
    windows: Sequence[int | None] = (None,), num_blocks: int = 100, max_step_tokens: int = 16
) -> KVCacheManager:
    spec = make_spec(windows, BLOCK)
    return KVCacheManager(
        spec, num_blocks + 1, enable_prefix_caching=True, max_step_tokens=max_step_tokens
    )


def make_choice(tokens: Sequence[int], num_prompt: int | None = None, index: int = 0) -> Choice:
    request = Request(
        "r", num_prompt or len(tokens), SamplingParams(), None, frozenset(), 0, b"root", True
    )
    return Choice(ChoiceId("r", index), request, (0.0, 0.0, 0, index), list(tokens), 10**6)


def compute(manager: KVCacheManager, choice: Choice, num_tokens: int) -> None:
    """What scheduler and worker do for one chunk."""
    if choice.blocks is None:
        choice.num_computed_tokens = manager.attach(choice, manager.find_hit(choice))
    assert manager.allocate(choice, num_tokens)
    choice.num_computed_tokens = num_tokens
    manager.commit(choice, num_tokens)


@given(WINDOWS, st.integers(1, 40), st.data())
def test_the_longest_common_hit_is_found(
    windows: list[int | None], num_tokens: int, data: st.DataObject
) -> None:
    manager = make_manager(windows)
    choice = make_choice(range(num_tokens))
    num_full = num_tokens // BLOCK
    hashes: list[bytes] = []
    extend_hashes(hashes, b"root", choice.token_ids, BLOCK, num_full)
    cached = data.draw(
        st.sets(st.tuples(st.integers(0, len(windows) - 1), st.integers(0, max(0, num_full - 1))))
        if num_full
        else st.just(set())
    )
    # Most entries cached, so that long hits happen: `cached` are the holes.
    pool = manager._pool
    for group in range(len(windows)):
        for entry in range(num_full):
            if (group, entry) not in cached:
                pool.register(pool.allocate(1)[0], (group, hashes[entry]))

    def is_hit(length: int) -> bool:
        for group, window in enumerate(windows):
            first = 0 if window is None else max(0, length * BLOCK - window + 1)
            needed = {position // BLOCK for position in range(first, length * BLOCK)}
            if any((group, entry) in cached for entry in needed):
                return False
        return True

    longest = max(length for length in range((num_tokens - 1) // BLOCK + 1) if is_hit(length))
    hit = manager.find_hit(choice)
    assert hit.num_blocks == longest
    for group, window in enumerate(windows):
        first = 0 if window is None else max(0, longest * BLOCK - window + 1)
        for entry, block in enumerate(hit.tables[group]):
            needed = first < longest * BLOCK and entry >= first // BLOCK
            assert block == (pool.find((group, hashes[entry])) if needed else 0)


@given(WINDOWS, st.integers(1, 30), st.integers(1, 16))
def test_a_choice_of_the_promised_length_fits_alone(
    windows: list[int | None], num_blocks: int, max_step_tokens: int
) -> None:
    manager = make_manager(windows, num_blocks, max_step_tokens)
    longest = manager.max_request_tokens()
    if None in windows:
        assert manager.blocks_for(longest + 1) > num_blocks
    if longest == 0:
        return
    length = min(longest, 200)
    choice = make_choice([1] * length)
    for end in [*range(max_step_tokens, length, max_step_tokens), length]:
        compute(manager, choice, end)
    manager.free(choice)
    for end in range(1, length + 1):
        compute(manager, choice, max(end, choice.num_computed_tokens))
    manager.free(choice)
    assert manager.num_free_blocks == num_blocks
    assert manager.check([choice], []) == []


def test_blocks_out_of_the_window_are_given_back() -> None:
    manager = make_manager((None, 6))
    choice = make_choice([1] * 41)
    for end in range(1, 42):
        compute(manager, choice, end)
    assert choice.blocks is not None
    full, sliding = choice.blocks.tables
    assert len(full) == len(sliding) == 11 and 0 not in full
    # Token 40 sees 35 … 40: blocks 8, 9 and 10.
    assert sliding[:8] == [0] * 8 and 0 not in sliding[8:]
    assert manager.num_free_blocks == 100 - 11 - 3


def test_allocation_is_atomic_over_groups() -> None:
    manager = make_manager((None, None), num_blocks=5)
    choice = make_choice([1] * 12)
    compute(manager, choice, 8)
    assert not manager.allocate(choice, 12)
    assert manager.num_free_blocks == 1
    assert choice.blocks is not None and [len(table) for table in choice.blocks.tables] == [2, 2]


def test_the_last_token_is_never_a_hit() -> None:
    manager = make_manager()
    compute(manager, make_choice(range(8)), 8)
    assert manager.find_hit(make_choice(range(8))).num_blocks == 1
    assert manager.find_hit(make_choice(range(9))).num_blocks == 2


def test_tail_blocks_are_evicted_first() -> None:
    manager = make_manager(num_blocks=3)
    first = make_choice(range(12))
    compute(manager, first, 12)
    manager.free(first)
    other = make_choice([20] * 4)
    compute(manager, other, 4)
    assert manager.find_hit(make_choice(range(13))).num_blocks == 2


@pytest.mark.parametrize("num_prompt", [1, 4, 5, 6, 9])
def test_a_fork_shares_full_blocks_and_copies_the_last(num_prompt: int) -> None:
    manager = make_manager((None, 3))
    parent = make_choice(range(num_prompt))
    child = make_choice(range(num_prompt), index=1)
    compute(manager, parent, num_prompt)
    copies = manager.fork(parent, child)
    assert parent.blocks is not None and child.blocks is not None and copies is not None
    num_full, rest = divmod(num_prompt - 1, BLOCK)
    assert len(copies) == (2 if rest else 0)
    mine, theirs = child.blocks.tables, parent.blocks.tables
    assert mine[0][:num_full] == theirs[0][:num_full]
    for group, copy in enumerate(copies):
        assert (copy.source, copy.target) == (theirs[group][num_full], mine[group][num_full])
        assert copy.source != copy.target
    assert manager.check([parent, child], copies) == []
    manager.free(parent)
    assert manager.check([child], copies) == []
    manager.release_copy_sources(copies)
    manager.free(child)
    assert manager.num_free_blocks == 100


def test_a_fork_without_blocks_for_the_copy_changes_nothing() -> None:
    manager = make_manager(num_blocks=2)
    parent, child = make_choice(range(7)), make_choice(range(7), index=1)
    compute(manager, parent, 7)
    assert manager.fork(parent, child) is None
    assert child.blocks is None and manager.check([parent], []) == []


def test_tainted_blocks_leave_the_cache_and_are_zeroed() -> None:
    manager = make_manager()
    choice = make_choice(range(9))
    compute(manager, choice, 9)
    assert choice.blocks is not None
    held = set(choice.blocks.tables[0])
    manager.free(choice, taint=True)
    assert set(manager.take_blocks_to_zero()) == held
    assert manager.find_hit(choice).num_blocks == 0


def test_a_reset_keeps_what_is_in_progress_out_of_the_cache() -> None:
    manager = make_manager()
    choice = make_choice(range(17))
    compute(manager, choice, 8)
    manager.reset_prefix_cache([choice])
    compute(manager, choice, 17)
    assert manager.find_hit(choice).num_blocks == 0
    compute(manager, make_choice(range(8)), 8)
    assert manager.find_hit(choice).num_blocks == 2, "nothing that builds on old values"
    manager.free(choice)
    compute(manager, choice, 17)  # from the start: good again
    assert manager.find_hit(choice).num_blocks == 4
