"""Which replicas an engine runs, and how they divide the machine."""

import sys
from typing import Any

import pytest

from headrace.configs.config import ParallelConfig
from headrace.configs.engine_options.parallel import ParallelOptions
from headrace.configs.errors import ConfigurationError, UnsupportedFeatureError
from headrace.configs.hardware import CpuFacts
from headrace.configs.options import check_options
from headrace.configs.parallel import resolve_parallel


@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        ({}, range(1)),
        ({"size": 4}, range(4)),
        ({"size": 4, "size_local": 4}, range(4)),
        ({"size": 4, "rank": 0}, range(1)),
        ({"size": 4, "rank": 3}, range(3, 4)),
        ({"size": 4, "rank": 3, "size_local": 1, "external_lb": True}, range(3, 4)),
        ({"size": 4, "start_rank": 2, "size_local": 2}, range(2, 4)),
        ({"size": 4, "hybrid_lb": True, "size_local": 2}, range(2)),
    ],
)
def test_modes(given: dict[str, Any], ranks: range) -> None:
    options = ParallelOptions(**{f"data_parallel_{name}": value for name, value in given.items()})
    check_options(options)
    config = resolve_parallel(options)
    assert config.ranks == ranks and config.data_parallel_size == given.get("size", 1)
    assert config.num_local_workers == len(ranks)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": 2, "rank": 2}, "rank 2 .* ranks 0 to 1"),
        ({"size": 2, "size_local": 3}, "local 3 is above data_parallel_size 2"),
        ({"size": 4, "start_rank": 3, "size_local": 2}, "up to 4, .* ranks 0 to 3"),
        ({"size": 4, "start_rank": 1}, "needs data_parallel_size_local"),
        ({"size": 4, "hybrid_lb": True}, "needs data_parallel_size_local"),
        ({"size": 4, "external_lb": True}, "needs data_parallel_rank"),
        ({"size": 4, "rank": 1, "size_local": 2}, "external mode runs one"),
        ({"size": 4, "rank": 1, "start_rank": 1, "size_local": 1}, "exclude"),
    ],
)
def test_contradictions(given: dict[str, Any], message: str) -> None:
    options = ParallelOptions(**{f"data_parallel_{name}": value for name, value in given.items()})
    with pytest.raises(ConfigurationError, match=message):
        resolve_parallel(options)


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"size": 4, "size_local": 2}, "--data-parallel-size-local 2 of 4"),
        ({"size": 4, "size_local": 0}, "--data-parallel-size-local 0"),
        ({"size": 2, "address": "10.0.0.1"}, "--data-parallel-address"),
    ],
)
def test_not_implemented(given: dict[str, Any], flag: str) -> None:
    options = ParallelOptions(**{f"data_parallel_{name}": value for name, value in given.items()})
    with pytest.raises(UnsupportedFeatureError, match=flag):
        check_options(options)
        resolve_parallel(options)


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"distributed_executor_backend": "ray"}, UnsupportedFeatureError, "leave distributed_ex"),
        ({"nnodes": 2, "cluster_key_file": "k", "tensor_parallel_size": 2}, ConfigurationError,
         "leave nnodes 2 out"),
    ],
)  # fmt: skip
def test_replicas_of_ray(more: dict[str, Any], error: type[Exception], message: str) -> None:
    options = ParallelOptions(data_parallel_size=2, data_parallel_backend="ray", **more)
    check_options(options)
    with pytest.raises(error, match=message):
        resolve_parallel(options)


def test_ray_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    with pytest.raises(ConfigurationError, match=r"data_parallel_backend ray .*headrace\[ray\]"):
        resolve_parallel(ParallelOptions(data_parallel_size=2, data_parallel_backend="ray"))


def test_replicas_on_a_node_divide_it() -> None:
    config = ParallelConfig(2, 1, 6, 6, data_parallel_rank=4, replicas_on_node=3, replica_on_node=1)
    assert config.num_local_workers == 6
    assert [config.local_worker(worker) for worker in (0, 1)] == [2, 3]


def test_workers_of_all_replicas_are_numbered_on_the_machine() -> None:
    numbers = [
        ParallelConfig(2, 2, 8, 2, 4, rank).local_worker(worker)
        for rank in (4, 5)
        for worker in range(4)
    ]
    assert numbers == list(range(8))


def facts(num_cores: int) -> CpuFacts:
    cpus = tuple(range(num_cores))
    return CpuFacts(cpus, cpus, None, 1000, 800, 600, ())


@pytest.mark.parametrize(("num_cores", "count"), [(4, 1), (4, 2), (5, 3), (2, 2), (8, 3)])
def test_replicas_divide_cores_and_memory(num_cores: int, count: int) -> None:
    parts = [facts(num_cores).shared(index, count) for index in range(count)]
    cpus = [cpu for part in parts for cpu in part.core_cpus]
    assert cpus == list(range(num_cores))
    assert sum(part.memory_for(0.9) for part in parts) <= 0.9 * 800
    assert all(part.memory_for(1.0) == min(600, 800) // count for part in parts)


def test_more_replicas_than_cores() -> None:
    part = facts(2).shared(3, 4)
    assert part.core_cpus == (0, 1) and part.num_threads == 1


def test_memory_that_others_have_taken_is_not_divided_again() -> None:
    late = CpuFacts((0, 1), (0, 1), None, 1000, None, 300, ())
    assert late.shared(1, 2, memory_available=600).memory_for(1.0) == 300
