"""The arithmetic against numpy, and against counting by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.frontend.cli.bench.measures import (
    most_at_once,
    most_per_second,
    percent_name,
    percentile,
    summarize,
)

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@given(VALUES, st.floats(0, 100))
def test_percentiles_are_numpys(values, percent):
    expected = float(np.percentile(values, percent))
    assert percentile(values, percent) == pytest.approx(expected, rel=1e-9, abs=1e-6)


@given(VALUES)
def test_summaries_are_numpys(values):
    summary = summarize(values, (10, 99.9))
    assert summary is not None and summary.count == len(values)
    assert summary.mean == pytest.approx(np.mean(values), rel=1e-9, abs=1e-6)
    assert summary.median == pytest.approx(np.median(values), rel=1e-9, abs=1e-6)
    assert summary.std == pytest.approx(np.std(values), rel=1e-6, abs=1e-4)
    assert list(summary.percentiles) == [10, 99.9]


def test_nothing_has_no_summary():
    assert summarize([], (50,)) is None


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), max_size=20))
def test_most_at_once_is_what_counting_gives(pairs):
    intervals = [(start, start + length) for start, length in pairs]
    counted = [sum(start <= t < end for start, end in intervals) for t in range(41)]
    assert most_at_once(intervals) == max(counted)


def test_most_per_second():
    assert most_per_second([(0.1, 2), (0.9, 3), (1.0, 4)]) == 5
    assert most_per_second([]) == 0
    assert [percent_name(p) for p in (99.0, 99.9)] == ["99", "99.9"]
