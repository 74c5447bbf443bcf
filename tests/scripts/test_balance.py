"""10,000 requests over 8 replicas: as even as the router promises, and prefixes stay together."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "bench" / "balance.py"


@pytest.fixture(scope="module")
def balance() -> ModuleType:
    spec = importlib.util.spec_from_file_location("balance", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["balance"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_mixed_lengths(balance: ModuleType) -> None:
    result = balance.simulate(1)
    assert sum(result.decisions.values()) == 10_000
    assert result.load_spread <= 1.1
    assert result.percentile(0.99) <= 1.2  # at each arrival, not only over time


def test_lengths_that_nobody_tells_even_out_over_time(balance: ModuleType) -> None:
    assert balance.simulate(1, tells_length=False).load_spread <= 1.2


def test_shared_prefixes(balance: ModuleType) -> None:
    """Each replica can keep a quarter of the prefixes."""
    result = balance.simulate(1, num_prefixes=200, num_requests=5000)
    assert result.load_spread <= 1.2 and result.percentile(0.9) <= 1.2
    assert result.hit_rate >= 0.9 * result.best_hit_rate > 0.5


def test_several_api_servers(balance: ModuleType) -> None:
    result = balance.simulate(1, num_clients=4, num_prefixes=50, num_requests=4000)
    assert result.load_spread <= 1.2
    assert result.hit_rate >= 0.9 * result.best_hit_rate > 0.5
