"""What the scheduler tells beside tokens: times, counters, scores of prompts."""

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.configs.errors import InvalidRequestError
from headrace.engine_core.request import WaitsFor
from headrace.workers.protocol import ChoiceId
from tests.engine_core.factories import EOS, FakeEngine, make_request, make_scheduler

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_first_output_says_when_the_choice_was_first_scheduled() -> None:
    clock = Clock()
    engine = FakeEngine(num_blocks=30, clock=clock, max_num_batched_tokens=4, max_num_seqs=1)
    engine.add(make_request("a", PROMPT, max_tokens=2, ignore_eos=True))
    engine.add(make_request("b", [1], max_tokens=2, ignore_eos=True))
    wanted: dict[ChoiceId, float] = {}
    while engine.scheduler.stats().num_requests:
        engine.step()
        for choice_id in engine.worker.rows:
            wanted.setdefault(choice_id, clock.now)
        clock.now += 1
    assert engine.first_scheduled == wanted
    assert wanted[ChoiceId("a")] == 100.0 and wanted[ChoiceId("b")] > 103.0


def test_a_choice_that_never_ran_has_no_time() -> None:
    engine = FakeEngine(max_num_seqs=1)
    engine.add(make_request("a", [1]))
    engine.add(make_request("b", [1]))
    engine.step()
    engine.abort("b")
    assert engine.finished[ChoiceId("b")].first_scheduled_time is None
    assert ChoiceId("b") not in engine.first_scheduled


def test_the_last_output_counts_preemptions() -> None:
    engine = FakeEngine(num_blocks=8)
    for name in ("a", "b", "c"):
        engine.add(make_request(name, [ord(name) % 30] * 7, max_tokens=16, ignore_eos=True))
    engine.drain()
    counts = [engine.finished[ChoiceId(name)].num_preemptions for name in ("a", "b", "c")]
    assert sum(counts) == engine.scheduler.stats().num_preemptions > 0
    assert counts[0] == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_token_counters_add_up(depth: int) -> None:
    engine = FakeEngine(num_blocks=40, depth=depth, max_num_batched_tokens=6)
    requests = [
        make_request(str(i), PROMPT[: i + 3], n=1 + i % 2, max_tokens=3 + i, ignore_eos=True)
        for i in range(5)
    ]
    for request in requests:
        engine.add(request)
    num_prompt = num_generated = 0
    while engine.scheduler.has_work() or engine.in_flight:
        engine.step()
        stats = engine.scheduler.stats()
        num_prompt += stats.num_step_prompt_tokens
        num_generated += stats.num_step_generation_tokens
    assert engine.scheduler.stats().num_computed_prompt_tokens == num_prompt
    assert num_generated == sum(len(tokens) for tokens in engine.tokens.values())
    assert num_prompt <= engine.worker.forwards
    # Shared prefixes of whole blocks are found; what a fork computes is the last prompt token.
    cached = sum(end.num_cached_tokens for end in engine.finished.values() if end.index == 0)
    whole = sum(len(request.prompt_token_ids) for request in requests)
    assert num_prompt == whole - cached + sum(len(request.choices) - 1 for request in requests)


def test_recomputed_prompt_tokens_count_again() -> None:
    engine = FakeEngine(num_blocks=8, prefix_caching=False)
    for name in ("a", "b", "c"):
        engine.add(make_request(name, [ord(name) % 30] * 7, max_tokens=16, ignore_eos=True))
    engine.drain()
    stats = engine.scheduler.stats()
    assert stats.num_computed_prompt_tokens == 21 + 7 * stats.num_preemptions


@pytest.mark.parametrize("budget", [1, 3, 4, 16])
@pytest.mark.parametrize("n", [1, 3])
def test_prompt_scores_come_once_and_in_order(budget: int, n: int) -> None:
    """For choice 0, with whatever chunk made them known; `assert_output` compares them."""
    engine = FakeEngine(num_blocks=40, max_num_batched_tokens=budget)
    for name in ("cold", "warm"):
        request = make_request(name, PROMPT, n=n, max_tokens=3, prompt_logprobs=1)
        engine.add(request)
        engine.drain()
        for index in range(n):
            engine.assert_output(request, index)
    assert engine.finished[ChoiceId("warm")].num_cached_tokens == 0
    engine.assert_idle()


def test_scores_fill_the_cache_for_others() -> None:
    engine = FakeEngine(num_blocks=40)
    engine.add(make_request("scored", PROMPT, max_tokens=1, prompt_logprobs=0))
    engine.drain()
    engine.add(make_request("plain", PROMPT, max_tokens=1))
    engine.drain()
    assert engine.finished[ChoiceId("plain")].num_cached_tokens == 8


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_preemption_keeps_the_scores_made(depth: int) -> None:
    """Preempted in the middle of its prompt and afterwards: nothing is sent twice."""
    engine = FakeEngine(
        num_blocks=10, depth=depth, max_num_batched_tokens=5, policy="priority", max_model_len=40
    )
    scored = make_request(
        "a", PROMPT * 2, max_tokens=8, ignore_eos=True, prompt_logprobs=2, priority=9
    )
    engine.add(scored)
    engine.step()
    engine.step()
    assert 0 < len(engine.scores[ChoiceId("a")]) < len(PROMPT) * 2 - 1
    others = []
    for i in range(6):
        others.append(make_request(f"b{i}", [i] * 9, max_tokens=9, ignore_eos=True))
        engine.add(others[-1])
        engine.step()
        engine.step()
    engine.drain()
    assert engine.finished[ChoiceId("a")].num_preemptions > 0
    for request in (scored, *others):
        engine.assert_output(request)


