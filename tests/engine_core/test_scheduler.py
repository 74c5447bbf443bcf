"""The scheduler, rule by rule, over the fake worker of `factories`."""

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.configs.errors import InvalidRequestError
from headrace.engine_core.messages import ChoiceState
from headrace.engine_core.request import Choice
from headrace.workers.protocol import ChoiceId, ModelRunnerOutput, RequestFault, SampledTokens
from tests.engine_core.factories import (
    EOS,
    VOCAB_SIZE,
    FakeEngine,
    expected_output,
    make_request,
    make_scheduler,
)

# -- admission ------------------------------------------------------------------------------------


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers() -> None:
    engine = FakeEngine(num_blocks=8, max_model_len=100)
    with pytest.raises(InvalidRequestError) as error:
        engine.add(make_request("long", [1] * 36))
    for number in ("37", "32", "8 blocks", "100"):
        assert number in str(error.value)
    assert error.value.parameter == "prompt"
    for index in range(10):
        engine.add(make_request(str(index), [index] * 5))
    engine.drain()
    assert len(engine.finished) == 10
    engine.assert_idle()


@pytest.mark.parametrize(("length", "fits"), [(11, True), (12, False), (13, False)])
def test_a_prompt_needs_room_for_one_token(length: int, fits: bool) -> None:
    engine = FakeEngine(max_model_len=12)
    request = make_request("a", [1] * length, max_tokens=None, ignore_eos=True)
    if not fits:
        with pytest.raises(InvalidRequestError, match="max_model_len is 12"):
            engine.add(request)
        return
    engine.add(request)
    engine.drain()
    assert len(engine.tokens[ChoiceId("a")]) == 1
    assert engine.finished[ChoiceId("a")].finish_reason == "length"


BAD_IDS = [[], [0, VOCAB_SIZE], [-1], [True], [1.5], ["1"], [2**63], [None], [[]]]


@pytest.mark.parametrize("prompt", BAD_IDS)
def test_bad_prompt_ids_are_refused(prompt: list[Any]) -> None:
    scheduler = make_scheduler()
    with pytest.raises(InvalidRequestError):
        scheduler.add_request(make_request("a", prompt))
    assert not scheduler.has_work() and scheduler.schedule() is None


def test_malformed_requests_are_refused_and_nothing_is_kept() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("twice", [1]))
    bad = [
        make_request("twice", [1]),
        make_request("", [1]),
        make_request("a", [1], stop_token_ids=[VOCAB_SIZE]),
        make_request("a", [1], allowed_token_ids=[-1]),
        make_request("a", [1], logit_bias={VOCAB_SIZE: 1.0}),
        make_request("a", [1], outputs=[[VOCAB_SIZE]]),
        make_request("a", [1], max_tokens=2, outputs=[[1, 1]]),
        make_request("a", [1], arrival_time=float("nan")),
    ]
    for indices in ([], [0, 0], [2], [-1]):
        request = make_request("a", [1], n=2)
        request.choices = [ChoiceState(index) for index in indices]
        bad.append(request)
    for request in bad:
        with pytest.raises(InvalidRequestError):
            scheduler.add_request(request)
    assert scheduler.stats().num_requests == scheduler.stats().num_waiting == 1


# -- stop conditions ------------------------------------------------------------------------------


def run_script(tokens: list[int], **options: Any) -> tuple[int, str | None, int | None]:
    """Feed one request the given samples: (tokens taken, finish reason, stop reason)."""
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [1, 2], **options))
    for count, token in enumerate(tokens, 1):
        step = scheduler.schedule()
        assert step is not None
        sampled = {ChoiceId("a"): SampledTokens([token])}
        (output,) = scheduler.update_from_output(step, ModelRunnerOutput(step.step, sampled))
        if output.finish_reason is not None:
            return count, output.finish_reason, output.stop_reason
    return len(tokens), None, None


