"""Exactly once: whatever an engine core says twice, leaves out or contradicts."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.configs.sampling_params import SamplingParams
from headrace.engine_core.fence import Suspect
from headrace.engine_core.ledger import RequestLedger
from headrace.engine_core.messages import ChoiceState, EngineCoreOutput, EngineCoreRequest
from headrace.workers.protocol import RequestFault, TokenLogprobs

LENGTH = 12  # output tokens of a choice; its token at position i of choice c is 100 * c + i
NUM_PROMPT = 5


def make_request(name: str, n: int = 1) -> EngineCoreRequest:
    choices = [ChoiceState(index) for index in range(n)]
    params = SamplingParams(n=n, max_tokens=LENGTH)
    return EngineCoreRequest(name, [1] * NUM_PROMPT, params, None, 0.0, choices)


def output(
    name: str, index: int, start: int, stop: int, finishes: bool = False
) -> EngineCoreOutput:
    ids = [100 * index + i for i in range(start, stop)]
    logprobs = [TokenLogprobs([token], [-token / 7], 1) for token in ids]
    reason = "length" if finishes else None
    return EngineCoreOutput(name, index, start, ids, logprobs, finish_reason=reason)


def scores(start: int, stop: int) -> EngineCoreOutput:
    entries = [TokenLogprobs([i], [-float(i)], 1) for i in range(start, stop)]
    return EngineCoreOutput("a", 0, 0, [], prompt_logprobs=entries, prompt_logprobs_start=start)


def replay(ledger: RequestLedger, rank: int = 0) -> list[EngineCoreRequest]:
    """What a fresh engine core is sent: all that had run on `rank`, and what was never sent."""
    ledger.lose(rank)
    waiting = ledger.waiting()
    messages = [ledger.message(entry) for entry in waiting]
    for entry in waiting:
        ledger.sent(entry, rank)
    return messages


class Engine:
    """Runs what it is sent; its outputs may be lost on the way when it dies."""

    def __init__(self, requests: list[EngineCoreRequest]) -> None:
        self.known = {
            (request.request_id, choice.index): len(choice.output_token_ids)
            for request in requests
            for choice in request.choices
        }

    def step(self, key: tuple[str, int], num_tokens: int) -> EngineCoreOutput | None:
        if key not in self.known:
            return None
        start = self.known[key]
        stop = min(LENGTH, start + num_tokens)
        self.known[key] = stop
        if stop == LENGTH:
            del self.known[key]
        return output(*key, start, stop, finishes=stop == LENGTH)


KEYS = [("a", 0), ("a", 1), ("b", 0)]
# A step of a choice, which arrives, is lost, or arrives twice; or a death of the engine core.
EVENTS = st.lists(
    st.one_of(
        st.none(),
        st.tuples(st.sampled_from(KEYS), st.integers(1, 3), st.sampled_from([1, 1, 1, 2])),
    ),
    max_size=60,
)


@given(EVENTS, st.lists(st.sampled_from(KEYS), max_size=4))
def test_every_token_comes_once(
    events: list[tuple[tuple[str, int], int, int] | None], lost: list[tuple[str, int]]
) -> None:
    ledger = RequestLedger()
    requests = [make_request("a", 2), make_request("b")]
    for request in requests:
        ledger.sent(ledger.add(request), 0)
    engine = Engine(requests)
    got: dict[tuple[str, int], list[int]] = {key: [] for key in KEYS}

    def take(sent: EngineCoreOutput | None) -> None:
        accepted = None if sent is None else ledger.accept(msgspec.structs.replace(sent))
        if accepted is not None:
            assert accepted.fault is None and accepted.start == len(
                got[accepted.request_id, accepted.index]
            )
            assert accepted.logprobs is not None
            assert [e.token_ids[0] for e in accepted.logprobs] == accepted.new_token_ids
            got[accepted.request_id, accepted.index] += accepted.new_token_ids

    for event in events:
        if event is None:
            for key in lost:  # steps whose outputs nobody sees
                engine.step(key, 2)
            engine = Engine(replay(ledger))
            continue
        key, num_tokens, times = event
        sent = engine.step(key, num_tokens)
        for _ in range(times):
            take(sent)
    engine = Engine(replay(ledger))
    for key in KEYS:
        while len(got[key]) < LENGTH:
            take(engine.step(key, 5))
    assert got == {key: [100 * key[1] + i for i in range(LENGTH)] for key in KEYS}
    assert not len(ledger) and not replay(ledger)


def test_a_gap_and_a_contradiction_are_faults() -> None:
    ledger = RequestLedger()
    for wrong in (output("a", 0, 3, 4), EngineCoreOutput("a", 0, 1, [7, 8])):
        ledger.add(make_request("a"))
        assert ledger.accept(output("a", 0, 0, 2)) is not None
        accepted = ledger.accept(wrong)
        assert accepted is not None and accepted.finish_reason == "error"
        assert accepted.fault is not None and accepted.fault.code == "request_failed"
        assert accepted.start == 2 and "a" not in ledger
        assert ledger.accept(output("a", 0, 2, 3)) is None


def test_prompt_scores_come_once() -> None:
    ledger = RequestLedger()
    ledger.add(make_request("a"))
    for start, stop, new in ((1, 3, [1, 2]), (2, 4, [3]), (1, 3, []), (4, 5, [4])):
        accepted = ledger.accept(scores(start, stop))
        assert accepted is not None and accepted.prompt_logprobs is not None
        assert [entry.token_ids[0] for entry in accepted.prompt_logprobs] == new
    assert replay(ledger)[0].num_prompt_logprobs_received == 5
    ledger.add(make_request("a"))
    accepted = ledger.accept(scores(2, 3))
    assert accepted is not None and accepted.fault is not None


def test_replays_leave_out_what_has_ended() -> None:
    ledger = RequestLedger()
    request = make_request("a", 3)
    ledger.add(request)
    ledger.add(make_request("b"))
    ledger.accept(output("a", 0, 0, LENGTH, finishes=True))
    ledger.accept(output("a", 1, 0, 4))
    ledger.abort("a", 2)
    first, second = replay(ledger)
    assert first.choices == [ChoiceState(1, [100, 101, 102, 103])]
    assert second == make_request("b")
    assert request == make_request("a", 3)  # what the caller sent is not changed
    ledger.abort("a")
    ledger.abort("unknown")
    assert [replay.request_id for replay in replay(ledger)] == ["b"]
    ledger.lose(1)
    assert ledger.waiting() == []


def test_suspects_come_last_until_they_are_past_the_point() -> None:
    ledger = RequestLedger()
    for name in ("a", "b", "c"):
        ledger.add(make_request(name))
    ledger.accept(output("a", 0, 0, 2))
    suspects = [Suspect("a", 0, 7, 8), Suspect("b", 0, 0, 5), Suspect("x", 0, 0, 1)]
    assert ledger.suspect(suspects) == {"a", "b"}
    replays = replay(ledger)
    assert [replay.request_id for replay in replays] == ["c", "a", "b"]
    assert [replay.choices[0].runs_alone_until for replay in replays] == [0, 8, 5]
    ledger.accept(output("a", 0, 2, 4))
    ledger.suspect([Suspect("c", 0, 0, 5)])
    assert [replay.request_id for replay in replay(ledger)] == ["a", "b", "c"]


def test_a_failed_request_ends_in_all_its_choices() -> None:
    ledger = RequestLedger()
    ledger.add(make_request("a", 2))
    ledger.accept(output("a", 1, 0, 3))
    ended = ledger.fail("a", RequestFault("engine_crash", "why"))
    assert [(end.index, end.start, end.finish_reason) for end in ended] == [
        (0, 0, "error"), (1, 3, "error"),
    ]  # fmt: skip
    assert not len(ledger) and ledger.fail("a", RequestFault("x", "")) == []


@pytest.mark.parametrize("was_sent", [True, False])
def test_cached_tokens_stay_as_first_reported(was_sent: bool) -> None:
    ledger = RequestLedger()
    entry = ledger.add(make_request("a"))
    if was_sent:
        ledger.sent(entry, 0)
    first = output("a", 0, 0, 1)
    first.num_cached_tokens = 3
    ledger.accept(first)
    replay(ledger)
    second = output("a", 0, 1, 2)
    second.num_cached_tokens = 4
    accepted = ledger.accept(second)
    assert accepted is not None and accepted.num_cached_tokens == (3 if was_sent else 4)
