"""What this process may use of the machine: processors, memory, instruction sets. Torch-free.

The limits that count are those of the cgroups the process is in, version 1 or 2 or both, at every
level up to the root; the machine's own numbers are only the ceiling. A file that is missing or
unreadable limits nothing.
"""

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import psutil

from headrace.configs.config import DType
from headrace.configs.errors import ConfigurationError

GIB = 1 << 30

# Instruction sets that kernels and the choice of dtype ask about, by their names in /proc/cpuinfo
# (x86, then Arm).
_KNOWN_ISA = (
    *("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16"),
    *("asimddp", "i8mm", "bf16"),
)
_BFLOAT16_ISA = {"avx512_bf16", "amx_bf16", "bf16"}


@dataclass(frozen=True)
class CpuFacts:
    """Processors and memory that this process may use. Memory in bytes."""

    allowed_cpus: tuple[int, ...]
    core_cpus: tuple[int, ...]  # the first allowed CPU of each physical core
    cpu_quota: float | None  # CPU seconds per second that the cgroups allow; None: no limit
    memory_total: int  # of the machine
    memory_limit: int | None  # the smallest cgroup limit below memory_total
    memory_available: int  # without swapping or passing a limit
    isa: tuple[str, ...]  # the known instruction sets that all CPUs have

    @property
    def num_cores(self) -> int:
        """Physical cores among the allowed CPUs."""
        return len(self.core_cpus)

    @property
    def num_threads(self) -> int:
        """Compute threads: one per allowed core, and no more than whole CPUs in the quota."""
        if self.cpu_quota is None:
            return self.num_cores
        return min(self.num_cores, max(1, int(self.cpu_quota)))

    @property
    def preferred_dtype(self) -> DType:
        """bfloat16 where the processor multiplies it in hardware, else float32."""
        return "bfloat16" if _BFLOAT16_ISA.intersection(self.isa) else "float32"

    def helper_cpus(self, pinning: str) -> tuple[int, ...] | None:
        """The CPUs for all compute threads but the first, which is the caller's; None: anywhere.

        `pinning`: none; auto, which gives each a core of its own if there are as many cores as
        threads, and else pins none; or a list like 1-3,6 of as many CPUs as there are such threads.
        Raises ConfigurationError for another list.
        """
        num_helpers = self.num_threads - 1
        if pinning == "none" or num_helpers == 0:
            return None
        if pinning == "auto":
            return self.core_cpus[1:] if num_helpers + 1 == self.num_cores else None
        cpus = tuple(_listed_cpus(pinning))
        if len(cpus) != num_helpers or not set(cpus) <= set(self.allowed_cpus):
            raise ConfigurationError(
                f"CPU pinning must be none, auto or a list of {num_helpers} of the CPUs "
                f"{', '.join(map(str, self.allowed_cpus))}, one for each thread but the first; "
                f"got {pinning!r}"
            )
        return cpus

    def shared(self, index: int, count: int, memory_available: int | None = None) -> "CpuFacts":
        """What is left for one of `count` processes that divide all this: cores side by side.

        With fewer cores than processes, each may use them all, with one thread. `memory_available`:
        of all together, if some of them may have taken theirs already.
        """
        if count == 1:
            return self
        own = replace(
            self,
            memory_available=(memory_available or self.memory_available) // count,
            memory_total=self.memory_total // count,
            memory_limit=None if self.memory_limit is None else self.memory_limit // count,
            cpu_quota=None if self.cpu_quota is None else self.cpu_quota / count,
        )
        cores, num_cores = self.core_cpus, len(self.core_cpus)
        if num_cores < count:
            return replace(own, cpu_quota=1.0)
        cpus = cores[index * num_cores // count : (index + 1) * num_cores // count]
        return replace(own, allowed_cpus=cpus, core_cpus=cpus)

    def memory_for(self, share: float) -> int:
        """Bytes that a worker may take: what is available, and at most `share` of the whole.

        The whole is the cgroup's limit, or the machine's memory where there is none.
        """
        whole = self.memory_total if self.memory_limit is None else self.memory_limit
        return min(self.memory_available, int(share * whole))

    def describe(self) -> str:
        """One line for the log."""
        quota = "no quota" if self.cpu_quota is None else f"quota {self.cpu_quota:g} CPUs"
        limit = "no limit" if self.memory_limit is None else f"limit {_gib(self.memory_limit)}"
        return (
            f"CPU: {self.num_threads} threads ({self.num_cores} cores, "
            f"{len(self.allowed_cpus)} CPUs allowed, {quota}); "
            f"memory: {_gib(self.memory_available)} available of {_gib(self.memory_total)}, "
            f"{limit}; "
            f"isa: {' '.join(self.isa) or 'none known'}; dtype auto: {self.preferred_dtype}"
        )


def cpu_facts(root: Path = Path("/"), allowed_cpus: Collection[int] | None = None) -> CpuFacts:
    """Read the facts from `proc` and `sys` below `root`.

    `allowed_cpus`: by default the CPUs this process may run on.
    """
    cpus = tuple(sorted(_affinity() if allowed_cpus is None else allowed_cpus))
    quotas = list(_quotas(root))
    total, available = _machine_memory(root)
    limit = None
    for group_limit, group_used in _memory_limits(root):
        if group_limit < total:
            limit = group_limit if limit is None else min(limit, group_limit)
            available = min(available, max(0, group_limit - group_used))
    return CpuFacts(
        allowed_cpus=cpus,
        core_cpus=_core_cpus(root, cpus),
        cpu_quota=min(quotas) if quotas else None,
        memory_total=total,
        memory_limit=limit,
        memory_available=available,
        isa=_isa(root),
    )


def _affinity() -> Collection[int]:
    if hasattr(os, "sched_getaffinity"):  # Linux
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _core_cpus(root: Path, cpus: tuple[int, ...]) -> tuple[int, ...]:
    """The first CPU of each distinct physical core: CPUs of one core list the same siblings.

    A CPU of unknown topology counts as a core.
    """
    cores: dict[str, int] = {}
    for cpu in cpus:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = _read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list")
        cores.setdefault(siblings or str(cpu), cpu)
    return tuple(cores.values())


def _listed_cpus(text: str) -> Iterator[int]:
    """CPUs of a list like 1-3,6; nothing if it is none."""
    if not re.fullmatch(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", text):
        return
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _quotas(root: Path) -> Iterator[float]:
    """CPU quotas of the cgroups the process is in, in CPUs."""
    for group in _cgroups(root, None):
        words = _read(group / "cpu.max").split()  # "QUOTA|max PERIOD", microseconds
        if len(words) == 2:
            yield from _ratio(_number(words[0]), _number(words[1]))
    for group in _cgroups(root, "cpu"):
        quota = _number(_read(group / "cpu.cfs_quota_us"))  # -1: none
        yield from _ratio(quota, _number(_read(group / "cpu.cfs_period_us")))


def _ratio(quota: int | None, period: int | None) -> Iterator[float]:
    if quota is not None and period is not None and quota > 0 and period > 0:
        yield quota / period


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) of the cgroups the process is in, without file pages that can be dropped."""
    for group in _cgroups(root, None):
        limit = _number(_read(group / "memory.max"))  # "max": none
        if limit is not None:
            used = _number(_read(group / "memory.current")) or 0
            inactive = _fields(_read(group / "memory.stat")).get("inactive_file", 0)
            yield limit, max(0, used - inactive)
    for group in _cgroups(root, "memory"):
        limit = _number(_read(group / "memory.limit_in_bytes"))  # near 2^63: none
        if limit is not None:
            used = _number(_read(group / "memory.usage_in_bytes")) or 0
            stat = _fields(_read(group / "memory.stat"))
            # Ancestors that a container does not see show only in this line.
            limit = min(limit, stat.get("hierarchical_memory_limit", limit))
            yield limit, max(0, used - stat.get("total_inactive_file", 0))


def _cgroups(root: Path, controller: str | None) -> Iterator[Path]:
    """Directories of the process's cgroup and its ancestors, innermost first.

    `controller` None means version 2. Inside a container the path in /proc/self/cgroup may be the
    host's, where the mount shows only the container's own group: levels that do not exist are
    skipped, and the mount's top remains.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if controller is None:
            if names:
                continue
            mounts = ["", "unified"]  # the second in hybrid set-ups
        elif controller in names.split(","):
            mounts = sorted({controller, names})
        else:
            continue
        # A process outside its namespace's root sees a path that starts with "..".
        inside = PurePosixPath(*[p for p in path.split("/") if p not in ("", "..")])
        for mount in mounts:
            top = root / "sys/fs/cgroup" / mount
            for level in (inside, *inside.parents):
                if (top / level).is_dir():
                    yield top / level


def _machine_memory(root: Path) -> tuple[int, int]:
    """Total and available bytes of the machine."""
    info = _fields(_read(root / "proc/meminfo"))  # "Name:  N kB"
    if "MemTotal:" in info and "MemAvailable:" in info:
        return info["MemTotal:"] * 1024, info["MemAvailable:"] * 1024
    memory = psutil.virtual_memory()  # other systems than Linux
    return memory.total, memory.available


def _isa(root: Path) -> tuple[str, ...]:
    flags: set[str] | None = None
    for line in _read(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):  # x86, Arm
            flags = set(value.split()) if flags is None else flags & set(value.split())
    return tuple(name for name in _KNOWN_ISA if flags and name in flags)


def _fields(text: str) -> dict[str, int]:
    """First word -> number in the second, for every line that has them."""
    fields = {}
    for line in text.splitlines():
        words = line.split()
        number = _number(words[1]) if len(words) > 1 else None
        if number is not None:
            fields[words[0]] = number
    return fields


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
