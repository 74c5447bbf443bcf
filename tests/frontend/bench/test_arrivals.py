"""When requests are sent: deterministic, at the rate that was asked for."""

import itertools
import random
import statistics

import pytest

from headrace.frontend.cli.bench.arrivals import Arrivals


def times(arrivals: Arrivals, count: int = 500, seed: int = 0) -> list[float]:
    return arrivals.times(count, random.Random(seed))


def intervals(found: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(found)]


def test_all_at_once():
    assert times(Arrivals(), 3) == [0, 0, 0]


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 50.0])
def test_a_rate_is_kept_whatever_the_seed(burstiness):
    found = times(Arrivals(rate=5.0, burstiness=burstiness))
    assert found[0] == 0 and found == sorted(found)
    assert found[-1] == pytest.approx(499 / 5)
    assert found == times(Arrivals(rate=5.0, burstiness=burstiness))
    assert found != times(Arrivals(rate=5.0, burstiness=burstiness), seed=1)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_shape_of_the_gamma_distribution(burstiness):
    gaps = intervals(times(Arrivals(rate=1.0, burstiness=burstiness), 20_000))
    # The variance of gamma intervals of mean 1 is one over their shape.
    assert statistics.pvariance(gaps) == pytest.approx(1 / burstiness, rel=0.15)


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_a_ramp_goes_from_one_rate_to_the_other(strategy):
    ramp = Arrivals(burstiness=1e6, ramp_up=strategy, start_rate=2.0, end_rate=32.0)
    gaps = intervals(times(ramp, 1001))
    assert 1 / gaps[0] == pytest.approx(2, rel=0.05)
    assert 1 / gaps[-1] == pytest.approx(32, rel=0.05)
    middle = 17 if strategy == "linear" else 8
    assert 1 / gaps[500] == pytest.approx(middle, rel=0.05)


def test_one_request():
    assert times(Arrivals(rate=1.0), 1) == [0]
