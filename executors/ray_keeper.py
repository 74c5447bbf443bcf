"""A Ray cluster that several processes share and none of them owns: it ends with the last of them.

It is for machines where no cluster runs. A process of its own, the keeper, starts the cluster, and
ends it when nobody holds its FIFO open any more, however those who did have ended.
"""

import fcntl
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.configs.errors import ConfigurationError
from headrace.executors.ray_cluster import (
    auth_mode,
    connect,
    disconnect,
    import_ray,
    use_auth_mode,
)

_FIFO = "ray"
_LOCK = "ray.lock"
_ADDRESS = "ray.address"
_FAILED = "!"
_HOLD = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC


def hold_cluster(directory: Path, num_workers: int) -> tuple[str, int]:
    """The address of the cluster that the processes in `directory` share, and what keeps it alive.

    That is a descriptor. The first to come starts the cluster, with room for `num_workers`. This
    process can `connect` to it then. Raises ConfigurationError if it cannot start.
    """
    answer, hold = _hold(directory, num_workers)
    address, _, auth_mode = answer.partition(" ")
    use_auth_mode(auth_mode)
    return address, hold


def _hold(directory: Path, num_workers: int) -> tuple[str, int]:
    with _locked(directory):
        fifo = directory / _FIFO
        if not fifo.exists():
            os.mkfifo(fifo, 0o600)
        try:
            return (directory / _ADDRESS).read_text(), os.open(fifo, _HOLD)
        except OSError:  # nobody reads: there is no keeper
            pass
        reader = os.open(fifo, os.O_RDWR | os.O_CLOEXEC)
        hold = os.open(fifo, _HOLD)  # before there is one, so that it cannot outlive us
        os.close(reader)
        try:
            answer = _start_keeper(directory, num_workers)
            (directory / _ADDRESS).write_text(answer)
        except BaseException:
            os.close(hold)
            raise
        return answer, hold


def _start_keeper(directory: Path, num_workers: int) -> str:
    read_end, write_end = os.pipe()
    command = [sys.executable, "-P", "-m", __name__, str(directory), str(num_workers)]
    try:
        subprocess.Popen(
            [*command, str(write_end)],
            stdin=subprocess.DEVNULL,
            pass_fds=[write_end],
            start_new_session=True,
        )
    finally:
        os.close(write_end)
    with os.fdopen(read_end) as answers:
        answer = answers.readline().strip()
    if not answer or answer.startswith(_FAILED):
        reason = answer.removeprefix(_FAILED) or "the log above says why"
        raise ConfigurationError(
            f"no Ray cluster runs, and none could be started here: {reason}. `ray start --head` "
            "starts one that is joined then"
        )
    return answer


def main(directory: Path, num_workers: int, answer: int) -> None:
    """Be the keeper, and write the cluster's address to the descriptor `answer`."""
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever ends us ends those who hold it
        signal.signal(number, lambda *_: None)
    fifo = os.open(directory / _FIFO, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    ray = import_ray()
    try:
        with os.fdopen(answer, "w") as file:
            try:
                connect(ray, num_workers, None)
            except ConfigurationError as error:
                file.write(f"{_FAILED}{error}\n")
                return
            file.write(f"{ray.get_runtime_context().gcs_address} {auth_mode()}\n")
        _wait_until_let_go(fifo, directory)
    finally:
        disconnect()


def _wait_until_let_go(fifo: int, directory: Path) -> None:
    poll = select.poll()
    poll.register(fifo, 0)  # POLLHUP is always reported: nobody writes any more
    while True:
        try:
            with _locked(directory):  # nobody comes meanwhile
                if not _is_held(fifo):
                    os.close(fifo)
                    return
        except FileNotFoundError:  # the directory is gone, and so is everybody
            return
        poll.poll()


def _is_held(fifo: int) -> bool:
    try:
        return bool(os.read(fifo, 1))
    except BlockingIOError:
        return True


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    fd = os.open(directory / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