@pytest.mark.parametrize(
    ("tokens", "options", "end"),
    [
        ([5, EOS, 5], {}, (2, "stop", None)),
        ([5, EOS, 5], {"ignore_eos": True}, (3, None, None)),
        ([5, EOS, 5], {"ignore_eos": True, "stop_token_ids": [EOS]}, (2, "stop", EOS)),
        ([5, EOS, 5], {"stop_token_ids": [EOS]}, (2, "stop", None)),
        ([5, 7, 5], {"stop_token_ids": [6, 7]}, (2, "stop", 7)),
        ([EOS, 7, EOS, 7], {"stop_token_ids": [7], "min_tokens": 3}, (3, "stop", None)),
        ([5, 5, 5, 5], {"max_tokens": 3}, (3, "length", None)),
        ([5, 5, EOS], {"max_tokens": 3}, (3, "stop", None)),
        ([5] * 70, {"max_tokens": None}, (46, "length", None)),
    ],
)
def test_stop_conditions(
    tokens: list[int], options: dict[str, Any], end: tuple[int, str | None, int | None]
) -> None:
    assert run_script(tokens, **{"max_tokens": 10, **options}) == end


# -- the token budget -----------------------------------------------------------------------------


def test_prefill_is_cut_into_chunks_and_reports_once() -> None:
    engine = FakeEngine(num_blocks=20, max_num_batched_tokens=8)
    engine.add(make_request("a", [1] * 30, max_tokens=1))
    counts = []
    while engine.scheduler.stats().num_requests:
        step = engine.schedule()
        assert step is not None
        counts.append(sum(step.num_scheduled_tokens.values()))
        outputs = engine.deliver()
        assert len(outputs) == (1 if sum(counts) == 30 else 0)
    assert counts == [8, 8, 8, 6]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6)), min_size=1, max_size=8),
    st.integers(4, 40),
)
def test_with_ample_memory_no_budget_is_wasted(sizes: list[tuple[int, int]], budget: int) -> None:
    engine = FakeEngine(
        500, max_num_batched_tokens=budget, max_num_seqs=16, prefix_caching=False, max_model_len=64
    )
    left = {}  # tokens still to compute, by brute force: prompt, then one for each further output
    for index, (length, max_tokens) in enumerate(sizes):
        request = make_request(str(index), [index] * length, max_tokens=max_tokens, ignore_eos=True)
        engine.add(request)
        left[ChoiceId(str(index))] = length
    seen: set[ChoiceId] = set()
    while engine.scheduler.stats().num_requests:
        step = engine.schedule()
        assert step is not None
        counts = step.num_scheduled_tokens
        admitted = counts.keys() - seen
        seen |= admitted
        assert all(0 < count <= left[choice] for choice, count in counts.items())
        if not admitted:
            assert sum(counts.values()) == min(budget, sum(left.values()))
        for choice, count in counts.items():
            left[choice] -= count
        for output in engine.deliver():
            choice = ChoiceId(output.request_id, output.index)
            assert left[choice] == 0
            left[choice] = 0 if output.finish_reason else 1
    assert engine.scheduler.stats().num_preemptions == 0


def test_short_prompts_do_not_wait_for_a_long_one() -> None:
    engine = FakeEngine(
        num_blocks=600, max_num_batched_tokens=64, max_num_seqs=32, max_model_len=2048,
        prefix_caching=False,
    )  # fmt: skip
    engine.add(make_request("long", [1] * 1600, max_tokens=4))
    engine.step()
    for index in range(20):
        engine.add(make_request(str(index), [index % 30] * 10, max_tokens=4, ignore_eos=True))
    added_at = engine.num_steps
    first_token: dict[str, int] = {}
    long_progress = []
    while engine.scheduler.stats().num_requests:
        step = engine.schedule()
        assert step is not None
        long_progress.append(step.num_scheduled_tokens.get(ChoiceId("long"), 0))
        for output in engine.deliver():
            first_token.setdefault(output.request_id, engine.num_steps - added_at)
    # 200 tokens of short prompts at 3/4 of 64 a step, whatever the long one wants.
    assert max(first_token[str(index)] for index in range(20)) <= 6
    assert 0 not in long_progress[:20], "and the long one goes on"
    assert first_token["long"] <= 1600 / 64 + 12


