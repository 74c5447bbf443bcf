"""Random starts, steps, delayed results, aborts, cache resets and faults over a pool of a dozen
blocks.

The fake worker checks every read against the simulated KV memory; everything that is drained has
exactly the tokens of the pure function, and blocks and tables are back to the base line.
"""

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.engine_core.messages import EngineCoreRequest
from headrace.workers.protocol import ChoiceId
from tests.engine_core.factories import FakeEngine, make_request

PREFIXES = [[5] * 4, [5] * 8, [5, 6, 7, 8] * 3, [5] * 4 + [9] * 12]
LAYOUTS: list[tuple[int | None, ...]] = [(None,), (None, 5), (6,), (None, 1), (9, None, 3)]


class SchedulerMachine(RuleBasedStateMachine):
    """Drives one engine; `requests` is everything ever added."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, EngineCoreRequest] = {}
        self.engine: FakeEngine | None = None

    @initialize(
        windows=st.sampled_from(LAYOUTS),
        depth=st.sampled_from([1, 1, 2, 3]),
        policy=st.sampled_from(["fcfs", "priority"]),
        budget=st.sampled_from([3, 8, 16]),
        shared_prefill=st.sampled_from([None, None, 1, 4]),
        max_num_seqs=st.sampled_from([1, 2, 5]),
        caching=st.sampled_from([True, True, True, False]),
        max_bypasses=st.sampled_from([0, 2, 64]),
    )
    def start(
        self, windows: tuple[int | None, ...], depth: int, policy: str, budget: int,
        shared_prefill: int | None, max_num_seqs: int, caching: bool, max_bypasses: int,
    ) -> None:  # fmt: skip
        self.engine = FakeEngine(
            12, windows, depth, policy=policy, max_num_batched_tokens=budget,
            max_shared_prefill_tokens=shared_prefill, max_num_seqs=max_num_seqs,
            prefix_caching=caching, max_bypasses=max_bypasses, max_model_len=40,
        )  # fmt: skip

    @rule(
        prefix=st.sampled_from(PREFIXES),
        tail=st.lists(st.integers(0, 3), max_size=4),
        n=st.integers(1, 3),
        max_tokens=st.integers(1, 16),
        min_tokens=st.integers(0, 3),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, None, "a"]),
        stop=st.sampled_from([[], [], [3, 4]]),
        accepted=st.sampled_from([0, 0, 0, 1, 3]),
        scores=st.sampled_from([None, None, 0, 2]),
        alone=st.sampled_from([0, 0, 0, 2, 9, 15]),
    )
    def add(
        self, prefix: list[int], tail: list[int], n: int, max_tokens: int, min_tokens: int,
        priority: int, salt: str | None, stop: list[int], accepted: int, scores: int | None,
        alone: int,
    ) -> None:  # fmt: skip
        assert self.engine is not None
        request_id = str(len(self.requests))
        options: dict[str, Any] = {
            "n": n, "max_tokens": max_tokens, "min_tokens": min(min_tokens, max_tokens),
            "priority": priority, "cache_salt": salt, "stop_token_ids": stop,
            "arrival_time": float(len(self.requests)), "prompt_logprobs": scores,
        }  # fmt: skip
        request = make_request(request_id, prefix + tail, **options)
        if len(request.prompt_token_ids) + 1 > self.engine.max_total:
            return
        if accepted and n == 1:  # a replay: the first tokens of its own output are known already
            outputs, _, _ = self.engine.expected(request, 0)
            known = outputs[: min(accepted, len(outputs) - 1)]
            if scores is not None:
                options["num_prompt_logprobs_received"] = len(prefix + tail)
            request = make_request(request_id, prefix + tail, outputs=[known], **options)
        for choice in request.choices:
            choice.runs_alone_until = alone
        self.requests[request_id] = request
        self.engine.add(request)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        assert self.engine is not None
        for _ in range(count):
            self.engine.step()
            assert self.engine.scheduler.check_integrity() == []

    @precondition(lambda self: self.engine and len(self.engine.in_flight) < self.engine.depth)
    @rule()
    def schedule_only(self) -> None:
        assert self.engine is not None
        if (
            self.engine.schedule() is None
            and not self.engine.in_flight
            and self.engine.scheduler.stats().num_requests
        ):
            raise AssertionError("nothing in flight, and nothing scheduled")

    @precondition(lambda self: self.engine and self.engine.in_flight)
    @rule()
    def deliver_only(self) -> None:
        assert self.engine is not None
        self.engine.deliver()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), one=st.booleans())
    def abort(self, data: st.DataObject, one: bool) -> None:
        assert self.engine is not None
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        index = data.draw(st.integers(0, 2)) if one else None
        self.engine.abort(request_id, index)

    @rule()
    def reset_prefix_cache(self) -> None:
        assert self.engine is not None
        assert self.engine.scheduler.reset_prefix_cache()

    @precondition(lambda self: self.engine and self.engine.worker.rows)
    @rule(data=st.data())
    def inject_fault(self, data: st.DataObject) -> None:
        assert self.engine is not None
        ids = sorted(self.engine.worker.rows, key=str)
        self.engine.worker.fail_next.add(data.draw(st.sampled_from(ids)))

    @invariant()
    def accounts_balance(self) -> None:
        if self.engine is not None:
            assert self.engine.scheduler.check_integrity() == []

    def teardown(self) -> None:
        if self.engine is None:
            return
        engine = self.engine
        engine.worker.fail_next.clear()
        engine.drain()
        engine.assert_idle()
        for request in self.requests.values():
            for choice in request.choices:
                self._check_end(request, choice.index)

    def _check_end(self, request: EngineCoreRequest, index: int) -> None:
        assert self.engine is not None
        end = self.engine.finished[ChoiceId(request.request_id, index)]
        if end.finish_reason == "abort":
            return
        if end.finish_reason == "error":
            assert request.request_id in self.engine.worker.ever_poisoned
            return
        self.engine.assert_output(request, index)


SchedulerMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSchedulerMachine = SchedulerMachine.TestCase
