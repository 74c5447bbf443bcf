"""The router: whom it chooses, what it counts, and how well that balances."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.configs.sampling_params import SamplingParams
from headrace.engine_core import router as router_module
from headrace.engine_core.messages import ROUTING_REASONS, ChoiceState, EngineCoreRequest
from headrace.engine_core.output_lengths import UNKNOWN_LENGTH, OutputLengths
from headrace.engine_core.router import RecentPrefixes, Router, prefix_hashes, spread

BLOCK_SIZE = 4


def make_request(
    name: str,
    prompt: list[int] | None = None,
    max_tokens: int | None = 10,
    n: int = 1,
    known: int = 0,
    salt: str | None = None,
) -> EngineCoreRequest:
    params = SamplingParams(n=n, max_tokens=max_tokens)
    choices = [ChoiceState(index, [1] * known) for index in range(n)]
    return EngineCoreRequest(name, prompt or [1], params, None, 0.0, choices, cache_salt=salt)


def make_router(num_replicas: int, num_blocks: int = 1000, **options: bool) -> Router:
    router = Router(**options)
    for rank in range(num_replicas):
        router.add_replica(rank, BLOCK_SIZE, num_blocks)
    return router


def test_ties_rotate() -> None:
    """Also where the load is what it was before each choice."""
    router = make_router(4)
    for i in range(40):
        rank = router.place(make_request(str(i)))
        router.forget(str(i))
        assert router.load(rank) == 0
    counts = Counter({rank: sum(found.values()) for rank, found in router.decisions.items()})
    assert set(counts.values()) == {10}


def test_the_least_loaded_one() -> None:
    router = make_router(3)
    for rank, tokens in enumerate((500, 300, 400)):
        router.report(rank, tokens, 0)
    assert [router.place(make_request(str(i), max_tokens=90)) for i in range(3)] == [1, 1, 2]
    assert router.decisions[1] == {"load": 2}


def test_increments_stay_until_a_report_counts_them() -> None:
    router = make_router(1)
    costs = []
    for i in range(3):
        router.place(make_request(str(i), [1] * (5 + i), max_tokens=10))
        costs.append(15 + i)
    assert router.load(0) == sum(costs)
    router.report(0, 0, 0)  # an old one
    assert router.load(0) == sum(costs)
    router.report(0, 27, 2)  # it counts the first two
    assert router.load(0) == 27 + costs[2]
    router.forget("2")
    assert router.load(0) == 27
    router.forget("2")
    router.forget("0")  # what is counted comes off with the next report
    assert router.load(0) == 27
    router.report(0, 0, 3)
    assert router.load(0) == 0


def test_the_cost_of_a_replay_and_of_several_choices() -> None:
    router = make_router(1)
    router.place(make_request("a", [1] * 7, max_tokens=20, n=2, known=5))
    assert router.load(0) == 7 + 2 * (5 + 15)
    router.forget("a")
    router.place(make_request("b", [1] * 7, max_tokens=None))
    assert router.load(0) == 7 + UNKNOWN_LENGTH


def test_a_prefix_goes_where_it_was_sent() -> None:
    router = make_router(4)
    prefix = list(range(100))
    first = router.place(make_request("a", [*prefix, 7]))
    router.report(first, 0, 1)
    for rank in range(4):
        router.report(rank, 30 if rank == first else 0, 1)  # a little busier than the others
    assert router.place(make_request("b", [*prefix, 8])) == first
    assert router.decisions[first] == {"load": 1, "prefix": 1}
    uncached = 101 - 100 // BLOCK_SIZE * BLOCK_SIZE
    assert router.load(first) == 30 + uncached + 10
    router.report(first, 5000, 2)  # more to do there than the prefix saves
    assert router.place(make_request("c", [*prefix, 9])) != first


@pytest.mark.parametrize("what", ["salt", "reset", "lost", "evicted"])
def test_no_affinity_without_a_cache_entry(what: str) -> None:
    router = make_router(2, num_blocks=30)
    prefix = list(range(100))
    first = router.place(make_request("a", prefix))
    if what == "reset":
        router.forget_prefixes()
    elif what == "lost":
        router.add_replica(first, BLOCK_SIZE, 30)
    elif what == "evicted":
        router.place(make_request("x", list(range(500, 620))), [first])
        router.report(first, 0, 2)
    router.report(first, 20, 2)
    router.report(1 - first, 0, 0)
    salt = "s" if what == "salt" else None
    assert router.place(make_request("b", prefix, salt=salt)) != first


def test_several_clients_look_for_a_prefix_in_one_place() -> None:
    """Without a word to each other; a busy one is left alone."""
    prompts = [[i] * 200 for i in range(20)]
    homes = []
    for turn in range(3):
        router = Router(turn, has_others=True)
        for rank in range(4):
            router.add_replica(rank, BLOCK_SIZE, 1000)
        ranks = []
        for i, prompt in enumerate(prompts):
            ranks.append(router.place(make_request(str(i), [*prompt, turn])))
            router.forget(str(i))
        homes.append(ranks)
    assert homes[0] == homes[1] == homes[2] and len(set(homes[0])) > 1
    router = make_router(2, has_others=True)
    home = router.place(make_request("a", prompts[0]))
    router.report(home, 1000, 1)
    router.forget_prefixes()
    assert router.place(make_request("b", prompts[0])) != home


def test_the_reasons() -> None:
    router = make_router(2)
    assert router.place(make_request("a"), [1], "pinned") == 1
    assert router.place(make_request("b"), [1]) == 1
    router.remove_replica(0)
    assert router.place(make_request("c"), reason="moved") == 1
    router.place(make_request("d"))
    assert router.decisions == {0: {}, 1: {"pinned": 1, "only": 2, "moved": 1}}
    assert {name for counts in router.decisions.values() for name in counts} <= set(ROUTING_REASONS)


def test_hashes_are_of_full_blocks_before_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def hashes(prompt: list[int]) -> list[int]:
        return prefix_hashes(make_request("a", prompt), BLOCK_SIZE)

    assert [len(hashes([1] * length)) for length in (1, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]
    long, other = hashes(list(range(20))), hashes([9, *range(1, 20)])
    assert not set(long) & set(other)
    assert hashes([*range(8), 0, 0, 0, 0, 0])[:2] == long[:2]
    monkeypatch.setattr(router_module, "MAX_HASHED_BLOCKS", 3)
    assert hashes(list(range(20))) == long[:3]


@given(
    st.lists(st.lists(st.integers(0, 40), unique=True, max_size=12), max_size=30),
    st.integers(1, 20),
)
def test_remembered_prefixes_are_bounded_and_the_last_ones(
    prompts: list[list[int]], max_blocks: int
) -> None:
    recent = RecentPrefixes(max_blocks)
    for hashes in prompts:
        recent.add(hashes)
        assert len(recent) <= max_blocks
        assert recent.num_found(hashes) == min(len(hashes), max_blocks)


def test_lengths_are_learnt_by_size_of_limit() -> None:
    lengths = OutputLengths()
    assert lengths.expected(5) == 5 and lengths.expected(10**6) == UNKNOWN_LENGTH
    assert lengths.expected(0) == 1
    for _ in range(2000):
        lengths.add(4000, 100)
        lengths.add(50, 50)
    assert 80 <= lengths.expected(4000) <= 120 and lengths.expected(50) == 50
    for _ in range(2000):
        lengths.add(4000, 2000)
    assert lengths.expected(4000) > 1500


class Routing(RuleBasedStateMachine):
    """Against a model that keeps everything: loads are sums, and every placed request is counted
    exactly once, whatever is reported, lost or forgotten in between.
    """

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.reported: dict[int, int] = {}
        self.sent: dict[int, list[tuple[str, int]]] = {}  # rank -> (request, cost), in order
        self.counted: dict[int, int] = {}
        self.gone: set[str] = set()
        self.num_placed = 0

    @rule(rank=st.integers(0, 3))
    def come_up(self, rank: int) -> None:
        self.router.add_replica(rank, BLOCK_SIZE, 50)
        self.reported[rank], self.sent[rank], self.counted[rank] = 0, [], 0

    @rule(rank=st.integers(0, 3))
    def lose(self, rank: int) -> None:
        self.router.remove_replica(rank)
        for books in (self.reported, self.sent, self.counted):
            books.pop(rank, None)

    @precondition(lambda self: self.reported)
    @rule(data=st.data(), prefix=st.integers(0, 3), length=st.integers(1, 30))
    def place(self, data: st.DataObject, prefix: int, length: int) -> None:
        among = data.draw(
            st.one_of(st.none(), st.sets(st.sampled_from(sorted(self.reported)), min_size=1))
        )
        name = str(self.num_placed)
        self.num_placed += 1
        before = {rank: self.router.load(rank) for rank in self.reported}
        rank = self.router.place(make_request(name, [prefix] * length), among)
        assert rank in (self.reported if among is None else among)
        cost = self.router.load(rank) - before[rank]
        assert 10 < cost <= length + 10
        self.sent[rank].append((name, cost))

    @precondition(lambda self: self.reported)
    @rule(data=st.data(), tokens=st.integers(0, 1000))
    def report(self, data: st.DataObject, tokens: int) -> None:
        rank = data.draw(st.sampled_from(sorted(self.reported)))
        count = data.draw(st.integers(self.counted[rank], len(self.sent[rank])))
        self.router.report(rank, tokens, count)
        self.reported[rank], self.counted[rank] = tokens, count

    @precondition(lambda self: self.num_placed)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        name = str(data.draw(st.integers(0, self.num_placed - 1)))
        self.router.forget(name)
        self.gone.add(name)

    @invariant()
    def loads_are_sums(self) -> None:
        assert self.router.ranks == sorted(self.reported)
        for rank, reported in self.reported.items():
            uncounted = self.sent[rank][self.counted[rank] :]
            assert self.router.load(rank) == reported + sum(
                cost for name, cost in uncounted if name not in self.gone
            )

    @invariant()
    def every_decision_is_counted(self) -> None:
        decisions = self.router.decisions.values()
        assert sum(sum(counts.values()) for counts in decisions) == self.num_placed


TestRouting = Routing.TestCase
TestRouting.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_spread() -> None:
    assert spread([]) == spread([0, 0]) == 1.0
    assert spread([1, 3]) == 1.5
