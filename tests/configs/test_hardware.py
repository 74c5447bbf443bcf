"""Processor and memory facts from small trees of proc, sys and cgroup files."""

import os
from pathlib import Path

import psutil
import pytest

from headrace.configs.errors import ConfigurationError
from headrace.configs.hardware import CpuFacts, cpu_facts

GIB = 1 << 30
UNLIMITED_V1 = 0x7FFFFFFFFFFFF000
MEMINFO = f"MemTotal: {64 * GIB // 1024} kB\nMemFree: 5 kB\nMemAvailable: {48 * GIB // 1024} kB\n"


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def topology(
    num_cores: int, threads_per_core: int, name: str = "core_cpus_list"
) -> dict[str, object]:
    """CPU i and i + num_cores are threads of core i."""
    return {
        f"sys/devices/system/cpu/cpu{cpu}/topology/{name}": ",".join(
            str(cpu % num_cores + num_cores * thread) for thread in range(threads_per_core)
        )
        for cpu in range(num_cores * threads_per_core)
    }


def machine(flags: str = "flags : fpu avx2", **files: object) -> dict[str, object]:
    """A machine with 8 cores of 2 threads, 64 GiB, and no limits."""
    return {"proc/meminfo": MEMINFO, "proc/cpuinfo": flags, **topology(8, 2), **files}


def facts(root: Path, files: dict[str, object], num_cpus: int = 16) -> CpuFacts:
    return cpu_facts(write(root, machine()) and write(root, files), range(num_cpus))


def test_no_limits(tmp_path: Path) -> None:
    found = facts(tmp_path, {})
    assert (found.num_cores, found.num_threads, found.cpu_quota) == (8, 8, None)
    assert found.memory_total == 64 * GIB and found.memory_available == 48 * GIB
    assert found.memory_limit is None and found.allowed_cpus == tuple(range(16))


def test_pinning(tmp_path: Path) -> None:
    found = facts(tmp_path, {})  # 8 cores of 2 threads
    assert found.helper_cpus("none") is None
    assert found.helper_cpus("auto") == (1, 2, 3, 4, 5, 6, 7)
    assert found.helper_cpus("9-14,1") == (9, 10, 11, 12, 13, 14, 1)
    for wrong in ("", "1-3", "1-6,16", "7-1", "all", "1,2,3,4,5,6,-7", "0-99999"):
        with pytest.raises(ConfigurationError, match=r"list of 7 of the CPUs 0, 1, .*one for each"):
            found.helper_cpus(wrong)
    shared = cpu_facts(tmp_path, (2, 3, 10, 11))
    assert shared.core_cpus == (2, 3) and shared.helper_cpus("auto") == (3,)
    alone = cpu_facts(tmp_path, (5, 13))
    assert alone.helper_cpus("auto") is None and alone.helper_cpus("5") is None


def test_fewer_threads_than_cores_are_not_pinned(tmp_path: Path) -> None:
    quota = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "300000 100000"}
    found = facts(tmp_path, dict(quota))
    assert found.num_threads == 3
    assert found.helper_cpus("auto") is None and found.helper_cpus("4,6") == (4, 6)


def test_v2_with_nested_limits(tmp_path: Path) -> None:
    """The tightest level counts, separately for each resource; reclaimable file pages are free."""
    top = "sys/fs/cgroup"
    found = facts(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slice/service/worker",
            f"{top}/cgroup.controllers": "cpu memory",
            f"{top}/slice/cpu.max": "350000 100000",
            f"{top}/slice/memory.max": 6 * GIB,
            f"{top}/slice/memory.current": 3 * GIB,
            f"{top}/slice/memory.stat": f"anon {GIB}\ninactive_file {GIB}\nactive_file 7",
            f"{top}/slice/service/cpu.max": "max 100000",
            f"{top}/slice/service/memory.max": "max",
            f"{top}/slice/service/memory.current": GIB,
            f"{top}/slice/service/worker/cpu.max": "800000 100000",
            f"{top}/slice/service/worker/memory.max": 5 * GIB,
            f"{top}/slice/service/worker/memory.current": GIB // 2,
        },
    )
    assert found.cpu_quota == 3.5 and found.num_threads == 3
    assert found.memory_limit == 5 * GIB
    assert found.memory_available == 4 * GIB  # slice: 6 - (3 - 1)


