"""The fence of `schedule` (PP05): whatever breaks while one choice is prepared ends that choice
alone.
"""

from collections.abc import Callable
from typing import Any

import pytest

from headrace.engine_core.forks import Forks
from headrace.engine_core.kv_cache_manager import KVCacheManager
from headrace.engine_core.messages import EngineCoreRequest
from headrace.engine_core.step_orders import StepOrders
from headrace.workers.protocol import ChoiceId, SchedulerOutput
from tests.engine_core.factories import FakeEngine, make_request

PLACES: list[tuple[type, str]] = [
    (KVCacheManager, "find_hit"),
    (KVCacheManager, "attach"),
    (KVCacheManager, "allocate"),
    (KVCacheManager, "admission_cost"),
    (KVCacheManager, "owed_blocks"),
    (KVCacheManager, "take_unsent"),
    (KVCacheManager, "fork"),
    (KVCacheManager, "free"),
    (Forks, "admitted"),
    (StepOrders, "add"),
]


def make_requests() -> list[EngineCoreRequest]:
    """More than the pool holds: with prefix hits, forks, chunks and preemption."""
    return [
        make_request("a", [5] * 9, n=2, max_tokens=12, ignore_eos=True, arrival_time=0.0),
        make_request("b", [5] * 9, max_tokens=14, ignore_eos=True, arrival_time=1.0),
        make_request("c", [5] * 8 + [6] * 9, max_tokens=9, ignore_eos=True, arrival_time=2.0),
        make_request("d", [7] * 3, n=3, max_tokens=8, ignore_eos=True, arrival_time=3.0),
        make_request("e", [7] * 6, max_tokens=8, ignore_eos=True, arrival_time=4.0),
    ]


def run(engine: FakeEngine) -> None:
    for request in make_requests():
        engine.add(request)
        engine.step()
    engine.drain()
    engine.assert_idle()