def test_running_decodes_go_on_beside_a_long_prefill() -> None:
    engine = FakeEngine(num_blocks=200, max_num_batched_tokens=16, max_model_len=512)
    engine.add(make_request("long", [1] * 400, arrival_time=0.0))
    engine.add(make_request("short", [2] * 2, max_tokens=9, ignore_eos=True, arrival_time=1.0))
    engine.step()
    for _ in range(8):
        assert [output.request_id for output in engine.step()] == ["short"]


# -- order ----------------------------------------------------------------------------------------


def first_scheduled(engine: FakeEngine) -> list[str]:
    order: dict[str, None] = {}
    while engine.scheduler.stats().num_requests:
        step = engine.schedule()
        assert step is not None
        order.update((choice.request_id, None) for choice in step.num_scheduled_tokens)
        engine.deliver()
    return list(order)


def test_fcfs_goes_by_arrival() -> None:
    engine = FakeEngine(max_num_seqs=1)
    for name, arrival in (("b", 2.0), ("c", 3.0), ("a", 1.0)):
        engine.add(make_request(name, [1] * 3, arrival_time=arrival))
    assert first_scheduled(engine) == ["a", "b", "c"]


def test_an_arrival_in_the_future_is_now() -> None:
    engine = FakeEngine(max_num_seqs=1, clock=lambda: 5.0)
    engine.add(make_request("a", [1], arrival_time=99.0))
    engine.add(make_request("b", [1], arrival_time=6.0))
    assert first_scheduled(engine) == ["a", "b"]


def test_priority_goes_by_level_and_age() -> None:
    engine = FakeEngine(max_num_seqs=1, policy="priority", ageing_s=10.0)
    engine.add(make_request("runs", [1] * 3, priority=-9))
    engine.step()
    engine.add(make_request("late-0", [1] * 3, priority=0, arrival_time=25.0))
    engine.add(make_request("early-2", [1] * 3, priority=2, arrival_time=1.0))
    engine.add(make_request("late-2", [1] * 3, priority=2, arrival_time=25.0))
    assert first_scheduled(engine) == ["runs", "early-2", "late-0", "late-2"]


def test_a_more_important_request_preempts_for_a_place_and_for_blocks() -> None:
    for seqs, blocks in ((2, 100), (8, 9)):
        engine = FakeEngine(blocks, policy="priority", max_num_seqs=seqs, prefix_caching=False)
        engine.add(make_request("low", [1] * 10, priority=5, max_tokens=8, ignore_eos=True))
        engine.add(make_request("mid", [2] * 10, priority=4, max_tokens=8, ignore_eos=True))
        engine.step()
        engine.step()
        urgent = make_request("urgent", [3] * 10, priority=0, max_tokens=3, ignore_eos=True)
        engine.add(urgent)
        step = engine.schedule()
        assert step is not None
        names = {choice.request_id for choice in step.num_scheduled_tokens}
        assert "urgent" in names and "low" not in names and "mid" in names
        engine.drain()
        assert engine.scheduler.stats().num_preemptions >= 1
        engine.assert_output(urgent)
        engine.assert_idle()


def test_equal_priorities_do_not_preempt_one_another() -> None:
    engine = FakeEngine(policy="priority", max_num_seqs=1)
    engine.add(make_request("a", [1] * 3, arrival_time=5.0, max_tokens=9, ignore_eos=True))
    engine.step()
    engine.add(make_request("b", [1] * 3, arrival_time=1.0))
    engine.drain()
    assert engine.scheduler.stats().num_preemptions == 0


