"""Options of several workers: what goes together, what is refused, and with which numbers."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.configs.engine_options.parallel import ParallelOptions
from headrace.configs.errors import ConfigurationError
from headrace.configs.parallel import resolve_parallel


def resolve(seed: int | None = None, **options: Any) -> Any:
    return resolve_parallel(ParallelOptions(**options), seed)


class OwnExecutor:
    """Stands for a class of the user's."""


def fake_ray(group: Any) -> Any:
    """Of a process that is connected to Ray, in that placement group."""
    context = SimpleNamespace(gcs_address="10.0.0.9:6379")
    return SimpleNamespace(
        is_initialized=lambda: True,
        get_runtime_context=lambda: context,
        util=SimpleNamespace(get_current_placement_group=lambda: group),
    )


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)


def test_the_backend_that_is_chosen() -> None:
    assert resolve().distributed_executor_backend == "uni"
    assert resolve(tensor_parallel_size=2).distributed_executor_backend == "mp"
    own = resolve(distributed_executor_backend=OwnExecutor)
    assert own.distributed_executor_backend == f"{__name__}.OwnExecutor"
    launched = resolve(7, distributed_executor_backend="external_launcher")
    assert launched.distributed_executor_backend == "external_launcher"


def test_in_a_placement_group_it_is_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is found out without importing Ray or connecting to it."""
    pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)")
    group = SimpleNamespace(id=SimpleNamespace(hex=lambda: "abcd"))
    monkeypatch.setitem(sys.modules, "ray", fake_ray(group))
    config = resolve(tensor_parallel_size=2)
    assert config.distributed_executor_backend == "ray"
    assert (config.placement_group, config.ray_address) == ("abcd", "10.0.0.9:6379")
    forced = resolve(tensor_parallel_size=2, distributed_executor_backend="mp")
    assert forced.placement_group is None and forced.ray_address is None
    assert resolve().distributed_executor_backend == "uni"
    monkeypatch.setitem(sys.modules, "ray", fake_ray(None))
    assert resolve(tensor_parallel_size=2).distributed_executor_backend == "mp"
    joined = resolve(distributed_executor_backend="ray")
    assert (joined.placement_group, joined.ray_address) == (None, "10.0.0.9:6379")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distributed_executor_backend": "mpi"}, "'mpi' is none of uni, mp, ray, external_launch"),
        (
            {"distributed_executor_backend": "uni", "tensor_parallel_size": 3},
            "tensor_parallel_size 3 .*need 3",
        ),
        ({"distributed_executor_backend": "external_launcher"}, "needs a seed.*--seed"),
        ({"node_rank": 1}, "node_rank 1 does not go with nnodes 1: .* 0 to 0"),
        ({"nnodes": 2, "tensor_parallel_size": 2}, "nnodes 2 needs a cluster_key_file"),
        (
            {"nnodes": 2, "tensor_parallel_size": 3, "cluster_key_file": "k"},
            r"3 workers \(tensor_parallel_size 3 x .*cannot be divided among nnodes 2",
        ),
        (
            {"nnodes": 2, "tensor_parallel_size": 2, "distributed_executor_backend": "ray"},
            "nnodes 2 is for distributed_executor_backend mp, not ray",
        ),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve(**options)


def test_several_machines() -> None:
    config = resolve(
        tensor_parallel_size=2, pipeline_parallel_size=2, nnodes=2, node_rank=1,
        master_addr="10.0.0.1", master_port=4000, cluster_key_file="k",
    )  # fmt: skip
    assert config.distributed_executor_backend == "mp"
    assert (config.nnodes, config.node_rank, config.master_addr) == (2, 1, "10.0.0.1")
    assert (config.master_port, config.cluster_key_file) == (4000, "k")


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'headrace\[ray\]'"):
        resolve(distributed_executor_backend="ray")
