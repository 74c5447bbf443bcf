"""What `headrace doctor` looks at before an engine with several workers is started.

The workers are real processes or actors, without a model: they start, meet and are called as those
of an engine are.
"""

import itertools
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from headrace.configs.config import EngineConfig, ModelConfig, ParallelConfig
from headrace.configs.errors import HeadraceError
from headrace.configs.hardware import cpu_facts
from headrace.executors.executor import Executor, make_executor
from headrace.executors.node_agent import run_agent
from headrace.executors.worker_calls import decode_results, encode_call
from headrace.executors.worker_hub import DeploymentKey

PROBE_WORKER = "headrace.workers.distributed.probe.ProbeWorker"
SHM = "/dev/shm"
MIN_SHM_BYTES = 256 << 20
SLOW_BYTES_PER_S = 100e6  # below that, the sums of shards take longer than computing them


@dataclass(frozen=True)
class Check:
    """What was looked at and found; `fix` says what to do, "" if it is as it should be."""

    name: str
    found: str
    fix: str = ""


def make_key(path: str) -> None:
    """Write a fresh key for the connections between machines. Raises ConfigurationError."""
    DeploymentKey.generate().write(path)


def help_node_0(parallel: ParallelConfig) -> int:
    """Run the workers of this machine until machine 0 has made its checks; 0 then."""
    return run_agent(parallel)


def run_checks(parallel: ParallelConfig) -> Iterator[Check]:
    """Of this machine, then of the workers together. What comes after a failure is left out."""
    yield Check("CPU", cpu_facts().describe())
    yield from _threads(parallel)
    yield _shared_memory()
    if parallel.distributed_executor_backend == "ray":
        yield from _ray_nodes(parallel)
    executor = make_executor(_config(parallel), False, lambda: None)
    try:
        executor.start(lambda phase: None)
    except (HeadraceError, RuntimeError, OSError) as error:
        yield Check("workers", str(error), _start_fix(parallel))
        return
    try:
        yield from _between_workers(executor, parallel)
    except (HeadraceError, RuntimeError) as error:
        yield Check("transfer", str(error), _start_fix(parallel))
    finally:
        executor.shutdown()


def _config(parallel: ParallelConfig) -> EngineConfig:
    model = ModelConfig("", "", "", ("",), "", {}, "float32", 1, 1, None)
    return EngineConfig(model, parallel_config=replace(parallel, worker_cls=PROBE_WORKER))


def _threads(parallel: ParallelConfig) -> Iterator[Check]:
    facts = cpu_facts()
    count = parallel.world_size // parallel.nnodes
    if facts.num_cores < count and parallel.distributed_executor_backend != "ray":
        yield Check(
            "threads",
            f"{count} workers here, but {facts.num_cores} cores",
            f"they take turns on the cores; use at most {facts.num_cores} workers on this machine, "
            "or give it (its container's --cpus) more",
        )


def _shared_memory() -> Check:
    try:
        usage = shutil.disk_usage(SHM)
    except OSError as error:
        return Check("shared memory", str(error), f"mount a tmpfs at {SHM}")
    found = f"{SHM}: {usage.free >> 20} MiB free of {usage.total >> 20} MiB"
    if usage.free < MIN_SHM_BYTES:
        fix = (
            f"at least {MIN_SHM_BYTES >> 20} MiB should be free: remove files of old runs there, "
            "or start the container with --shm-size=1g"
        )
        return Check("shared memory", found, fix)
    return Check("shared memory", found)


def _ray_nodes(parallel: ParallelConfig) -> Iterator[Check]:
    from headrace.executors.ray_cluster import import_ray, initialize_ray_cluster

    try:
        ray = import_ray()
        initialize_ray_cluster(parallel, parallel.ray_address)
    except (HeadraceError, RuntimeError) as error:
        yield Check("Ray", str(error), "see `ray status`; on every machine: ray start --address=…")
        return
    for node in ray.nodes():
        resources = {name: node["Resources"].get(name, 0) for name in ("CPU", "GPU")}
        found = f"{node['NodeManagerAddress']}: {resources}"
        fix = "" if node["Alive"] else "this node is gone: start Ray on it again"
        yield Check("Ray node", found, fix)


def _between_workers(executor: Executor, parallel: ParallelConfig) -> Iterator[Check]:
    def call(method: str, *args: Any) -> list[Any]:
        return decode_results(executor.call_workers(encode_call(0, method, args, None)))

    for place in call("place"):
        cpus = ",".join(map(str, place["cpus"]))
        yield Check(
            "worker",
            f"{place['place']} on {place['host']} (pid {place['pid']}): {place['threads']} "
            f"threads on CPUs {cpus}, Gloo on {place['interface'] or 'no interface'}",
        )
    for first, second in itertools.combinations(range(parallel.world_size), 2):
        latency, rate = call("time_pair", first, second)[first]
        found = f"rank {first} - rank {second}: {latency * 1e6:.0f} us, {rate / 1e6:.0f} MB/s"
        fix = ""
        if rate < SLOW_BYTES_PER_S:
            fix = (
                "this is slow: set GLOO_SOCKET_IFNAME to the interface of the fast network, and "
                "keep the shards of a stage on one machine"
            )
        yield Check("transfer", found, fix)
    if parallel.tensor_parallel_size > 1:
        in_memory, over_gloo = call("time_shards")[0]
        found = f"sum of {parallel.tensor_parallel_size} shards over Gloo {over_gloo * 1e6:.0f} us"
        if in_memory >= 0:
            found += f", a meeting in shared memory {in_memory * 1e6:.0f} us"
        else:
            found += ", no shared memory (other machines, or no native kernels)"
        yield Check("shards", found)


def _start_fix(parallel: ParallelConfig) -> str:
    if parallel.nnodes > 1:
        return (
            f"run the same command with --node-rank 1 … {parallel.nnodes - 1} on the other "
            f"machines; they must reach {parallel.master_addr}:{parallel.master_port} (firewall?) "
            "and have the same key file"
        )
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        return f"GLOO_SOCKET_IFNAME={interface} is set: unset it, or name an interface that is up"
    return "see the workers' log lines above; then run this again"
