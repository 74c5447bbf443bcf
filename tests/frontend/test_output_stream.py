"""What a slow consumer gets: merged outputs that say the same as single ones."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.configs.errors import RequestFailedError
from headrace.frontend.completion_view import ChoiceContent, CompletionView
from headrace.frontend.output_stream import OutputStream
from headrace.frontend.outputs import CompletionOutput, Logprob, RequestOutput


def delta(index: int, number: int, finished: bool = False) -> RequestOutput:
    choice = CompletionOutput(
        index, f"<{number}>", [number], -1.0 * number, [{number: Logprob(-1.0)}],
        "stop" if finished else None,
    )  # fmt: skip
    return RequestOutput("r", "p" if number == 0 else None, None, None, [choice], finished)


def view_delta(content: ChoiceContent, number: int) -> RequestOutput:
    """One more token, as `RequestState` hands it out."""
    start = content.size()
    content.token_ids.append(number)
    content.text.append(f"<{number}>")
    assert content.logprobs is not None
    content.logprobs.append({number: Logprob(-1.0)})
    view = CompletionView(0, content, start, content.size(), -1.0, None, None, is_delta=True)
    return RequestOutput("r", None, None, None, [view], False)


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=30))
def test_merged_deltas_are_the_single_ones_joined(steps: list[tuple[int, bool]]) -> None:
    async def go() -> None:
        stream = OutputStream("r", merges_deltas=True)
        texts: dict[int, str] = {}
        ids: dict[int, list[int]] = {}
        num_logprobs: dict[int, int] = {}
        for number, (index, reads) in enumerate(steps):
            stream.put(delta(index, number))
            if reads or number == len(steps) - 1:
                for choice in (await stream.get()).outputs:
                    texts[choice.index] = texts.get(choice.index, "") + choice.text
                    ids.setdefault(choice.index, []).extend(choice.token_ids)
                    assert choice.logprobs is not None
                    assert len(choice.logprobs) == len(choice.token_ids)
                    num_logprobs[choice.index] = num_logprobs.get(choice.index, 0) + len(
                        choice.logprobs
                    )
        for wanted in {index for index, _ in steps}:
            numbers = [n for n, (index, _) in enumerate(steps) if index == wanted]
            assert texts[wanted] == "".join(f"<{n}>" for n in numbers)
            assert ids[wanted] == numbers
            assert num_logprobs[wanted] == len(numbers)

    asyncio.run(go())


def test_the_last_of_cumulative_outputs_replaces_the_others() -> None:
    async def go() -> None:
        stream = OutputStream("r", merges_deltas=False)
        stream.put(delta(0, 1))
        stream.put(delta(0, 2))
        assert (await stream.get()).outputs[0].text == "<2>"

    asyncio.run(go())


def test_an_error_comes_after_the_outputs_before_it() -> None:
    async def go() -> None:
        stream = OutputStream("r", merges_deltas=True)
        stream.put(delta(0, 0))
        stream.fail(RequestFailedError("why"))
        assert (await stream.get()).prompt == "p"
        for _ in range(2):
            with pytest.raises(RequestFailedError, match="why"):
                await stream.get()

    asyncio.run(go())


def test_merging_costs_the_same_for_every_token() -> None:
    """Rule PP38: 64k tokens that nobody reads; the last thousand cost what the first did."""
    best = float("inf")
    for _ in range(4):
        stream, content = OutputStream("r", merges_deltas=True), ChoiceContent(with_logprobs=True)
        times = []
        for number in range(64_000):
            if number in (1000, 2000, 63_000):
                times.append(time.perf_counter())
            stream.put(view_delta(content, number))
        times.append(time.perf_counter())
        best = min(best, (times[3] - times[2]) / (times[1] - times[0]))
        (merged,) = asyncio.run(stream.get()).outputs
        assert len(merged.token_ids) == len(merged.logprobs or []) == 64_000
        assert merged.text.startswith("<0><1>") and merged.text.endswith("<63999>")
        if best <= 1.5:
            break
    assert best <= 1.5
