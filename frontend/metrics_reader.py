"""Metrics as plain values: what `LLM.get_metrics` returns."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as Family
    from prometheus_client.samples import Sample

_HIDDEN_LABELS = ("le",)


@dataclass
class Metric:
    """A metric with one set of labels."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass
class Gauge(Metric):
    """A number that goes up and down."""

    value: float


@dataclass
class Vector(Metric):
    """Counters of one thing at several positions."""

    values: list[int] = field(default_factory=list)


@dataclass
class Histogram(Metric):
    """How often values were seen: `buckets` counts those up to each upper bound ("+Inf": all)."""

    count: int
    sum: float
    buckets: dict[str, int]


def read_metrics(registry: "CollectorRegistry") -> list[Metric]:
    """A snapshot of every metric in a registry, each set of labels by itself."""
    metrics: list[Metric] = []
    for family in registry.collect():
        if family.type == "counter":
            metrics += _counters(family)
        elif family.type == "gauge":
            metrics += [Gauge(s.name, dict(s.labels), float(s.value)) for s in family.samples]
        elif family.type == "histogram":
            metrics += _histograms(family)
    return metrics


def _counters(family: "Family") -> Iterator[Metric]:
    """Counters by the name of their family; those that differ in `position` are one vector."""
    vectors: dict[tuple[tuple[str, str], ...], dict[int, int]] = {}
    for sample in family.samples:
        if sample.name != f"{family.name}_total":
            continue  # the time of its creation
        labels = dict(sample.labels)
        position = labels.pop("position", None)
        if position is None:
            yield Counter(family.name, labels, int(sample.value))
        else:
            values = vectors.setdefault(tuple(labels.items()), {})
            values[int(position)] = int(sample.value)
    for key, values in vectors.items():
        yield Vector(family.name, dict(key), [values[position] for position in sorted(values)])


def _histograms(family: "Family") -> Iterator[Metric]:
    by_labels: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    for sample in family.samples:
        key = tuple(item for item in sample.labels.items() if item[0] not in _HIDDEN_LABELS)
        by_labels.setdefault(key, []).append(sample)
    for labels, samples in by_labels.items():
        buckets = {s.labels["le"]: int(s.value) for s in samples if s.name.endswith("_bucket")}
        totals = {s.name.removeprefix(family.name): s.value for s in samples}
        yield Histogram(
            family.name,
            dict(labels),
            count=int(totals.get("_count", 0)),
            sum=float(totals.get("_sum", 0.0)),
            buckets=buckets,
        )
