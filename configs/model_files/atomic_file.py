"""Write a file so that readers see the old content, the new content, or nothing: never a part."""

import contextlib
import fcntl
import glob
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """A binary file that takes the place of `path` when the block ends without an exception.

    The data goes to a hidden temporary file in the same directory (made if missing), is synced and
    renamed. On an exception the temporary file is removed; one left by a killed process is removed
    by the next writer of the same path. Raises OSError like any write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    temporary, file = _create_temporary(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make renames and removals in `directory` durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _create_temporary(path: Path) -> tuple[Path, BinaryIO]:
    """A new file that holds a lock as long as its writer lives."""
    while True:
        temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}.tmp"
        file = temporary.open("xb")
        fcntl.flock(file, fcntl.LOCK_SH)
        if os.fstat(file.fileno()).st_nlink:
            return temporary, file
        file.close()  # another writer took it for abandoned before it was locked


def _remove_abandoned(path: Path) -> None:
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(OSError), leftover.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover.unlink()
