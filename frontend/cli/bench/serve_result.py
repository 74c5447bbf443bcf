"""From records of requests to the result: JSON for programs, tables for people.

Figures are over successful requests only; a failed one is counted by what went wrong with it and
never enters a mean.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.frontend.cli.bench.load import LoadRun
from headrace.frontend.cli.bench.load_client import Record
from headrace.frontend.cli.bench.measures import (
    most_at_once,
    most_per_second,
    percent_name,
    summarize,
)
from headrace.frontend.cli.bench.report import print_section, print_table
from headrace.frontend.cli.bench.server_clock import ServerClock

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "itl": "time between events",
    "e2el": "end to end",
}
Json = dict[str, Any]


@dataclass(frozen=True)
class ResultOptions:
    """Which metrics and percentiles to show.

    `goodput`: limits in ms by metric. `paced`: requests had times to be sent at.
    """

    metrics: tuple[str, ...] = ("ttft", "tpot", "itl")
    percents: tuple[float, ...] = (99.0,)
    goodput: Mapping[str, float] | None = None
    paced: bool = False


def values_of(metric: str, records: Sequence[Record]) -> list[float]:
    """Seconds of every successful record; one value per request, for itl one per event pair."""
    good = [record for record in records if record.is_success]
    if metric == "ttft":
        return [record.ttft for record in good]
    if metric == "e2el":
        return [record.latency for record in good]
    if metric == "itl":
        return list(itertools.chain.from_iterable(record.itls for record in good))
    return [value for value in (record.tpot for record in good) if value is not None]


def make_result(run: LoadRun, options: ResultOptions, clock: ServerClock | None) -> Json:
    """Every figure of a run, by the names that people know."""
    good = [record for record in run.records if record.is_success]
    num_input = sum(_num_input(record) for record in good)
    num_output = sum(record.num_tokens for record in good)
    result: Json = {
        "num_prompts": len(run.records),
        "duration": run.duration,
        "completed": len(good),
        "failed": len(run.records) - len(good),
        "errors_by_kind": dict(Counter(r.error_kind for r in run.records if r.error_kind)),
        "error_examples": {r.error_kind: r.error for r in run.records if r.error_kind},
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        **_lengths(good),
        "request_throughput": _rate(len(good), run) if good else None,
        "request_goodput": _goodput(good, run, options.goodput) if options.goodput else None,
        "output_throughput": _rate(num_output, run) if good else None,
        "total_token_throughput": _rate(num_input + num_output, run) if good else None,
        "max_output_tokens_per_s": most_per_second(_token_events(good, run)) if good else None,
        "max_concurrent_requests": most_at_once((r.sent_at, r.last_event_at) for r in good),
        "cache_hit_share": _cache_hit_share(good, clock),
        "server_mean_ms": clock.means_ms if clock else None,
        "mean_send_delay_ms": (
            _mean_ms([r.sent_at - r.scheduled_at for r in good]) if options.paced else None
        ),
        "tokens_per_event": num_output / max(1, sum(len(r.event_times) for r in good)),
    }
    for metric in METRICS:
        result |= _summary_fields(metric, run.records, options.percents)
    return result


def details_of(run: LoadRun) -> Json:
    """Raw values of every request, in order; failed ones have an error and zeros."""
    records = run.records
    return {
        "input_lens": [_num_input(record) for record in records],
        "requested_output_lens": [record.request.max_tokens for record in records],
        "output_lens": [_or_zero(record, lambda r: r.num_tokens) for record in records],
        "ttfts": [_or_zero(record, lambda r: r.ttft) for record in records],
        "itls": [record.itls if record.is_success else [] for record in records],
        "latencies": [_or_zero(record, lambda r: r.latency) for record in records],
        "start_times": [record.sent_at - run.started_at for record in records],
        "generated_texts": ["".join(record.text) for record in records],
        "errors": [
            f"{record.error_kind}: {record.error}" if record.error_kind else ""
            for record in records
        ],
    }


def print_result(result: Json, options: ResultOptions) -> None:
    """The tables. Without a success there are counts and errors, and no figures."""
    num_all, num_failed = result["num_prompts"], result["failed"]
    rows: Json = {"successful requests": result["completed"], "failed requests": num_failed}
    rows |= {f"  {kind}": count for kind, count in result["errors_by_kind"].items()}
    rows["duration (s)"] = result["duration"]
    print_section("serving benchmark", rows)
    for kind, example in result["error_examples"].items():
        print(f"{kind}, for example: {example}")
    if not result["completed"]:
        print("every request failed: there is nothing to take a mean of")
        return
    if num_failed:
        print(f"{num_failed} of {num_all} requests failed: all figures below are of the other "
              f"{result['completed']} only")  # fmt: skip
    print_section("tokens", _token_rows(result))
    percents = [f"p{percent_name(percent)}" for percent in options.percents]
    rows = {
        METRICS[metric]: [result[f"{name}_{metric}_ms"] for name in ("mean", "median", *percents)]
        for metric in options.metrics
    }
    print_table("latency, client's clock (ms)", ["mean", "median", *percents], rows)
    server = result["server_mean_ms"]
    if server:
        print_table(
            "means by both clocks (ms)",
            ["client", "server"],
            {
                METRICS.get(metric, metric): [result.get(f"mean_{metric}_ms"), mean]
                for metric, mean in server.items()
            },
        )


def _token_rows(result: Json) -> Json:
    rows = {
        "input tokens": result["total_input_tokens"],
        "input tokens asked for": result["requested_input_tokens"],
        "output tokens": result["total_output_tokens"],
        "output tokens asked for": result["requested_output_tokens"],
        "requests shorter than asked for": result["num_shorter_outputs"],
        "share of input found in the cache": result["cache_hit_share"],
        "requests/s": result["request_throughput"],
        "output tokens/s": result["output_throughput"],
        "peak output tokens/s": result["max_output_tokens_per_s"],
        "input + output tokens/s": result["total_token_throughput"],
        "most requests at once": result["max_concurrent_requests"],
    }
    if result["request_goodput"] is not None:
        rows["requests/s within the goodput limits"] = result["request_goodput"]
    if abs(result["tokens_per_event"] - 1) > 0.01:
        rows["tokens per event"] = result["tokens_per_event"]
    if result["mean_send_delay_ms"] is not None:
        rows["mean delay of sending (ms)"] = result["mean_send_delay_ms"]
    return rows


def _lengths(good: Sequence[Record]) -> Json:
    asked = [record.request.num_prompt_tokens for record in good]
    return {
        "requested_input_tokens": sum(n or 0 for n in asked) if None not in asked else None,
        "requested_output_tokens": sum(record.request.max_tokens for record in good),
        "num_shorter_outputs": sum(r.num_tokens < r.request.max_tokens for r in good),
    }


def _num_input(record: Record) -> int:
    if record.num_prompt_tokens is not None:
        return record.num_prompt_tokens
    return record.request.num_prompt_tokens or 0


def _rate(count: float, run: LoadRun) -> float:
    return count / run.duration


def _token_events(good: Sequence[Record], run: LoadRun) -> list[tuple[float, float]]:
    return [
        (time - run.started_at, record.num_tokens / len(record.event_times))
        for record in good
        for time in record.event_times
    ]


def _goodput(good: Sequence[Record], run: LoadRun, limits: Mapping[str, float]) -> float:
    """Requests a second that keep every limit; a request without a value keeps its limit."""

    def keeps(record: Record) -> bool:
        return all(
            1e3 * value <= limit
            for metric, limit in limits.items()
            for value in values_of(metric, [record])
        )

    return _rate(sum(keeps(record) for record in good), run)


def _cache_hit_share(good: Sequence[Record], clock: ServerClock | None) -> float | None:
    """By the usage of each answer where it says so, else by the server's counters."""
    known = [r for r in good if r.num_cached_tokens is not None and r.num_prompt_tokens]
    total = sum(record.num_prompt_tokens or 0 for record in known)
    if total:
        return sum(record.num_cached_tokens or 0 for record in known) / total
    return clock.cache_hit_share if clock else None


def _summary_fields(metric: str, records: Sequence[Record], percents: Sequence[float]) -> Json:
    summary = summarize(values_of(metric, records), percents)
    names = ["mean", "median", "std", *(f"p{percent_name(percent)}" for percent in percents)]
    if summary is None:
        return dict.fromkeys(f"{name}_{metric}_ms" for name in names)
    values = [summary.mean, summary.median, summary.std, *summary.percentiles.values()]
    return {f"{name}_{metric}_ms": 1e3 * value for name, value in zip(names, values, strict=True)}


def _mean_ms(seconds: Sequence[float]) -> float | None:
    summary = summarize(seconds, ())
    return 1e3 * summary.mean if summary else None


def _or_zero(record: Record, value: Callable[[Record], float]) -> float:
    return value(record) if record.is_success else 0
