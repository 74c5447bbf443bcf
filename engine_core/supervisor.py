"""Starts one engine-core process, watches it and ends it; owns the run directory."""

import logging
from pathlib import Path

from headrace.engine_core.run_directory import RunDirectory
from headrace.executors.child_process import ChildProcess

STOP_TIMEOUT_S = 2.0  # from the Shutdown message to SIGKILL; with HTTP's own 2 s, under 5 in all


class EngineCoreProcess:
    """A running `python -P -m headrace.engine_core`.

    Construct it early: it imports torch while the caller goes on, if a worker is to run in it.
    """

    def __init__(self, epoch: int = 1, has_worker: bool = True) -> None:
        self.epoch = epoch
        self._run_directory = RunDirectory()
        try:
            self.socket_path: Path = self._run_directory.socket_path(f"core-{epoch}.sock")
            self._process = self._spawn(has_worker)
        except BaseException:
            self._run_directory.remove()
            raise
        self.started = self._process.started
        self.pid = self._process.pid
        self.sentinel = self._process.sentinel  # readable once the process has ended

    def _spawn(self, has_worker: bool) -> ChildProcess:
        arguments = [
            "--socket", str(self.socket_path), "--epoch", str(self.epoch),
            "--log-level", str(logging.getLogger("headrace").getEffectiveLevel()),
        ]  # fmt: skip
        if has_worker:
            arguments.append("--preload-worker")
        return ChildProcess("headrace.engine_core", arguments)

    @property
    def exit_code(self) -> int | None:
        """None while running; negative: killed by that signal."""
        return self._process.exit_code

    def describe_exit(self) -> str:
        """How the process ended, for a message."""
        return self._process.describe_exit()

    def kill(self) -> None:
        """End the process at once and clean up."""
        self._process.kill()
        self.stop()

    def stop(self, timeout: float = STOP_TIMEOUT_S) -> None:
        """Wait for the process (told to shut down by a message before), then kill it; clean up.

        Idempotent.
        """
        if self._process.stop(timeout):
            self._run_directory.remove()
