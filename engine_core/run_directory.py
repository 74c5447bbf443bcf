"""The private directory of one run: Unix sockets live here, and nothing outlives the run.

`<temp>/headrace-<uid>/<pid>-<start time>-<random>/`, mode 0700, with a lock file that its owner
keeps locked. The last survivor removes it; what a run that was killed at one instant left behind is
reclaimed by the next one.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

from headrace.configs.errors import ConfigurationError
from headrace.configs.process_times import process_start_time

MAX_SOCKET_PATH = 107  # bytes in sockaddr_un.sun_path, without the final NUL
_LOCK = "lock"


class RunDirectory:
    """A fresh run directory; construction also reclaims stale ones. `remove()` is idempotent."""

    def __init__(self, parent: Path | None = None) -> None:
        base = _private_base(parent or Path(tempfile.gettempdir()))
        reclaim_stale(base)
        self.path = _fresh_directory(base)
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def socket_path(self, name: str) -> Path:
        """Path for a Unix socket; ConfigurationError if the system could not bind it."""
        path = self.path / name
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            raise ConfigurationError(
                f"socket path {path} has {len(os.fsencode(path))} bytes, the system allows "
                f"{MAX_SOCKET_PATH}; set TMPDIR to a shorter directory"
            )
        return path

    def remove(self) -> None:
        """Remove the directory and release its lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def reclaim_stale(base: Path) -> list[Path]:
    """Remove run directories whose owner is gone (by pid and start time, and its lock is free)."""
    removed = []
    for path in base.iterdir():
        pid, _, rest = path.name.partition("-")
        start = rest.partition("-")[0]
        if not pid.isdigit() or process_start_time(int(pid)) == start or _is_locked(path):
            continue
        shutil.rmtree(path, ignore_errors=True)
        removed.append(path)
    return removed


def _private_base(parent: Path) -> Path:
    base = parent / f"headrace-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        base.mkdir(mode=0o700)
    info = base.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise ConfigurationError(
            f"{base} must be a directory of this user with mode 0700; remove it or set TMPDIR"
        )
    return base


def _fresh_directory(base: Path) -> Path:
    owner = f"{os.getpid()}-{process_start_time(os.getpid())}"
    while True:  # a short name: socket paths have little room
        path = base / f"{owner}-{secrets.token_hex(2)}"
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return path


def _is_locked(path: Path) -> bool:
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(lock)
