"""The first process of `serve`: starts and watches engine cores and API servers; no HTTP itself.

It owns the listening socket, so that an API server that dies is replaced without a refused
connection. An API server's death costs its own connections only.
"""

import logging
import os
import signal
import socket
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

import msgspec

from headrace.configs.errors import error_from_code
from headrace.engine_core.supervisor import FIRST_BACK_OFF_S, MAX_BACK_OFF_S, Supervisor
from headrace.executors.child_process import ChildProcess
from headrace.frontend.http.api_server import ApiServerSetup, write_setup
from headrace.workers.protocol import RequestFault

logger = logging.getLogger(__name__)

LONG_LIFE_S = 10.0  # an API server that lived that long is replaced at once
MAX_SHORT_LIVES = 10  # in a row, before everything ends
END_TIMEOUT_S = 4.0  # for API servers to end by themselves, beside the time for a drain


class ApiServer:
    """One of the API servers: its process of now, and how many came before."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.epoch = 0
        self.process: ChildProcess | None = None
        self.num_short_lives = 0

    @property
    def client_id(self) -> str:
        return f"api-{self.number}-{self.epoch}"


class ServerSupervisor(Supervisor):
    """A supervisor of engine cores and of the API servers in front of them."""

    def __init__(
        self, setup: ApiServerSetup, listener: socket.socket, num_api_servers: int
    ) -> None:
        """`setup` is what the first API server is told; the others get its configuration."""
        has_worker = (setup.engine_args or {}).get("data_parallel_backend") != "ray"
        super().__init__(has_worker=has_worker, ends_with_clients=False)
        self._setup = msgspec.structs.replace(
            setup, core_started=self.started, has_others=num_api_servers > 1
        )
        self._listener = listener
        self._api_servers = [ApiServer(number) for number in range(num_api_servers)]
        self._is_draining = False

    def serve(self) -> int:
        """Until SIGINT or SIGTERM: the exit code, 0. Raises the HeadraceError that ends it."""
        wake, waker = os.pipe()
        os.set_blocking(waker, False)

        def take_signal(number: int, frame: FrameType | None) -> None:
            os.write(waker, bytes([number]))

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, take_signal)
        self.watch(wake, lambda: self._pass_signal(os.read(wake, 1)[0]))
        for api_server in self._api_servers:
            self._start(api_server, is_first_start=True)
        self.run()
        if self.fault is not None:
            raise error_from_code(self.fault.code, self.fault.message)
        return 0

    def give_up(self, fault: RequestFault) -> None:
        """API servers tell their clients, and end by themselves."""
        is_first = self.fault is None
        super().give_up(fault)
        if is_first:
            self.later(END_TIMEOUT_S, self._kill_api_servers)
            self._stop_after_api_servers()

    def _start(self, api_server: ApiServer, is_first_start: bool = False) -> None:
        api_server.epoch += 1
        resolves = api_server.number == 0 and not self.is_configured
        setup = msgspec.structs.replace(
            self._setup,
            client_id=api_server.client_id,
            engine_args=self._setup.engine_args if resolves else None,
            began=self._setup.began if is_first_start else time.time(),
        )
        setup_fd, channel = write_setup(setup), self.connect(api_server.client_id)
        fds = {
            "setup": setup_fd,
            "supervisor": channel.fileno(),
            "listener": self._listener.fileno(),
        }
        with channel:
            process = ChildProcess(
                "headrace.frontend.http.api_server", _flags(fds), list(fds.values())
            )
        os.close(setup_fd)
        api_server.process = process
        self.watch(process.sentinel, lambda: self._lose_api_server(api_server, process))

    def _lose_api_server(self, api_server: ApiServer, process: ChildProcess) -> None:
        self.unwatch(process.sentinel)
        api_server.process = None
        self.hear_last(api_server.client_id)
        self.disconnect(api_server.client_id)
        process.wait()
        life_s = time.time() - process.started
        process.stop(0)
        if self._is_draining or self.fault is not None:
            self._stop_after_api_servers()
            return
        api_server.num_short_lives = 0 if life_s > LONG_LIFE_S else api_server.num_short_lives + 1
        how = f"API server {api_server.number} (pid {process.pid}): {process.describe_exit()}"
        if api_server.num_short_lives > MAX_SHORT_LIVES:
            self.give_up(RequestFault("engine_dead", f"{how}, again and again"))
            return
        exponent = api_server.num_short_lives - 1
        delay = min(MAX_BACK_OFF_S, FIRST_BACK_OFF_S * 2.0**exponent) if exponent > 0 else 0.0
        logger.error("%s; starting it again in %.1f s", how, delay)
        self.later(delay, lambda: self._restart(api_server))

    def _restart(self, api_server: ApiServer) -> None:
        if not self._is_draining and self.fault is None:
            self._start(api_server)

    def _pass_signal(self, number: int) -> None:
        """Have every API server finish what runs; again: end it at once."""
        limit_s = END_TIMEOUT_S + (
            0.0 if self._is_draining else self._setup.options.shutdown_timeout
        )
        self._is_draining = True
        # Only API servers hold it now: with the last of them, connections are refused, and do not
        # wait here for an answer that does not come.
        self._listener.close()
        self.later(limit_s, self._kill_api_servers)  # they end by themselves, unless they hang
        for process in self._running():
            process.send_signal(number)
        self._stop_after_api_servers()

    def _stop_after_api_servers(self) -> None:
        if not self._running():
            self.stop()

    def _kill_api_servers(self) -> None:
        for process in self._running():
            process.kill()

    def _running(self) -> list[ChildProcess]:
        return [server.process for server in self._api_servers if server.process is not None]


def _flags(fds: Mapping[str, Any]) -> list[str]:
    return [word for name, fd in fds.items() for word in (f"--{name}", str(fd))]
