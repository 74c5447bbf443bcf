"""What the server says of itself: its `/metrics` before and after a run, and their difference."""

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from headrace.frontend.cli.bench.http_target import AnswerError, Target, fetch

# Histograms by our name of what they measure; the part before the colon differs among servers.
CLOCKS = {
    "ttft": "time_to_first_token_seconds",
    "itl": "inter_token_latency_seconds",
    "tpot": "request_time_per_output_token_seconds",
    "e2el": "e2e_request_latency_seconds",
    "queue": "request_queue_time_seconds",
    "prefill": "request_prefill_time_seconds",
}
Sums = Mapping[str, float]  # sample name without prefix -> sum over all its labels


@dataclass(frozen=True)
class ServerClock:
    """Means in ms by the server's own clock, and the share of prompt tokens it had cached."""

    means_ms: dict[str, float]
    cache_hit_share: float | None


async def scrape(target: Target) -> Sums | None:
    """The server's counters and histogram sums; None if it has no readable `/metrics`."""
    try:
        text = (await fetch(target, "GET", "/metrics")).decode()
        return sums_of(text)
    except (AnswerError, ValueError):
        return None


def sums_of(text: str) -> Sums:
    """Sums by sample name; raises ValueError for text that is not an exposition."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if ":" in sample.name and "le" not in sample.labels:
                name = sample.name.partition(":")[2]
                sums[name] = sums.get(name, 0.0) + sample.value
    return sums


def between(before: Sums | None, after: Sums | None) -> ServerClock | None:
    """What happened in between; None if either is missing."""
    if before is None or after is None:
        return None

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    means = {}
    for name, histogram in CLOCKS.items():
        count = grown(f"{histogram}_count")
        if count > 0:
            means[name] = 1e3 * grown(f"{histogram}_sum") / count
    queries = grown("prefix_cache_queries_total")
    share = grown("prefix_cache_hits_total") / queries if queries > 0 else None
    return ServerClock(means, share)
