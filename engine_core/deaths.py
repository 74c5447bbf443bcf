"""What the death of a process may have to do with what it ran."""

import signal
from enum import Enum
from pathlib import Path

_VMSTAT = Path("/proc/vmstat")
# Nobody but a person, or a program like a service manager, sends these.
_ASKED_FOR = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})


class Cause(Enum):
    """Why a process has died, as far as that can be seen from outside."""

    ITSELF = 0  # a crash, an exit, or standing still: what it ran may have done it
    MEMORY = 1  # the system may have taken it for want of memory: whatever ran, or something else
    OPERATOR = 2  # somebody wanted it


class OutOfMemoryKills:
    """The kernel's count of processes that it has killed for want of memory, on the whole machine.

    `check` is to be called often: a new one may then be the death that is looked at.
    """

    def __init__(self, vmstat: Path = _VMSTAT) -> None:
        self._vmstat = vmstat
        self._known = self._read()

    def check(self) -> bool:
        """Whether there was one since the last time, or nobody can say."""
        before, self._known = self._known, self._read()
        return self._known is None or self._known != before

    def _read(self) -> int | None:
        try:
            lines = self._vmstat.read_text().splitlines()
        except OSError:
            return None
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def cause_of(exit_code: int | None, kills: OutOfMemoryKills) -> Cause:
    """Of a death with that exit code (negative: the signal; None: we killed it as it hung)."""
    if exit_code == -signal.SIGKILL:
        return Cause.MEMORY if kills.check() else Cause.OPERATOR
    if exit_code is not None and -exit_code in _ASKED_FOR:
        return Cause.OPERATOR
    return Cause.ITSELF
