"""When a process was started, from /proc: to recognise it again, and to time a start-up."""

import os
import time
from pathlib import Path


def process_start_time(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot, or None if there is none.

    Field 22 of /proc/PID/stat.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, ValueError):
        return None
    return text.rpartition(")")[2].split()[19]


def process_creation_time(pid: int) -> float:
    """Wall-clock time at which a process was created: seconds since the epoch, to 10 ms."""
    start = process_start_time(pid)
    if start is None:
        raise ProcessLookupError(f"no process {pid}")
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + int(start) / os.sysconf("SC_CLK_TCK")
