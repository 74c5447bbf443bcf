"""A real scheduler on a real, tiny model: whatever happens around a request, it gets the same
output.

Hypothesis drives starts, steps (with results delayed by one step or not), aborts, cache resets and
forks in a pool of a dozen blocks; every finished choice must equal the same request run alone, in
one chunk, without prefix cache; log-probabilities, those of prompts too, must agree within 1e-3.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.e2e.tiny_engine import (
    VARIANTS,
    VOCAB,
    ChoiceOutput,
    Machines,
    make_request,
    save_tiny_model,
)

pytestmark = pytest.mark.slow

NUM_EXAMPLES = 160
# Shared first blocks, equal later blocks after different first ones, and repeated blocks: what a
# prefix cache with a wrong chain of hashes would mix up.
PREFIXES = (
    (5, 6, 7, 8, 9, 10, 11, 12, 13),
    (5, 6, 7, 8, 20, 21, 22, 23, 24, 25, 26, 27, 28),
    (14, 15, 16, 17, 9, 10, 11, 12, 13, 18, 19, 20, 21),
    (5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7, 8, 5),
)


class BatchMachine(RuleBasedStateMachine):
    """Random life around requests; `machines` knows what each choice must give."""

    machines: Machines

    @initialize(prefix_caching=st.booleans(), depth=st.integers(1, 2))
    def start(self, prefix_caching: bool, depth: int) -> None:
        # The expectations of earlier examples are cached; new ones are made before this
        # engine's
        # table exists, since both share the worker.
        self.engine = self.machines.engine(prefix_caching)
        self.depth = depth
        self.requests: dict[str, tuple[tuple[int, ...], int, int, int]] = {}
        self.got: dict[tuple[str, int], ChoiceOutput] = {}
        self.ended: set[tuple[str, int]] = set()
        self.aborted: set[tuple[str, int]] = set()

    @rule(
        prefix=st.sampled_from(PREFIXES), keep=st.integers(1, 13),
        tail=st.lists(st.integers(4, VOCAB - 1), max_size=6), seed=st.integers(0, 2),
        n=st.integers(1, 3), max_tokens=st.integers(1, 12),
        variant=st.integers(0, len(VARIANTS) - 1),
    )  # fmt: skip
    def add(
        self, prefix: tuple[int, ...], keep: int, tail: list[int], seed: int, n: int,
        max_tokens: int, variant: int,
    ) -> None:  # fmt: skip
        prompt = prefix[:keep] + tuple(tail)
        n = 1 if seed == 0 else n
        name = f"r{len(self.requests)}"
        self.requests[name] = (prompt, seed, max_tokens, variant)
        request = make_request(name, prompt, seed, max_tokens, list(range(n)), variant)
        self.engine.scheduler.add_request(request)
        self.got.update({(name, index): ChoiceOutput() for index in range(n)})

    @rule()
    def step(self) -> None:
        if not self.engine.schedule() or len(self.engine.pending) >= self.depth:
            self.deliver()

    @precondition(lambda self: len(self.engine.pending) > 0)
    @rule()
    def deliver(self) -> None:
        if not self.engine.pending:
            return
        for output in self.engine.deliver():
            self.got[output.request_id, output.index].add(output)
            if output.finish_reason is not None:
                self.ended.add((output.request_id, output.index))

    @precondition(lambda self: len(self.requests) > 0)
    @rule(data=st.data(), whole=st.booleans())
    def abort(self, data: st.DataObject, whole: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        index = None if whole else data.draw(st.integers(0, 2))
        for output in self.engine.scheduler.abort(name, index):
            assert output.finish_reason == "abort"
            self.ended.add((name, output.index))
            self.aborted.add((name, output.index))

    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.scheduler.reset_prefix_cache()

    @invariant()
    def accounting_holds(self) -> None:
        if hasattr(self, "engine"):
            assert self.engine.scheduler.check_integrity() == []

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(2000):
            if not self.engine.schedule() and not self.engine.pending:
                break
            self.deliver()
            self.accounting_holds()
        assert not self.engine.scheduler.stats().num_requests
        stats = self.engine.scheduler.stats()
        assert (stats.num_requests, stats.num_free_blocks) == (0, stats.num_blocks)
        assert self.ended == set(self.got)
        for (name, index), got in self.got.items():
            prompt, seed, max_tokens, variant = self.requests[name]
            want = self.machines.alone(prompt, seed, index, max_tokens, variant)
            is_aborted = (name, index) in self.aborted
            count = len(got.tokens) if is_aborted else None
            assert got.tokens == want.tokens[:count], (name, index)
            assert got.logprobs == pytest.approx(want.logprobs[:count], abs=1e-3)
            num_scores = len(got.scores) if is_aborted else None
            assert got.scores == pytest.approx(want.scores[:num_scores], abs=1e-3)


def make_machine(machines: Machines) -> type[BatchMachine]:
    return type("BatchMachine", (BatchMachine,), {"machines": machines})


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def machines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Machines:
    return Machines(save_tiny_model(request.param, tmp_path_factory.mktemp(request.param)))


def test_output_does_not_depend_on_what_else_runs(machines: Machines) -> None:
    run_state_machine_as_test(
        make_machine(machines),
        settings=settings(
            max_examples=NUM_EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