def test_v1_with_nested_limits(tmp_path: Path) -> None:
    top = "sys/fs/cgroup"
    found = facts(
        tmp_path,
        {
            "proc/self/cgroup": "9:name=systemd:/a\n4:memory:/a/b\n2:cpu,cpuacct:/a/b\n1:cpuset:/",
            f"{top}/cpu,cpuacct/a/cpu.cfs_quota_us": 250000,
            f"{top}/cpu,cpuacct/a/cpu.cfs_period_us": 100000,
            f"{top}/cpu,cpuacct/a/b/cpu.cfs_quota_us": -1,
            f"{top}/cpu,cpuacct/a/b/cpu.cfs_period_us": 100000,
            f"{top}/memory/memory.limit_in_bytes": UNLIMITED_V1,
            f"{top}/memory/a/memory.limit_in_bytes": UNLIMITED_V1,
            f"{top}/memory/a/b/memory.limit_in_bytes": 8 * GIB,
            f"{top}/memory/a/b/memory.usage_in_bytes": 5 * GIB,
            f"{top}/memory/a/b/memory.stat": f"inactive_file 9\ntotal_inactive_file {2 * GIB}",
        },
    )
    assert found.cpu_quota == 2.5 and found.num_threads == 2
    assert found.memory_limit == 8 * GIB and found.memory_available == 5 * GIB


def test_v1_container_sees_only_its_own_group(tmp_path: Path) -> None:
    """The path is the host's, the mount the container's; an outer limit shows in the stat."""
    found = facts(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/0123\n1:cpu:/docker/0123",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": 50000,
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": 100000,
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 4 * GIB,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": GIB,
            "sys/fs/cgroup/memory/memory.stat": f"hierarchical_memory_limit {3 * GIB}",
        },
    )
    assert found.cpu_quota == 0.5 and found.num_threads == 1
    assert found.memory_limit == 3 * GIB and found.memory_available == 2 * GIB


def test_hybrid(tmp_path: Path) -> None:
    """Version 1 controllers beside a version 2 tree: limits of both count."""
    found = facts(
        tmp_path,
        {
            "proc/self/cgroup": "2:cpu:/a\n0::/b",
            "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": 600000,
            "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": 100000,
            "sys/fs/cgroup/unified/b/memory.max": 2 * GIB,
            "sys/fs/cgroup/unified/b/memory.current": GIB,
        },
    )
    assert found.cpu_quota == 6 and found.num_threads == 6
    assert found.memory_limit == 2 * GIB and found.memory_available == GIB


@pytest.mark.parametrize("path", ["/", "/../../other", "/gone/away"])
def test_v2_container_without_limits(tmp_path: Path, path: str) -> None:
    found = facts(
        tmp_path,
        {
            "proc/self/cgroup": f"0::{path}",
            "sys/fs/cgroup/cpu.max": "max 100000",
            "sys/fs/cgroup/memory.max": "max",
            "sys/fs/cgroup/memory.current": 40 * GIB,
        },
    )
    assert found.num_threads == 8 and found.memory_limit is None
    assert found.memory_available == 48 * GIB


def test_limits_above_the_machine_or_used_up(tmp_path: Path) -> None:
    files: dict[str, object] = {
        "proc/self/cgroup": "0::/",
        "sys/fs/cgroup/memory.max": 65 * GIB,
        "sys/fs/cgroup/memory.current": 64 * GIB,
    }
    assert facts(tmp_path, files).memory_limit is None
    files["sys/fs/cgroup/memory.max"] = 2 * GIB
    assert facts(tmp_path, files).memory_available == 0