class Injector:
    """Raises at one call of a method, if that is made by `schedule`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, place: tuple[type, str], at: int) -> None:
        self.num_calls = 0
        self.at = at
        self._is_scheduling = False
        owner, name = place
        monkeypatch.setattr(owner, name, self._wrap(getattr(owner, name)))

    def _wrap(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            if self._is_scheduling:
                self.num_calls += 1
                if self.num_calls == self.at:
                    raise ArithmeticError("injected")
            return method(*args, **options)

        return wrapped

    def watch(self, engine: FakeEngine) -> None:
        schedule = engine.scheduler.schedule

        def watched() -> SchedulerOutput | None:
            self._is_scheduling = True
            try:
                return schedule()
            finally:
                self._is_scheduling = False

        engine.scheduler.schedule = watched  # type: ignore[method-assign]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[1])
def test_one_fault_ends_one_choice(place: tuple[type, str], depth: int) -> None:
    """At the first calls, and at some of the later ones."""
    with pytest.MonkeyPatch.context() as patch:
        counter = Injector(patch, place, at=0)
        engine = FakeEngine(num_blocks=10, depth=depth)
        counter.watch(engine)
        run(engine)
    assert engine.scheduler.stats().num_preemptions > 0 and counter.num_calls > 0
    calls = [*range(1, 12), *range(12, counter.num_calls, max(1, counter.num_calls // 20))]
    for at in calls:
        with pytest.MonkeyPatch.context() as patch:
            injector = Injector(patch, place, at)
            engine = FakeEngine(num_blocks=10, depth=depth)
            injector.watch(engine)
            run(engine)
        if injector.num_calls >= at:
            assert_one_failed(engine)


def assert_one_failed(engine: FakeEngine) -> None:
    failed = 0
    for request in make_requests():
        for choice in request.choices:
            end = engine.finished[ChoiceId(request.request_id, choice.index)]
            if end.finish_reason != "error":
                engine.assert_output(request, choice.index)
                continue
            failed += 1
            assert end.fault is not None and end.fault.code == "request_failed"
            assert end.fault.message == "internal error: ArithmeticError"
    assert failed == 1
    assert engine.scheduler.stats().accounting_errors == 0


def test_a_fault_that_is_nobodys_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    engine.add(make_request("a", [1]))

    def broken(*_: object) -> None:
        raise ArithmeticError("injected")

    monkeypatch.setattr(Forks, "take_copies", broken)
    with pytest.raises(ArithmeticError):
        engine.schedule()


def test_a_failure_is_reported_although_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()

    def broken(*_: object) -> None:
        raise ArithmeticError("injected")

    monkeypatch.setattr(KVCacheManager, "find_hit", broken)
    engine.add(make_request("a", [1], n=2))
    engine.drain()
    ends = [engine.finished[ChoiceId("a", index)] for index in range(2)]
    assert [end.finish_reason for end in ends] == ["error", "error"]
    engine.assert_idle()


def make_ranked_requests() -> list[EngineCoreRequest]:
    """Each more important than those before it, and more than the pool holds together."""
    return [
        make_request("low", [5] * 9, max_tokens=20, ignore_eos=True, priority=9),
        make_request("mid", [6] * 9, n=2, max_tokens=12, ignore_eos=True, priority=5),
        make_request("high", [7] * 17, max_tokens=9, ignore_eos=True, priority=1),
        make_request("top", [8] * 17, max_tokens=9, ignore_eos=True, priority=0),
    ]


def test_a_fault_of_a_victim_does_not_lose_whom_it_makes_room_for() -> None:
    """The waiting choice is out of the queue while the victim that cannot be preempted fails."""
    num_failed = 0
    for at in range(1, 20):
        with pytest.MonkeyPatch.context() as patch:
            injector = Injector(patch, (KVCacheManager, "free"), at)
            engine = FakeEngine(num_blocks=10, policy="priority")
            injector.watch(engine)
            requests = make_ranked_requests()
            for request in requests:
                engine.add(request)
                engine.step()
            engine.drain()
            engine.assert_idle()
        for request in requests:
            for choice in request.choices:
                end = engine.finished[ChoiceId(request.request_id, choice.index)]
                if end.finish_reason == "error":
                    num_failed += 1
                else:
                    engine.assert_output(request, choice.index)
    assert 0 < num_failed < 20


def test_suspects_have_steps_of_their_own_in_turn_with_the_others() -> None:
    engine = FakeEngine(num_blocks=40, max_num_seqs=4)
    suspects = [make_request(f"s{i}", [7, i, 3], max_tokens=6, ignore_eos=True) for i in (0, 1)]
    others = [make_request(f"o{i}", [8, i], max_tokens=12, ignore_eos=True) for i in (0, 1)]
    for suspect in suspects:
        suspect.choices[0].runs_alone_until = 5
    for request in (*suspects, *others):
        engine.add(request)
    sizes = []
    for _ in range(12):
        step = engine.schedule()
        assert step is not None
        sizes.append(len(step.num_scheduled_tokens))
        engine.deliver()
    # Three steps each (the prompt, two tokens), every other one; then they join the others. The
    # first has all its tokens when the second joins.
    assert sizes == [1, 2, 1, 2, 1, 3, 1, 3, 1, 3, 1, 3]
    engine.drain()
    engine.assert_idle()
    for request in (*suspects, *others):
        engine.assert_output(request)
    assert engine.num_alone_steps == 6


def test_a_suspect_gets_room_and_place_whatever_runs() -> None:
    engine = FakeEngine(num_blocks=6, max_num_seqs=1)
    other = make_request("o", [5] * 8, max_tokens=12, ignore_eos=True)
    suspect = make_request("s", [6] * 12, max_tokens=4, ignore_eos=True)
    suspect.choices[0].runs_alone_until = 14
    engine.add(other)
    engine.step()
    engine.add(suspect)
    engine.drain()
    engine.assert_idle()
    assert engine.num_alone_steps == 3
    for request in (other, suspect):
        engine.assert_output(request)
