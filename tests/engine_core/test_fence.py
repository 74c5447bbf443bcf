"""The fence tells after a death what ran; and which request is to blame."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.configs.sampling_params import SamplingParams
from headrace.engine_core.deaths import Cause, OutOfMemoryKills, cause_of
from headrace.engine_core.fence import FenceCopy, FenceReader, FenceWriter, Suspect, make_fence
from headrace.engine_core.suspicions import Suspicions
from headrace.workers.protocol import CachedRequestData, ChoiceId, NewRequestData, SchedulerOutput


@pytest.fixture
def fence() -> Iterator[int]:
    fd = make_fence()
    yield fd
    os.close(fd)


def make_step(number: int, new: dict[str, int], cached: dict[str, int]) -> SchedulerOutput:
    """`new`: prompt tokens of choices that begin; `cached`: tokens computed of others."""
    return SchedulerOutput(
        number,
        [
            NewRequestData(ChoiceId(name), [1] * count, count, SamplingParams(), [[]], 0)
            for name, count in new.items()
        ],
        [CachedRequestData(ChoiceId(name), [[]], count) for name, count in cached.items()],
        {ChoiceId(name): count for name, count in new.items()}
        | {ChoiceId(name): 1 for name in cached},
        [],
    )


def test_a_copy_on_another_machine_says_the_same(fence: int) -> None:
    writer, reader = FenceWriter(fence, 2), FenceReader(fence)
    fd = make_fence()
    try:
        copy, there = FenceCopy(fd), FenceReader(fd)
        copy.put(reader.header())
        assert there.pulse() == reader.pulse() and not there.made_progress()
        for number in (1, 2, 3):
            writer.begin(make_step(number, {"a": 5, "b": number}, {"c": 7}))
        writer.mark_modified()
        writer.end(2)
        copy.put(reader.header())
        assert there.is_modified() and there.suspects() == []
        copy.put(reader.content())
        assert there.suspects() == reader.suspects() != []
        assert there.made_progress()
    finally:
        os.close(fd)


def test_what_runs_is_there_until_it_is_done(fence: int) -> None:
    writer, reader = FenceWriter(fence), FenceReader(fence)
    assert reader.suspects() == [] and not reader.made_progress()
    writer.begin(make_step(1, {"a": 5, "b": 3}, {}))
    assert not reader.made_progress()
    assert reader.suspects() == [Suspect("a", 0, 0, 5), Suspect("b", 0, 0, 3)]
    writer.end(1)
    assert reader.suspects() == [] and reader.made_progress()
    for number in (2, 3, 4):  # the same choices again: only counted
        writer.begin(make_step(number, {}, {"a": 3 + number, "b": 1 + number}))
        writer.end(number)
    writer.begin(make_step(5, {}, {"a": 8, "b": 6}))
    assert reader.suspects() == [Suspect("a", 0, 8, 9), Suspect("b", 0, 6, 7)]
    writer.end(5)
    writer.begin(make_step(6, {"c": 4}, {"a": 9}))
    assert reader.suspects() == [Suspect("c", 0, 0, 4), Suspect("a", 0, 9, 10)]


def test_several_steps_in_flight(fence: int) -> None:
    writer, reader = FenceWriter(fence, num_slots=2), FenceReader(fence)
    writer.begin(make_step(1, {"a": 5}, {}))
    writer.begin(make_step(2, {"b": 3}, {}))
    assert {suspect.request_id for suspect in reader.suspects()} == {"a", "b"}
    writer.end(1)
    assert [suspect.request_id for suspect in reader.suspects()] == ["b"]


def test_more_choices_than_there_is_room_for(fence: int) -> None:
    writer, reader = FenceWriter(fence), FenceReader(fence)
    writer.begin(make_step(1, {f"{'x' * 90}{number}": 1 for number in range(20_000)}, {}))
    assert 1000 < len(reader.suspects()) < 20_000


def test_pulse_and_modification(fence: int) -> None:
    writer, reader = FenceWriter(fence), FenceReader(fence)
    first = reader.pulse()
    writer.beat()
    second = reader.pulse()
    assert first is not None and second is not None and second > first
    writer.beat(is_watched=False)
    assert reader.pulse() is None and not reader.is_modified()
    writer.mark_modified()
    writer.beat()
    assert reader.is_modified() and reader.pulse() is not None


def at(position: int, *names: str) -> list[Suspect]:
    return [Suspect(name, 0, position, position + 1) for name in names]


ITSELF, MEMORY, OPERATOR = Cause.ITSELF, Cause.MEMORY, Cause.OPERATOR


def test_a_second_death_alone_is_the_request_s_doing() -> None:
    suspicions = Suspicions()
    assert suspicions.judge(at(9, "a", "b"), ITSELF, 1.0) is None
    assert suspicions.judge(at(9, "b"), ITSELF, 2.0) is not None
    assert suspicions.judge(at(9, "a"), ITSELF, 3.0) is not None
    assert suspicions.judge(at(4, "c"), ITSELF, 4.0) is None  # alone, but the first time
    verdict = suspicions.judge(at(4, "c"), ITSELF, 5.0)
    assert verdict is not None and verdict.request_id == "c" and verdict.deaths == (4.0, 5.0)
    assert suspicions.judge([], ITSELF, 6.0) is None


def test_who_got_further_is_no_suspect_any_more() -> None:
    suspicions = Suspicions()
    for position in range(3, 9):
        assert suspicions.judge(at(position, "a"), ITSELF, float(position)) is None
    assert suspicions.judge(at(8, "a"), ITSELF, 9.0) is not None


def test_want_of_memory_blames_only_the_third_time_and_an_operator_nobody() -> None:
    suspicions = Suspicions()
    for when in range(9):
        assert suspicions.judge(at(9, "a"), OPERATOR, float(when)) is None
    assert suspicions.judge(at(9, "a"), MEMORY, 1.0) is None
    assert suspicions.judge(at(9, "a"), MEMORY, 2.0) is None
    assert suspicions.judge(at(10, "a"), MEMORY, 3.0) is None  # it got further
    assert suspicions.judge(at(10, "a"), MEMORY, 4.0) is None
    verdict = suspicions.judge(at(10, "a"), MEMORY, 5.0)
    assert verdict is not None and len(verdict.deaths) == 3
    assert suspicions.judge(at(1, "b"), MEMORY, 6.0) is None
    assert suspicions.judge(at(1, "b"), ITSELF, 7.0) is not None


def test_causes(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("pgfault 7\noom_kill 3\n")
    kills = OutOfMemoryKills(vmstat)
    assert cause_of(-signal.SIGKILL, kills) is OPERATOR
    vmstat.write_text("pgfault 8\noom_kill 4\n")
    assert cause_of(-signal.SIGKILL, kills) is MEMORY
    assert cause_of(-signal.SIGKILL, kills) is OPERATOR
    assert cause_of(-signal.SIGTERM, kills) is OPERATOR
    assert cause_of(-signal.SIGSEGV, kills) is cause_of(1, kills) is cause_of(None, kills) is ITSELF
    vmstat.unlink()  # nobody can say
    assert cause_of(-signal.SIGKILL, kills) is MEMORY
