"""One engine-core process, as its supervisor sees it: from its start to its end, an epoch."""

import logging
import os
import socket
from multiprocessing.connection import Connection

from headrace.engine_core.control_messages import Channel, FromCore
from headrace.engine_core.fence import FenceReader, make_fence
from headrace.engine_core.messages import Ready
from headrace.engine_core.run_directory import RunDirectory
from headrace.executors.child_process import ChildProcess
from headrace.executors.worker_hub import DeploymentKey
from headrace.workers.protocol import RequestFault


class EngineCoreProcess:
    """A running `python -P -m headrace.engine_core`: its channel, its fence, what it last said.

    It imports torch at once, if a worker is to run in it, and waits for a Hello.
    """

    def __init__(
        self,
        run_directory: RunDirectory,
        rank: int,
        epoch: int,
        has_worker: bool,
        host: str = "",
        key: DeploymentKey | None = None,
    ) -> None:
        """`host` and `key` as for `SocketThread`."""
        self.rank = rank
        self.epoch = epoch
        self.ready: Ready | None = None
        self.address = ""  # that it takes requests at, once it is ready, and the key for that
        self.key: tuple[str, str] | None = None
        self.fault: RequestFault | None = None  # why it ends, if it said so
        self.worker_exit_code: int | None = None  # of the worker whose loss ends it
        self.kill_reason: str | None = None  # why we killed it
        path = run_directory.socket_path(f"core-{rank}-{epoch}.sock")
        ours, theirs = socket.socketpair()
        fence = make_fence()
        passed = [theirs.fileno(), fence]
        try:
            with theirs:
                arguments = [
                    "--socket", str(path), "--epoch", str(epoch),
                    "--supervisor", str(theirs.fileno()), "--fence", str(fence),
                    "--log-level", str(logging.getLogger("headrace").getEffectiveLevel()),
                ]  # fmt: skip
                if has_worker:
                    arguments.append("--preload-worker")
                if key is not None:
                    passed.append(key.as_pipe())
                    arguments += ["--host", host, "--key", str(passed[-1])]
                self._process = ChildProcess("headrace.engine_core", arguments, passed)
            self.fence = FenceReader(fence)
        except BaseException:
            ours.close()
            raise
        finally:
            for fd in passed[1:]:
                os.close(fd)
        self.channel: Channel[FromCore] = Channel(Connection(ours.detach()), FromCore)
        self.started = self._process.started  # seconds since the epoch
        self.pid = self._process.pid
        self.sentinel = self._process.sentinel  # readable once the process has ended

    @property
    def exit_code(self) -> int | None:
        """How it, or the worker that it could not be without, ended; negative: by that signal.

        None if it runs, or if its end was our doing because it did not go on.
        """
        if self.kill_reason is not None:
            return None
        return self.worker_exit_code if self.worker_exit_code is not None else self.own_exit_code

    @property
    def own_exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.exit_code

    def describe_death(self) -> str:
        """Why the process has ended, for a message."""
        self._process.wait()
        if self.kill_reason is not None:
            return f"the engine core (pid {self.pid}) was killed: {self.kill_reason}"
        if self.fault is not None:
            return self.fault.message
        return f"the engine core (pid {self.pid}) is gone: {self._process.describe_exit()}"

    def kill(self, reason: str | None = None) -> None:
        """Send SIGKILL, if it still runs."""
        self.kill_reason = reason
        self._process.kill()

    def is_all_gone(self) -> bool:
        """Whether its workers have ended, too."""
        return self._process.wait_family(0)

    def close(self) -> None:
        """Clean up after its end. Idempotent."""
        if self._process.stop(0):
            self.channel.close()
            self.fence.close()