@pytest.mark.parametrize("max_bypasses", [0, 3])
def test_a_head_that_does_not_fit_is_overtaken_a_bounded_number_of_times(max_bypasses: int) -> None:
    engine = FakeEngine(
        num_blocks=12, max_bypasses=max_bypasses, max_num_seqs=8, prefix_caching=False
    )
    engine.add(make_request("runs", [1] * 10, max_tokens=20, ignore_eos=True))
    engine.step()
    engine.add(make_request("big", [2] * 36, arrival_time=1.0))
    for index in range(10):
        engine.add(make_request(f"s{index}", [3] * 2, max_tokens=2, arrival_time=2.0 + index))
    order = first_scheduled(engine)
    assert order.index("big") == 1 + max_bypasses
    engine.drain()
    engine.assert_idle()


# -- preemption and replay ------------------------------------------------------------------------


def test_the_youngest_is_preempted_and_keeps_its_tokens() -> None:
    engine = FakeEngine(num_blocks=8, max_num_seqs=4, prefix_caching=False)
    requests = [
        make_request(name, [value] * 7, max_tokens=16, ignore_eos=True, arrival_time=float(value))
        for name, value in (("old", 1), ("young", 2))
    ]
    for request in requests:
        engine.add(request)
    while engine.scheduler.stats().num_preemptions == 0:
        engine.step()
    step = engine.schedule()
    assert step is not None and {c.request_id for c in step.num_scheduled_tokens} == {"old"}
    num_before = len(engine.tokens[ChoiceId("young")])
    assert num_before > 0
    engine.drain()
    for request in requests:
        engine.assert_output(request)
    engine.assert_idle()


@pytest.mark.parametrize("windows", [(None,), (5, None)])
def test_a_request_can_be_rebuilt_at_every_position(windows: tuple[int | None, ...]) -> None:
    request = make_request("a", [1, 2, 3, 4, 5, 6, 7], max_tokens=9, n=2, min_tokens=9)
    outputs = [expected_output(request, index, 64)[0] for index in range(2)]
    for position in range(9):
        engine = FakeEngine(30, windows)
        replay = make_request(
            "a", request.prompt_token_ids, max_tokens=9, n=2, min_tokens=9,
            outputs=[ids[:position] for ids in outputs],
        )  # fmt: skip
        engine.add(replay)
        engine.drain()
        for index in range(2):
            engine.assert_output(request, index)
        engine.assert_idle()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 14), st.integers(1, 9), st.integers(1, 3)), max_size=6),
    st.integers(7, 20),
    st.integers(2, 4),
)
def test_run_ahead_gives_the_same_tokens(
    sizes: list[tuple[int, int, int]], num_blocks: int, depth: int
) -> None:
    results = []
    for steps_ahead in (1, depth):
        engine = FakeEngine(num_blocks, depth=steps_ahead)
        for index, (length, max_tokens, n) in enumerate(sizes):
            engine.add(make_request(str(index), [index] * length, max_tokens=max_tokens, n=n))
        engine.drain()
        engine.assert_idle()
        results.append(engine.tokens)
    assert results[0] == results[1]


def test_run_ahead_never_schedules_past_max_tokens() -> None:
    engine = FakeEngine(depth=3)
    engine.add(make_request("a", [1], max_tokens=2, ignore_eos=True))
    assert engine.schedule() is not None and engine.schedule() is not None
    assert engine.schedule() is None
    assert engine.worker.forwards == 2
    engine.drain()
    engine.assert_idle()


# -- prefix cache ---------------------------------------------------------------------------------


def cached_tokens(engine: FakeEngine, name: str, prompt: list[int], **options: Any) -> int:
    request = make_request(name, prompt, **options)
    engine.add(request)
    engine.drain()
    engine.assert_output(request)
    return engine.finished[ChoiceId(name)].num_cached_tokens


