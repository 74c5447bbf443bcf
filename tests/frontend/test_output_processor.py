"""Output processor: the same text however steps cut the tokens; exactly once; deltas."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.configs.errors import NonFiniteLogitsError
from headrace.configs.sampling_params import RequestOutputKind, SamplingParams
from headrace.engine_core.messages import ChoiceState, EngineCoreOutput, EngineCoreRequest
from headrace.frontend.output_processor import OutputProcessor
from headrace.frontend.outputs import RequestOutput
from headrace.workers.protocol import RequestFault, TokenLogprobs
from tests.frontend.output_steps import ByteTable, step


def run(
    table: ByteTable,
    tokens: list[int],
    cuts: list[int],
    params: SamplingParams,
    finish: str = "length",
) -> tuple[RequestOutput, list[str], list[int]]:
    """Feed `tokens` in steps; returns merged deltas, the deltas' texts, aborted choices."""
    processor = OutputProcessor(table)
    params.output_kind = RequestOutputKind.DELTA
    request = EngineCoreRequest("r", [1], params, table.eos, 0.0, [ChoiceState(0)])
    processor.add(request, "label", "prompt", params.output_kind)
    merged: RequestOutput | None = None
    texts: list[str] = []
    aborts: list[int] = []
    bounds = [0, *sorted(set(cuts)), len(tokens)]
    for low, high in itertools.pairwise(bounds):
        last = high == len(tokens)
        output = EngineCoreOutput(
            "r", 0, low, tokens[low:high], finish_reason=finish if last else None
        )
        for result in processor.process(step([output])).results.values():
            aborts += result.aborts
            assert result.failure is None
            if result.output is None:
                continue
            texts += [completion.text for completion in result.output.outputs]
            if merged is None:
                merged = result.output
            else:
                merged.add(result.output, aggregate=True)
    assert merged is not None
    assert len(processor) == 0
    return merged, texts, aborts


def all_cuts(count: int) -> list[list[int]]:
    one_each = [list(range(1, count)), []]
    return one_each + [list(pair) for pair in itertools.combinations(range(1, count), 2)]


def test_a1_stop_string_never_leaks() -> None:
    pieces = [b"Ready", b" set", b".", b"\n", b"Cust", b"omer", b":", b" hi", b"ard", b" tart"]
    table = ByteTable(pieces)
    first = list(range(8))
    for cuts in all_cuts(len(first)):
        merged, texts, aborts = run(table, first, cuts, SamplingParams(stop=["\nCustomer:"]))
        done = merged.outputs[0]
        assert (done.text, done.finish_reason) == ("Ready set.", "stop")
        assert done.stop_reason == "\nCustomer:"
        assert not any("\n" in text or "Cust" in text for text in texts)
        assert list(done.token_ids) == first[:7]
        assert aborts in ([0], [])
    twin = [0, 1, 2, 3, 4, 8, 9, table.eos]
    for cuts in all_cuts(len(twin)):
        merged, _, aborts = run(
            table, twin, cuts, SamplingParams(stop=["\nCustomer:"]), finish="stop"
        )
        done = merged.outputs[0]
        assert (done.text, done.finish_reason) == ("Ready set.\nCustard tart", "stop")
        assert done.stop_reason is None
        assert aborts == []


def test_a1_stop_string_in_output_once() -> None:
    table = ByteTable([b"a", b"STOP", b"b"])
    params = SamplingParams(stop=["STOP"], include_stop_str_in_output=True)
    merged, _, _ = run(table, [0, 1, 2], [1, 2], params)
    assert merged.outputs[0].text == "aSTOP"


def test_a2_partial_characters() -> None:
    pieces = [b"\xf0", b"\x9f\xa7", b"\xad", b"\xc5", b"\x91", b"\xe2\x80", b"\x8d"]
    table = ByteTable(pieces)
    tokens = list(range(7))
    full = b"".join(pieces).decode()
    for cuts in all_cuts(7):
        merged, texts, _ = run(table, tokens, cuts, SamplingParams())
        assert merged.outputs[0].text == full
        assert "�" not in "".join(texts)
    for cuts in ([], [1]):
        merged, _, _ = run(table, [0, 1], cuts, SamplingParams())
        assert merged.outputs[0].text.count("�") <= 1
        assert merged.outputs[0].finish_reason == "length"
        assert len(merged.outputs[0].token_ids) == 2


