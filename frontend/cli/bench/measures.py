"""The arithmetic of benchmarks: percentiles, summaries, how many at once."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile of at least one value, linear between neighbours (as numpy's default)."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True)
class Summary:
    """Mean, median, population standard deviation and percentiles of some values."""

    count: int
    mean: float
    median: float
    std: float
    percentiles: dict[float, float]


def summarize(values: Sequence[float], percents: Iterable[float]) -> Summary | None:
    """None if there are no values: nothing stands for a measurement that was not made."""
    if not values:
        return None
    return Summary(
        count=len(values),
        mean=statistics.fmean(values),
        median=percentile(values, 50),
        std=statistics.pstdev(values),
        percentiles={percent: percentile(values, percent) for percent in percents},
    )


def most_at_once(intervals: Iterable[tuple[float, float]]) -> int:
    """How many of the [start, end) intervals overlap at the busiest moment."""
    changes = sorted(change for start, end in intervals for change in ((start, 1), (end, -1)))
    most = running = 0
    for _, step in changes:  # at equal times ends (-1) come first
        running += step
        most = max(most, running)
    return most


def most_per_second(events: Iterable[tuple[float, float]]) -> float:
    """The largest sum of amounts in one second: (time, amount) pairs in seconds from a start."""
    buckets: dict[int, float] = {}
    for at, amount in events:
        buckets[int(at)] = buckets.get(int(at), 0.0) + amount
    return max(buckets.values(), default=0.0)


def percent_name(percent: float) -> str:
    """`99` and `99.9`: how a percentile is named in keys and tables."""
    return f"{percent:g}"