@pytest.mark.parametrize("received", range(len(PROMPT) + 1))
def test_a_replay_starts_behind_the_scores_received(received: int) -> None:
    """`received` counts entries with the empty one of the first token: 0 and 1 mean the same."""
    engine = FakeEngine(num_blocks=40, max_num_batched_tokens=4)
    request = make_request(
        "a", PROMPT, max_tokens=3, prompt_logprobs=1, num_prompt_logprobs_received=received
    )
    engine.add(request)
    engine.drain()
    engine.assert_output(request)


@pytest.mark.parametrize(
    ("parameter", "options"),
    [
        ("num_prompt_logprobs_received", {"num_prompt_logprobs_received": len(PROMPT) + 1}),
        ("num_prompt_logprobs_received", {"num_prompt_logprobs_received": -1}),
        ("allowed_token_ids", {"allowed_token_ids": []}),
        ("allowed_token_ids", {"allowed_token_ids": [3], "min_tokens": 1, "stop_token_ids": [3]}),
        ("logit_bias", {"logit_bias": {1: float("nan")}}),
        ("bad_words", {"_bad_words_token_ids": [[1], []]}),
        ("bad_words", {"_bad_words_token_ids": [[1, 32]]}),
        ("allowed_token_ids", {"allowed_token_ids": [4], "_bad_words_token_ids": [[4]]}),
    ],
)
def test_the_fence_refuses_what_the_sampler_could_not_do(
    parameter: str, options: dict[str, Any]
) -> None:
    scheduler = make_scheduler()
    bias = options.pop("logit_bias", None)
    request = make_request("a", PROMPT, **options)
    request.sampling_params.logit_bias = bias  # past the checks of the constructor
    with pytest.raises(InvalidRequestError) as error:
        scheduler.add_request(request)
    assert error.value.parameter == parameter
    assert not scheduler.has_work()


def test_one_bad_choice_does_not_disturb_the_forks_of_others() -> None:
    """Only a step that failed as a whole takes back what waiting children hold."""
    engine = FakeEngine(num_blocks=30, max_num_seqs=2)
    forked = make_request("a", PROMPT, n=3, max_tokens=4, ignore_eos=True)
    engine.add(make_request("bad", [9] * 3, max_tokens=16, ignore_eos=True))
    engine.add(forked)
    while len(engine.scheduler._forks.holders()) < 2:
        engine.step()
    engine.worker.fail_next.add(ChoiceId("bad"))
    engine.step()
    assert engine.finished[ChoiceId("bad")].finish_reason == "error"
    assert engine.scheduler._forks.holders()
    engine.drain()
    for index in range(3):
        engine.assert_output(forked, index)
    engine.assert_idle()


def test_steps_without_tokens_are_not_counted() -> None:
    engine = FakeEngine(num_blocks=20)
    engine.add(make_request("a", [1] * 5, max_tokens=3, ignore_eos=True))
    engine.drain()  # the last step only tells the worker that the request has ended
    assert engine.scheduler.stats().step == 3 < engine.num_steps


def outstanding(engine: FakeEngine) -> int:
    """Tokens to compute and outputs expected, choice by choice."""
    total = 0
    for choice in engine.scheduler._live_choices():
        total += choice.num_expected_tokens
        if choice.waits_for is WaitsFor.NOTHING:
            total += max(0, len(choice.token_ids) - choice.num_computed_tokens)
    return total


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 14), st.integers(1, 20), st.integers(1, 3)), max_size=7),
    st.integers(8, 30),
    st.integers(1, 2),
    st.integers(0, 30),
)
def test_outstanding_tokens_are_those_of_the_live_choices(
    shapes: list[tuple[int, int, int]], num_blocks: int, depth: int, abort_at: int
) -> None:
    """Through chunks, forks, preemptions and aborts; 0 at the end.

    A fork that gives its shared blocks up while it waits is not counted anew.
    """
    engine = FakeEngine(num_blocks=num_blocks, depth=depth, num_replicas=2)
    for i, (num_prompt, max_tokens, n) in enumerate(shapes):
        prompt = [1 + (i + j) % 20 for j in range(num_prompt)]
        request = make_request(str(i), prompt, max_tokens=max_tokens, n=n, ignore_eos=True)
        with contextlib.suppress(InvalidRequestError):  # too long for the pool
            engine.add(request)
    steps = 0
    while engine.scheduler.stats().num_requests and steps < 500:
        if steps == abort_at:
            engine.abort("0")
        engine.step()
        told, wanted = engine.scheduler.stats().num_outstanding_tokens, outstanding(engine)
        assert told == wanted or (told < wanted and any(n > 1 for _, _, n in shapes))
        steps += 1
    assert engine.scheduler.stats().num_outstanding_tokens == 0


def test_expected_outputs_are_learnt() -> None:
    """Counted only where clients choose between replicas."""
    engine = FakeEngine(num_blocks=200, max_model_len=400, num_replicas=2)
    engine.add(make_request("a", PROMPT, max_tokens=300, ignore_eos=True))
    assert engine.scheduler.stats().num_outstanding_tokens == len(PROMPT) + 300
    engine.abort("a")
    for i in range(30):
        engine.add(make_request(str(i), [EOS - 2], max_tokens=300, stop_token_ids=list(range(32))))
        engine.drain()
    engine.add(make_request("b", PROMPT, max_tokens=300, ignore_eos=True))
    assert engine.scheduler.stats().num_outstanding_tokens < 100
    alone = FakeEngine(num_blocks=200, max_model_len=400)
    alone.add(make_request("a", PROMPT, max_tokens=300, ignore_eos=True))
    assert alone.scheduler.stats().num_outstanding_tokens == 0