@given(
    tokens=st.lists(st.integers(0, 11), min_size=1, max_size=30),
    data=st.data(),
    stops=st.lists(st.text("ab\nñ", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 5),
)
def test_any_cutting_gives_the_same_text(
    tokens: list[int], data: st.DataObject, stops: list[str], include: bool, min_tokens: int
) -> None:
    pieces = [
        b"a",
        b"b",
        b"ab",
        b"\n",
        b"\xc3",
        b"\xb1",
        b"ba\n",
        b"aab",
        b"\xff",
        b"",
        b"bb",
        b" ",
    ]
    table = ByteTable(pieces)

    def params() -> SamplingParams:
        return SamplingParams(
            stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=99
        )

    whole, _, _ = run(table, tokens, [], params())
    cuts = data.draw(st.lists(st.integers(1, max(1, len(tokens) - 1)), max_size=8))
    cuts = [cut for cut in cuts if cut < len(tokens)]
    merged, _, _ = run(table, tokens, cuts, params())
    assert merged.outputs == whole.outputs
    if not stops:
        text = b"".join(pieces[token] for token in tokens).decode("utf-8", "replace")
        assert whole.outputs[0].text == text


def test_delta_and_cumulative_and_final() -> None:
    table = ByteTable([b"a", b"b"])
    steps = [([0], 0, None), ([1, 0], 1, None), ([1], 3, "length")]
    seen: dict[RequestOutputKind, list[tuple[str, list[int], object]]] = {}
    for kind in RequestOutputKind:
        processor = OutputProcessor(table)
        request = EngineCoreRequest("r", [1], SamplingParams(), None, 0.0, [ChoiceState(0)])
        processor.add(request, "label", "prompt", kind)
        for tokens, start, reason in steps:
            output = EngineCoreOutput("r", 0, start, tokens, finish_reason=reason)
            item = processor.process(step([output])).results["r"].output
            if item is not None:
                completion = item.outputs[0]
                row = (completion.text, list(completion.token_ids), item.prompt)
                seen.setdefault(kind, []).append(row)
    assert seen[RequestOutputKind.DELTA] == [
        ("a", [0], "prompt"),
        ("ba", [1, 0], None),
        ("b", [1], None),
    ]
    assert seen[RequestOutputKind.CUMULATIVE][1] == ("aba", [0, 1, 0], "prompt")
    assert seen[RequestOutputKind.FINAL_ONLY] == [("abab", [0, 1, 0, 1], "prompt")]


def test_logprobs_follow_tokens() -> None:
    table = ByteTable([b"a", b"b"])
    processor = OutputProcessor(table)
    params = SamplingParams(logprobs=1)
    processor.add(
        EngineCoreRequest("r", [1], params, None, 0.0, [ChoiceState(0)]),
        "l",
        None,
        params.output_kind,
    )
    entries = [TokenLogprobs([1, 0], [-2.0, -0.5], 2), TokenLogprobs([0, 0], [-0.25, -0.25], 1)]
    output = EngineCoreOutput("r", 0, 0, [1, 0], entries, "length")
    item = processor.process(step([output])).results["r"].output
    assert item is not None
    completion = item.outputs[0]
    assert completion.cumulative_logprob == pytest.approx(-2.25)
    assert completion.logprobs is not None
    assert completion.logprobs[0][1].rank == 2
    assert completion.logprobs[0][0].rank == 1
    assert completion.logprobs[0][0].decoded_token == "a"
    assert list(completion.logprobs[1]) == [0]


def test_failure_ends_the_request_and_aborts_siblings() -> None:
    table = ByteTable([b"a"])
    processor = OutputProcessor(table)
    params = SamplingParams(n=2)
    request = EngineCoreRequest("r", [1], params, None, 0.0, [ChoiceState(0), ChoiceState(1)])
    processor.add(request, "label", None, params.output_kind)
    fault = RequestFault("non_finite_logits", "NaN")
    failed = EngineCoreOutput("r", 0, 0, [], finish_reason="error", fault=fault)
    result = processor.process(step([failed])).results["r"]
    assert isinstance(result.failure, NonFiniteLogitsError)
    assert result.aborts == [1]
    assert len(processor) == 0
    assert processor.process(step([EngineCoreOutput("r", 1, 0, [0])])).results == {}


def test_a_fault_in_one_request_ends_that_one_alone() -> None:
    processor = OutputProcessor(ByteTable([b"a"]))
    params = SamplingParams(output_kind=RequestOutputKind.DELTA)
    for name in ("bad", "good"):
        request = EngineCoreRequest(name, [1], params, 1, 0.0, [ChoiceState(0)])
        processor.add(request, name, None, params.output_kind)
    results = processor.process(
        step([EngineCoreOutput("bad", 0, 0, [99]), EngineCoreOutput("good", 0, 0, [0])])
    ).results
    assert str(results["bad"].failure) == "internal error: IndexError"
    assert results["bad"].aborts == [0] and results["bad"].output is None
    good = results["good"].output
    assert good is not None and good.outputs[0].text == "a"
    assert len(processor) == 1