def test_full_blocks_of_an_equal_prefix_are_found() -> None:
    engine = FakeEngine(num_blocks=30)
    prompt = [7] * 14
    assert cached_tokens(engine, "a", prompt) == 0
    before = engine.worker.forwards
    assert cached_tokens(engine, "b", prompt, max_tokens=1) == 12
    assert engine.worker.forwards == before + 2
    assert cached_tokens(engine, "c", prompt[:12]) == 8, "the last token is always computed"
    assert cached_tokens(engine, "d", [*prompt[:5], 8, 8, 8, 8, 8]) == 4
    assert cached_tokens(engine, "salted", prompt, cache_salt="x") == 0
    assert cached_tokens(engine, "salted again", prompt, cache_salt="x") == 12
    assert cached_tokens(engine, "new weights", prompt, weight_version="2") == 0
    assert cached_tokens(engine, "scored", prompt, prompt_logprobs=1) == 0
    stats = engine.scheduler.stats()
    assert stats.prefix_cache_hits == 12 + 8 + 4 + 12
    assert stats.prefix_cache_queries == 14 * 6 + 12 + 10
    assert engine.scheduler.reset_prefix_cache() is True
    assert cached_tokens(engine, "e", prompt) == 0


def test_output_blocks_are_cached_too() -> None:
    engine = FakeEngine(num_blocks=30)
    first = make_request("a", [3, 4, 5], max_tokens=12, ignore_eos=True)
    engine.add(first)
    engine.drain()
    # 3 + 12 tokens, of which the last is never computed.
    longer = first.prompt_token_ids + engine.tokens[ChoiceId("a")]
    assert cached_tokens(engine, "b", [*longer, 1]) == 12


def test_no_prefix_cache_when_switched_off() -> None:
    engine = FakeEngine(num_blocks=30, prefix_caching=False)
    assert cached_tokens(engine, "a", [7] * 14) == cached_tokens(engine, "b", [7] * 14) == 0


# -- forks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 4, 5, 7, 13])
@pytest.mark.parametrize("windows", [(None,), (None, 3)])
def test_children_share_the_prompt(length: int, windows: tuple[int | None, ...]) -> None:
    engine = FakeEngine(60, windows, prefix_caching=False, max_num_batched_tokens=64)
    request = make_request("a", [1] * length, n=3, max_tokens=1)
    engine.add(request)
    engine.drain()
    for index in range(3):
        engine.assert_output(request, index)
    assert engine.worker.forwards == length + 2, "the children compute one token each"
    engine.assert_idle()


def test_children_go_on_alone_when_the_first_choice_ends_early() -> None:
    for steps in range(3):
        engine = FakeEngine(num_blocks=30, max_num_batched_tokens=8)
        request = make_request("a", [1] * 14, n=3)
        engine.add(request)
        for _ in range(steps):
            engine.step()
        engine.abort("a", 0)
        engine.drain()
        for index in (1, 2):
            engine.assert_output(request, index)
        assert engine.finished[ChoiceId("a", 0)].finish_reason == "abort"
        engine.assert_idle()


def test_waiting_children_give_their_blocks_back_first() -> None:
    engine = FakeEngine(num_blocks=6, max_num_seqs=1, prefix_caching=False)
    request = make_request("a", [1] * 6, n=3, max_tokens=17, ignore_eos=True)
    engine.add(request)
    engine.step()
    assert engine.scheduler.stats().num_free_blocks == 6 - 2 - 2, "two children hold a copy each"
    engine.drain()
    for index in range(3):
        engine.assert_output(request, index)
    assert engine.scheduler.stats().num_preemptions == 0
    engine.assert_idle()


# -- abort and failure ----------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("steps", range(6))
def test_an_abort_frees_everything_at_once(depth: int, steps: int) -> None:
    engine = FakeEngine(num_blocks=30, depth=depth, max_num_batched_tokens=8)
    engine.add(make_request("a", [1] * 20, n=3, max_tokens=9, ignore_eos=True))
    for _ in range(steps):
        engine.step()
    engine.abort("a")
    stats = engine.scheduler.stats()
    assert stats.num_free_blocks == stats.num_blocks and stats.num_requests == 0
    engine.abort("a")
    engine.abort("unknown", 7)
    assert engine.scheduler.has_work() == bool(engine.worker.rows)
    engine.drain()
    engine.assert_idle()


