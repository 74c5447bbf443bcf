"""Starts one engine-core process, watches it and ends it; owns the run directory.

In a library this is an object in the caller's process. The child gets the read end of a pipe whose
write end lives here, so it ends when this process does, however that happens.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from headrace.engine_core.run_directory import RunDirectory

STOP_TIMEOUT_S = 2.0  # from the Shutdown message to SIGKILL; with HTTP's own 2 s, under 5 in all
# OpenMP threads spin at barriers by default; when another process wants their core, each barrier
# then costs a time slice, and a step takes several times longer. Set before torch is loaded.
OPENMP_SPIN = {"GOMP_SPINCOUNT": "1000"}


class EngineCoreProcess:
    """A running `python -P -m headrace.engine_core`.

    Construct it early: it imports torch while the caller goes on.
    """

    def __init__(self, epoch: int = 1) -> None:
        self.epoch = epoch
        self._run_directory = RunDirectory()
        self.started = time.time()  # seconds since the epoch
        try:
            self.socket_path: Path = self._run_directory.socket_path(f"core-{epoch}.sock")
            self._popen, self._pipe = self._spawn()
        except BaseException:
            self._run_directory.remove()
            raise
        self.pid = self._popen.pid
        self.sentinel = os.pidfd_open(self.pid)  # readable once the process has ended

    def _spawn(self) -> tuple[subprocess.Popen[bytes], int]:
        read_end, write_end = os.pipe()
        command = [
            sys.executable, "-P", "-m", "headrace.engine_core",
            "--socket", str(self.socket_path), "--epoch", str(self.epoch),
            "--parent-pipe", str(read_end), "--parent-pid", str(os.getpid()),
            "--log-level", str(logging.getLogger("headrace").getEffectiveLevel()),
        ]  # fmt: skip
        try:
            # A process group of its own: Ctrl-C in the terminal reaches the front end alone, which
            # decides.
            popen = subprocess.Popen(
                command,
                env={**OPENMP_SPIN, **os.environ},
                stdin=subprocess.DEVNULL,
                pass_fds=[read_end],
                process_group=0,
            )
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        return popen, write_end

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

    def kill(self) -> None:
        """End the process at once and clean up."""
        if self.exit_code is None:
            self._popen.kill()
        self.stop()

    def stop(self, timeout: float = STOP_TIMEOUT_S) -> None:
        """Wait for the process (told to shut down by a message before), then kill it; clean up.

        Idempotent.
        """
        if self._pipe < 0:
            return
        try:
            self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        os.close(self._pipe)
        os.close(self.sentinel)
        self._pipe = -1
        self._run_directory.remove()
