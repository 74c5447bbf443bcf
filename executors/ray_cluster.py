"""Ray: joining a cluster or starting one, and the placement group that workers run in."""

import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from typing import Any, NamedTuple

from headrace.configs.config import ParallelConfig
from headrace.configs.errors import ConfigurationError
from headrace.configs.process_times import process_start_time

logger = logging.getLogger(__name__)

PLACEMENT_TIMEOUT_S = 1800.0
RELEASE_TIMEOUT_S = 10.0  # that workers of an engine core before this one may take to be gone
_RELEASE_POLL_S = 0.1
_FIRST_WAIT_S = 10.0  # until the log says that a placement group is waited for; then doubled
_PINNED_SHARE = 0.001  # of a node's own resource, so that a bundle lands there
_OBJECT_STORE_BYTES = 80 << 20  # Ray's least but for a little; nothing of ours goes through it
_DIRECTORY = "headrace-ray-"
_AUTH_MODE = "RAY_AUTH_MODE"


class Bundle(NamedTuple):
    """A worker's place."""

    number: int  # in the placement group
    node_id: str


def import_ray(option: str = "distributed_executor_backend") -> Any:
    """The package, which `option` asks for. Raises ConfigurationError if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise ConfigurationError(
            f"{option} ray needs Ray ({error}): pip install 'headrace[ray]', or choose mp"
        ) from error
    return ray


def initialize_ray_cluster(parallel_config: ParallelConfig, ray_address: str | None = None) -> None:
    """Connect to Ray and find or make a placement group for the workers of one replica.

    A program that is connected already stays so. Without an address, the cluster of RAY_ADDRESS or
    of `ray start` on this machine is joined, and if there is none, one is started here. Sets
    `placement_group` (its id, in hexadecimal) and `ray_address` of `parallel_config`. Raises
    ValueError if Ray is not installed or the workers do not fit, RuntimeError if this node has
    none of them.
    """
    ray = import_ray()
    if not ray.is_initialized():
        connect(ray, parallel_config.world_size, ray_address or known_cluster())
    resource = parallel_config.ray_resource
    if resource not in ray.cluster_resources():
        raise ConfigurationError(
            f"the Ray cluster has no {resource}s, which each worker takes one of: "
            f"{sorted(ray.cluster_resources())}"
        )
    from ray.util.placement_group import get_current_placement_group

    if parallel_config.placement_group is not None:
        group = find_group(parallel_config.placement_group)
        check_group(group.bundle_specs, parallel_config)
    elif (group := get_current_placement_group()) is not None:
        check_group(group.bundle_specs, parallel_config)
    else:
        group = _make_group(ray, parallel_config)
    _check_nodes(ray, group, parallel_config)
    # The configuration is frozen for everyone else: vLLM's contract has the group stored in it.
    object.__setattr__(parallel_config, "placement_group", group.id.hex())
    object.__setattr__(parallel_config, "ray_address", ray.get_runtime_context().gcs_address)


def find_group(group_id: str) -> Any:
    """Ray's object for a placement group's id."""
    from ray._raylet import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    return PlacementGroup(PlacementGroupID(bytes.fromhex(group_id)))


def bundles_for(parallel_config: ParallelConfig, node_id: str) -> list[Bundle]:
    """The bundle of each worker, by rank: those on the node `node_id` first, neighbours together.

    `initialize_ray_cluster` comes first.
    """
    from ray.util import placement_group_table

    assert parallel_config.placement_group is not None
    group = find_group(parallel_config.placement_group)
    nodes = placement_group_table(group)["bundles_to_node_id"]
    usable = [
        Bundle(index, nodes[index])
        for index, bundle in enumerate(group.bundle_specs)
        if bundle.get(parallel_config.ray_resource, 0) >= 1
    ]
    counts = {node: sum(other.node_id == node for other in usable) for node in nodes.values()}
    usable.sort(key=lambda b: (b.node_id != node_id, -counts[b.node_id], b.node_id, b.number))
    return usable[: parallel_config.world_size]


def check_group(bundles: list[dict[str, float]], parallel_config: ParallelConfig) -> None:
    """Whether a placement group that somebody else has made can hold the workers.

    A bundle holds one worker. More than one GPU in it would be lost; more CPUs are its threads'.
    """
    resource, needed = parallel_config.ray_resource, parallel_config.world_size
    counts = [bundle.get(resource, 0) for bundle in bundles]
    if resource == "GPU" and max(counts, default=0) > 1:
        raise ConfigurationError(
            f"a bundle of the placement group has {max(counts):g} GPUs; a worker takes one, so "
            "make bundles of one GPU each"
        )
    available = sum(count >= 1 for count in counts)
    if needed > available:
        raise ConfigurationError(
            f"tensor_parallel_size {parallel_config.tensor_parallel_size} and "
            f"pipeline_parallel_size {parallel_config.pipeline_parallel_size} need {needed} "
            f"bundles with a {resource}, but the placement group has {available}"
        )


def connect(ray: Any, num_workers: int, address: str | None) -> None:
    """Join the cluster at the address; None: start one here, with room for the workers."""
    options: dict[str, Any] = {"address": address}
    if address is None:
        cores = len(os.sched_getaffinity(0))
        options = {
            "address": "local",
            "num_cpus": max(cores, num_workers),
            "include_dashboard": False,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "_temp_dir": _temp_dir(),
        }
    handlers = {}  # Ray puts its own in their place
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        ray.init(
            configure_logging=True, logging_level=logging.WARNING, log_to_driver=True, **options
        )
    except (OSError, RuntimeError, ValueError) as error:
        hint = f". Does it run, and if it asks for a token, is {_AUTH_MODE}=token set?"
        raise ConfigurationError(
            f"cannot connect to Ray at {address or 'a cluster of our own'}: {error}"
            f"{hint if address else ''}"
        ) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    where = f"joined the cluster at {address}" if address else "started a cluster of its own"
    logger.info("Ray %s: %s", ray.__version__, where)


def known_cluster() -> str | None:
    """That of RAY_ADDRESS, or of `ray start` on this machine."""
    from ray._private.services import find_bootstrap_address

    address: str | None = os.environ.get("RAY_ADDRESS") or find_bootstrap_address(None)
    return address


def auth_mode() -> str:
    """How who connects to a cluster that this process has started shows that it may."""
    return os.environ.get(_AUTH_MODE, "")


def use_auth_mode(mode: str) -> None:
    """Before `connect` to a cluster that another process of ours has started, with its mode."""
    if mode and _AUTH_MODE not in os.environ:
        os.environ[_AUTH_MODE] = mode
        import_ray()._raylet.Config.initialize("")  # it was read when Ray was imported


def _temp_dir() -> str:
    """For the sockets and logs of a cluster of our own; what killed processes left is removed."""
    parent = tempfile.gettempdir()
    for name in os.listdir(parent):
        pid, _, rest = name.removeprefix(_DIRECTORY).partition("-")
        if name.startswith(_DIRECTORY) and pid.isdigit():
            path = os.path.join(parent, name)
            is_ours = os.stat(path).st_uid == os.getuid()
            if is_ours and process_start_time(int(pid)) != rest.partition("-")[0]:
                shutil.rmtree(path, ignore_errors=True)
    pid = str(os.getpid())
    return tempfile.mkdtemp(prefix=f"{_DIRECTORY}{pid}-{process_start_time(os.getpid())}-")


def disconnect() -> None:
    """Leave the cluster; one that we have started ends, and its files go."""
    ray = import_ray()
    directory = ray._private.worker._global_node and ray._private.worker._global_node.temp_dir
    ray.shutdown()
    if directory and os.path.basename(directory).startswith(f"{_DIRECTORY}{os.getpid()}-"):
        shutil.rmtree(directory, ignore_errors=True)


def _make_group(ray: Any, parallel_config: ParallelConfig) -> Any:
    resource, needed = parallel_config.ray_resource, parallel_config.world_size
    in_cluster = ray.cluster_resources()[resource]
    if needed > in_cluster:
        logger.warning(
            "%d workers need a %s each, and the Ray cluster has %g: waiting for it to grow",
            needed, resource, in_cluster,
        )  # fmt: skip
    node = ray.get_runtime_context().get_node_id()
    ip = ray.util.get_node_ip_address()
    give_up = time.monotonic() + min(RELEASE_TIMEOUT_S, parallel_config.start_timeout_s)
    while (available := _available(ray, node)).get(resource, 0) < 1:
        if time.monotonic() < give_up:
            time.sleep(_RELEASE_POLL_S)
            continue
        raise ConfigurationError(
            f"this node (id {node}, address {ip}) has no {resource} left ({available}), and "
            "at least one worker must run beside the engine core"
        )
    bundles: list[dict[str, float]] = [{resource: 1.0} for _ in range(needed)]
    bundles[0][f"node:{ip}"] = _PINNED_SHARE
    group = ray.util.placement_group(bundles, strategy="PACK")
    limit = min(PLACEMENT_TIMEOUT_S, parallel_config.start_timeout_s)
    _wait_for(ray, group, bundles, limit)
    return group


def _available(ray: Any, node_id: str) -> dict[str, float]:
    resources: dict[str, float] = ray._private.state.available_resources_per_node().get(node_id, {})
    return {name: amount for name, amount in resources.items() if "_group_" not in name}


def _wait_for(ray: Any, group: Any, bundles: list[dict[str, float]], limit: float) -> None:
    ready, began, wait_s = group.ready(), time.monotonic(), _FIRST_WAIT_S
    while (left := began + limit - time.monotonic()) > 0:
        if ray.wait([ready], timeout=min(wait_s, left))[0]:
            return
        logger.info(
            "waiting for the placement group %s since %.0f s", bundles, time.monotonic() - began
        )
        wait_s *= 2
    available, whole = ray.available_resources(), ray.cluster_resources()
    ray.util.remove_placement_group(group)
    raise ConfigurationError(
        f"the Ray cluster had no room for {bundles} within {limit:g} s; it has {whole}, of which "
        f"{available} are free. See `ray status`"
    )


def _check_nodes(ray: Any, group: Any, parallel_config: ParallelConfig) -> None:
    from ray.util import placement_group_table

    nodes = list(placement_group_table(group)["bundles_to_node_id"].values())
    here = ray.get_runtime_context().get_node_id()
    if here not in nodes:
        raise RuntimeError(
            f"this node (id {here}) has no bundle of the placement group, which is on "
            f"{sorted(set(nodes))}; start the engine on one of them"
        )
    shards = parallel_config.tensor_parallel_size
    small = {node: nodes.count(node) for node in nodes if nodes.count(node) < shards}
    if small:
        logger.warning(
            "the %d shards of a stage are on several nodes (bundles by node: %s): their sums go "
            "over the network at every layer, which is slow",
            shards, small,
        )  # fmt: skip