def test_finished_ids_reach_the_worker_without_further_work() -> None:
    engine = FakeEngine()
    engine.add(make_request("a", [1], max_tokens=1))
    engine.step()
    assert engine.scheduler.has_work() and not engine.scheduler.stats().num_requests
    step = engine.schedule()
    assert step is not None and step.finished == [ChoiceId("a")]
    assert step.num_scheduled_tokens == {}
    assert engine.deliver() == []
    assert not engine.scheduler.has_work() and engine.scheduler.schedule() is None


def test_bad_values_fail_one_choice_and_leave_no_trace() -> None:
    engine = FakeEngine(num_blocks=30)
    request = make_request("a", [1] * 9, n=2, max_tokens=5, ignore_eos=True)
    engine.add(request)
    engine.step()
    engine.step()
    engine.worker.fail_next.add(ChoiceId("a", 1))
    row = engine.worker.rows[ChoiceId("a", 1)]
    (output,) = [o for o in engine.step() if o.finish_reason]
    assert (output.index, output.finish_reason) == (1, "error")
    assert output.fault is not None and output.fault.code == "non_finite_logits"
    shared = set(engine.worker.rows[ChoiceId("a", 0)].tables[0]) & set(row.tables[0])
    assert shared
    step = engine.schedule()
    assert step is not None
    assert set(step.blocks_to_zero) == set(row.tables[0]) - shared
    engine.drain()
    engine.assert_output(request, 0)
    engine.assert_idle()
    assert cached_tokens(engine, "b", [1] * 9) == 0, "its blocks left the cache"


def test_a_failed_step_caches_nothing() -> None:
    engine = FakeEngine(num_blocks=30)
    engine.add(make_request("a", [1] * 9))
    engine.worker.fail_next.add(ChoiceId("a"))
    engine.add(make_request("b", [1] * 9, max_tokens=1))
    engine.step()
    assert engine.finished[ChoiceId("a")].finish_reason == "error"
    engine.drain()
    assert cached_tokens(engine, "c", [1] * 9) == 8


def test_orders_of_a_step_that_failed_are_given_again() -> None:
    engine = FakeEngine(num_blocks=30)
    for name in ("a", "b", "c"):
        engine.add(make_request(name, [1] * 6, max_tokens=9, ignore_eos=True))
    engine.step()
    engine.worker.fail_next.add(ChoiceId("a"))
    engine.step()
    engine.abort("b")
    step = engine.scheduler.schedule()
    assert step is not None and step.blocks_to_zero and len(step.finished) == 2
    fault = RequestFault("request_failed", "the step failed")
    (output,) = engine.scheduler.fail_step(step, fault)
    assert output.request_id == "c" and output.fault == fault
    again = engine.scheduler.schedule()
    assert again is not None
    assert set(again.blocks_to_zero) >= set(step.blocks_to_zero)
    assert set(again.finished) == {ChoiceId("a"), ChoiceId("b"), ChoiceId("c")}
    assert not again.num_scheduled_tokens
    assert engine.scheduler.fail_step(again, fault) == []
    third = engine.scheduler.schedule()
    assert third is not None
    assert (third.finished, third.blocks_to_zero) == (again.finished, again.blocks_to_zero)


def test_an_exception_over_a_result_ends_that_choice_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_stop = Choice.check_stop

    def broken(choice: Choice) -> Any:
        if choice.id == ChoiceId("a", 0) and choice.num_output_tokens == 2:
            raise KeyError("broken")
        return check_stop(choice)

    monkeypatch.setattr(Choice, "check_stop", broken)
    engine = FakeEngine(num_blocks=30)
    request = make_request("a", [1] * 6, n=2, max_tokens=6, ignore_eos=True)
    engine.add(request)
    engine.drain()
    end = engine.finished[ChoiceId("a", 0)]
    assert end.finish_reason == "error"
    assert end.fault == RequestFault("request_failed", "internal error: KeyError")
    engine.assert_output(request, 1)
    engine.assert_idle()


