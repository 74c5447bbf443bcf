"""A process that we start and that must not outlive us: both ends of that promise.

The child gets the read end of a pipe whose write end lives in the parent, so it ends when the
parent does, however that happens.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

# OpenMP threads spin at barriers by default; when another process wants their core, each barrier
# then costs a time slice, and a step takes several times longer. Set before torch is loaded.
OPENMP_SPIN = {"GOMP_SPINCOUNT": "1000"}
_PARENT_POLL_S = 0.5
_PR_SET_PDEATHSIG = 1


class ChildProcess:
    """A running `python -P -m MODULE --parent-pipe N --parent-pid N ARGUMENTS`.

    It has a process group of its own: Ctrl-C in the terminal reaches the parent alone, which
    decides.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        pass_fds: Sequence[int] = (),
        environ: dict[str, str] | None = None,
    ) -> None:
        """`environ` is added to this process's environment."""
        self.started = time.time()  # seconds since the epoch
        read_end, write_end = os.pipe()
        command = [
            sys.executable, "-P", "-m", module,
            "--parent-pipe", str(read_end), "--parent-pid", str(os.getpid()), *arguments,
        ]  # fmt: skip
        try:
            self._popen = subprocess.Popen(
                command,
                env={**OPENMP_SPIN, **os.environ, **(environ or {})},
                stdin=subprocess.DEVNULL,
                pass_fds=[read_end, *pass_fds],
                process_group=0,
            )
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        self._pipe = write_end
        self.pid = self._popen.pid
        self.sentinel = os.pidfd_open(self.pid)  # readable once the process has ended

    @property
    def exit_code(self) -> int | None:
        """None while running; negative: killed by that signal."""
        return self._popen.poll()

    def describe_exit(self) -> str:
        """How the process ended, for a message."""
        code = self.exit_code
        if code is None:
            return "it is still running"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"it was killed by {signal.Signals(-code).name}"
        return f"it exited with code {code}"

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        self._popen.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL, if it still runs; `stop` waits for it."""
        if self.exit_code is None:
            self._popen.kill()

    def wait(self) -> None:
        """Wait for its end."""
        self._popen.wait()

    def wait_family(self, timeout: float) -> bool:
        """Wait until nobody holds the pipe any more: neither it nor those it handed the pipe on to.

        False if that has not happened after `timeout` s.
        """
        poll = select.poll()
        poll.register(self._pipe, 0)  # POLLERR is always reported: the pipe has no reader
        return bool(poll.poll(1000 * timeout))

    def stop(self, timeout: float) -> bool:
        """Wait `timeout` s for the process, which was told to end, then kill it; clean up.

        Idempotent: False if that was done before.
        """
        if self._pipe < 0:
            return False
        try:
            self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        os.close(self._pipe)
        os.close(self.sentinel)
        self._pipe = -1
        return True


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, even if stopped."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def watch_parent(pipe: int, parent: int, clean_up: Callable[[], None] = lambda: None) -> None:
    """Run in a thread of the child: exit when the parent does, after `clean_up`.

    A process that the parent forked can hold the pipe open, hence the second look at the parent's
    pid. A process that is stopped runs no thread: see `die_with_parent`.
    """
    while os.getppid() == parent:
        if select.select([pipe], [], [], _PARENT_POLL_S)[0] and not os.read(pipe, 1):
            break
    clean_up()
    os._exit(1)
