"""The load generator against scripted streams: what it measures, and how it fails."""

import asyncio
import json
from typing import Any

import pytest

from headrace.configs.errors import ConfigurationError
from headrace.frontend.cli.bench.http_target import Target
from headrace.frontend.cli.bench.load import LoadRun, run_load
from headrace.frontend.cli.bench.load_client import LoadRequest, Record
from headrace.frontend.cli.bench.self_check import (
    MAX_ERROR,
    check_against_mock,
    mock_target,
    scripted_figures,
)
from headrace.frontend.cli.bench.serve import run_on_loop
from headrace.frontend.cli.bench.serve_result import ResultOptions, make_result


def request(path: str = "/v1/completions", max_tokens: int = 5, **script: Any) -> LoadRequest:
    body = {"prompt": [1, 2, 3], "max_tokens": max_tokens, "mock": script}
    return LoadRequest(path, json.dumps(body).encode(), 3, max_tokens, "id")


def load(
    target: Target, *requests: LoadRequest, timeout_s: float = 20.0, **options: Any
) -> LoadRun:
    times = options.pop("times", [0.0] * len(requests))
    return run_on_loop(run_load(target, requests, times, timeout_s=timeout_s, **options))


def one(target: Target, *args: Any, **script: Any) -> Record:
    return load(target, request(*args, **script)).records[0]


def test_it_measures_what_the_mock_server_does():
    """PP60: less than 2 % off in time to first token, per token, end to end, and throughput."""
    rows = check_against_mock(attempts=6)
    assert set(rows) == set(scripted_figures())
    assert {name: row["error"] for name, row in rows.items() if row["error"] >= MAX_ERROR} == {}


@pytest.mark.parametrize(
    "wrong", ["first event forgotten", "tokens instead of intervals", "clock starts late"]
)
def test_a_wrong_benchmark_does_not_pass_the_check(wrong, monkeypatch):
    """The check can fail: each of these mistakes moves a figure by more than 2 %."""
    if wrong == "first event forgotten":
        monkeypatch.setattr(Record, "ttft", property(lambda r: r.event_times[1] - r.sent_at))
    elif wrong == "tokens instead of intervals":
        spent = property(lambda r: (r.event_times[-1] - r.event_times[0]) / r.num_tokens)
        monkeypatch.setattr(Record, "tpot", spent)
    else:
        monkeypatch.setattr(
            Record, "latency", property(lambda r: r.last_event_at - r.sent_at - 0.02)
        )
    rows = check_against_mock(attempts=1)
    assert max(row["error"] for row in rows.values()) >= MAX_ERROR


def test_a_record_has_counts_and_text(mock):
    record = one(mock, max_tokens=4)
    assert record.is_success and "".join(record.text) == " a a a a"
    assert (record.num_tokens, record.num_prompt_tokens) == (4, 3)
    assert len(record.event_times) == 4 and len(record.itls) == 3


def test_the_role_of_a_chat_is_not_its_first_token(mock):
    record = one(mock, "/v1/chat/completions", ttft_ms=100.0)
    assert record.ttft > 0.09 and len(record.event_times) == 5


def test_one_token_has_no_time_per_token(mock):
    record = one(mock, max_tokens=1)
    assert record.is_success and record.tpot is None and record.itls == []


@pytest.mark.parametrize(
    ("fail", "kind"),
    [
        ("status", "HTTP 429"),
        ("error", "error in stream"),
        ("cut", "connection closed"),
        ("garbage", "bad event"),
        ("silent", "no output"),
    ],
)
def test_failures_have_a_kind_each(mock, fail, kind):
    record = one(mock, fail=fail)
    assert record.error_kind == kind and record.error


def test_no_server_and_no_end(mock):
    nowhere = Target.from_url("http://127.0.0.1:9", {})
    assert one(nowhere).error_kind == "no connection"
    slow = load(mock, request(ttft_ms=5000.0), timeout_s=0.1).records[0]
    assert slow.error_kind == "timeout"


def test_failed_requests_are_in_no_figure(mock):
    run = load(mock, *(request(ttft_ms=1.0) for _ in range(3)), request(fail="cut", ttft_ms=900.0))
    result = make_result(run, ResultOptions(), None)
    assert (result["completed"], result["failed"]) == (3, 1)
    assert result["errors_by_kind"] == {"connection closed": 1}
    assert result["mean_ttft_ms"] < 500
    assert result["total_output_tokens"] == 15 and result["total_input_tokens"] == 9
    nothing = make_result(load(mock, request(fail="status")), ResultOptions(), None)
    for name in ("mean_ttft_ms", "request_throughput", "output_throughput", "p99_itl_ms"):
        assert nothing[name] is None


def test_concurrency_is_bounded(mock):
    run = load(mock, *(request(ttft_ms=30.0) for _ in range(7)), max_concurrency=2)
    result = make_result(run, ResultOptions(), None)
    assert result["max_concurrent_requests"] == 2 and result["completed"] == 7
    assert run.duration > 0.1


def test_requests_are_sent_at_their_times(mock):
    run = load(mock, *(request() for _ in range(3)), times=[0.0, 0.1, 0.2])
    sent = [record.sent_at - run.started_at for record in run.records]
    assert all(sent[i] >= 0.1 * i - 0.002 for i in range(3))  # timers count milliseconds
    assert [r.scheduled_at - run.started_at for r in run.records] == pytest.approx([0.0, 0.1, 0.2])


def test_goodput_counts_those_within_the_limits(mock):
    run = load(mock, *(request(ttft_ms=t) for t in (0.0, 0.0, 300.0)))
    result = make_result(run, ResultOptions(goodput={"ttft": 150.0}), None)
    assert result["request_goodput"] == pytest.approx(2 / run.duration)


def test_events_may_hold_several_tokens(mock):
    run = load(mock, request(max_tokens=8, num_events=2, itl_ms=140.0))
    record = run.records[0]
    assert len(record.event_times) == 2 and record.num_tokens == 8
    assert record.tpot is not None and 0.019 < record.tpot < 0.1  # 140 ms for seven tokens
    assert make_result(run, ResultOptions(), None)["tokens_per_event"] == 4


@pytest.mark.parametrize("url", ["localhost:3", "ftp://host", "http://", "http://host:x"])
def test_wrong_addresses(url):
    with pytest.raises(ConfigurationError, match="must look like"):
        Target.from_url(url, {})


def test_a_header_cannot_smuggle_another():
    with pytest.raises(ConfigurationError, match="cannot be sent"):
        Target.from_url("http://host", {"X": "a\r\nY: b"})


def test_the_mock_server_ends_with_its_reader():
    with mock_target() as target:
        assert target.port > 0
    record = asyncio.run(
        run_load(target, [request()], [0.0], timeout_s=5.0)
    ).records[0]  # fmt: skip
    assert record.error_kind == "no connection"