@pytest.mark.parametrize("samples", [[], [1, 2]])
def test_a_wrong_number_of_samples_fails_the_choice(samples: list[int]) -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", [1]))
    step = scheduler.schedule()
    assert step is not None
    sampled = {ChoiceId("a"): SampledTokens(samples)}
    (output,) = scheduler.update_from_output(step, ModelRunnerOutput(step.step, sampled))
    assert output.finish_reason == "error" and output.fault is not None
    assert output.fault.code == "request_failed"


# -- bookkeeping ----------------------------------------------------------------------------------


def test_accounting_errors_are_healed_counted_and_fatal_only_on_demand() -> None:
    engine = FakeEngine(num_blocks=30)
    request = make_request("a", [1] * 9, max_tokens=6)
    engine.add(request)
    engine.step()
    engine.scheduler._kv._pool.allocate(3)  # blocks that nobody holds
    problems = engine.scheduler.check_integrity()
    assert len(problems) == 4 and engine.scheduler.stats().accounting_errors == 4
    assert engine.scheduler.check_integrity(fatal=True) == []
    engine.scheduler._kv._pool.allocate(1)
    with pytest.raises(RuntimeError, match="reference count 1, but 0 holders"):
        engine.scheduler.check_integrity(fatal=True)
    engine.drain()
    engine.assert_output(request)


def test_tables_are_empty_after_many_requests() -> None:
    engine = FakeEngine(num_blocks=12, depth=2)
    for index in range(200):
        engine.add(make_request(str(index), [index % 7] * (index % 13 + 1), n=index % 3 + 1))
        if index % 3 == 0:
            engine.abort(str(index // 2))
        engine.step()
    engine.drain()
    engine.assert_idle()
    planner = engine.scheduler._planner
    assert len(planner._queue) == 0 and not planner._running
    assert len(planner._queue._heap) <= 64
    assert not engine.scheduler._in_flight and not engine.scheduler._forks.holders()


def test_a_step_of_256_decodes_takes_about_a_millisecond() -> None:
    scheduler = make_scheduler(
        20_000, block_size=16, max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=2048
    )
    for index in range(2000):  # most of them wait: that must cost nothing
        scheduler.add_request(
            make_request(str(index), [index % 30] * 40, max_tokens=500, ignore_eos=True)
        )
    times = []
    for _ in range(60):
        start = time.perf_counter()
        step = scheduler.schedule()
        times.append(time.perf_counter() - start)
        assert step is not None
        sampled = {choice: SampledTokens([1]) for choice in step.num_scheduled_tokens}
        scheduler.update_from_output(step, ModelRunnerOutput(step.step, sampled))
    assert scheduler.stats().num_running == 256
    assert sorted(times)[len(times) // 2] < 4e-3  # 0.45 ms measured; generous for a busy machine


def test_prompts_share_small_steps_in_a_server() -> None:
    """First tokens come as prompts are done, not all together at the end of one big step."""
    engine = FakeEngine(
        num_blocks=600, max_num_batched_tokens=512, max_num_seqs=32, max_shared_prefill_tokens=64
    )
    for index in range(16):
        engine.add(make_request(str(index), [index % 30] * 32, max_tokens=40, ignore_eos=True))
    sizes, first_tokens = [], []
    while len(first_tokens) < 16:
        step = engine.schedule()
        assert step is not None
        num_decodes = sum(cached.num_computed_tokens >= 32 for cached in step.cached_requests)
        sizes.append(sum(step.num_scheduled_tokens.values()) - num_decodes)
        first_tokens += [o.request_id for o in engine.deliver() if o.start == 0]
    assert sizes == [64] * 8 and first_tokens == [str(index) for index in range(16)]


def test_a_prompt_alone_gets_the_whole_budget() -> None:
    engine = FakeEngine(num_blocks=100, max_num_batched_tokens=64, max_shared_prefill_tokens=16)
    engine.add(make_request("a", [1] * 60, max_tokens=1))
    step = engine.schedule()
    assert step is not None and sum(step.num_scheduled_tokens.values()) == 60
    engine.deliver()
    engine.drain()
    engine.assert_idle()