def test_affinity_counts_cores_not_threads(tmp_path: Path) -> None:
    write(tmp_path, machine())
    assert cpu_facts(tmp_path, [0, 8]).num_cores == 1  # two threads of one core
    assert cpu_facts(tmp_path, [0, 1, 9]).num_cores == 2
    assert cpu_facts(tmp_path, {3}).num_threads == 1


def test_older_kernels_and_unknown_topology(tmp_path: Path) -> None:
    old = write(tmp_path / "old", topology(4, 2, "thread_siblings_list"))
    assert cpu_facts(old, range(8)).num_cores == 4
    assert cpu_facts(tmp_path / "nothing", range(8)).num_cores == 8


def test_missing_and_broken_files(tmp_path: Path) -> None:
    found = cpu_facts(tmp_path / "nothing", [0])
    assert found.memory_total == psutil.virtual_memory().total
    assert found.isa == () and found.preferred_dtype == "float32" and found.cpu_quota is None
    broken = facts(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\nnonsense\n::",
            "sys/fs/cgroup/cpu.max": "fast",
            "sys/fs/cgroup/memory.max": "-",
            "proc/cpuinfo": "flags\n:",
        },
    )
    assert broken.num_threads == 8 and broken.memory_limit is None and broken.isa == ()
    zero = facts(tmp_path, {"sys/fs/cgroup/cpu.max": "0 0"})
    assert zero.cpu_quota is None


@pytest.mark.parametrize(
    ("cpuinfo", "isa", "dtype"),
    [
        ("flags\t\t: fpu sse2 avx2 fma", ("avx2",), "float32"),
        ("flags : avx2 avx512f avx512_vnni", ("avx2", "avx512f"), "float32"),
        (
            "flags : avx2 avx512f avx512_bf16\nbogomips : 5\n\nflags : avx2 avx512_bf16 avx512f",
            ("avx2", "avx512f", "avx512_bf16"),
            "bfloat16",
        ),
        ("flags : avx2 amx_bf16 amx_tile", ("avx2", "amx_tile", "amx_bf16"), "bfloat16"),
        ("Features : fp asimd asimddp i8mm bf16", ("asimddp", "i8mm", "bf16"), "bfloat16"),
        ("Features : asimddp bf16\nFeatures : asimddp", ("asimddp",), "float32"),
    ],
)
def test_isa(tmp_path: Path, cpuinfo: str, isa: tuple[str, ...], dtype: str) -> None:
    found = facts(tmp_path, {"proc/cpuinfo": cpuinfo})
    assert found.isa == isa and found.preferred_dtype == dtype


def test_describe(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/",
        "sys/fs/cgroup/cpu.max": "150000 100000",
        "sys/fs/cgroup/memory.max": 2 * GIB,
        "sys/fs/cgroup/memory.current": GIB,
    }
    assert facts(tmp_path, files).describe() == (
        "CPU: 1 threads (8 cores, 16 CPUs allowed, quota 1.5 CPUs); memory: 1.0 GiB available of "
        "64.0 GiB, limit 2.0 GiB; isa: avx2; dtype auto: float32"
    )
    assert "no quota" in cpu_facts(tmp_path / "nothing", [0]).describe()


def test_memory_for_a_share(tmp_path: Path) -> None:
    """Of the machine's 64 GiB, 48 are available; or of a limit of 2 GiB, one is."""
    machine = facts(tmp_path / "machine", {})
    assert machine.memory_for(0.25) == 16 * GIB
    assert machine.memory_for(0.92) == machine.memory_for(1.0) == 48 * GIB
    limited = facts(
        tmp_path / "limited",
        {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": 2 * GIB,
            "sys/fs/cgroup/memory.current": GIB,
        },
    )
    assert limited.memory_for(0.25) == GIB // 2 and limited.memory_for(1.0) == GIB


def test_this_machine() -> None:
    found = cpu_facts()
    assert 1 <= found.num_threads <= len(found.allowed_cpus)
    assert 0 < found.memory_available <= found.memory_total
    if hasattr(os, "sched_getaffinity"):
        assert set(found.allowed_cpus) == os.sched_getaffinity(0)
