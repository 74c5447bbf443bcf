"""The actor: one worker in a process of Ray's. The steps come over a socket of ours.

A call of an actor's method costs as much as a small model's step; so the actor has one that
runs as long as the worker does, and takes messages as other workers do.
"""

import contextlib
import gc
import logging
import os
import select
import socket
import sys
import threading
from typing import NamedTuple

import msgspec

from headrace.executors.child_process import die_with_parent
from headrace.executors.worker_host import preload
from headrace.executors.worker_hub import DeploymentKey, HubChannel
from headrace.executors.worker_messages import WorkerHello, decode_to_worker
from headrace.executors.worker_server import WorkerServer


class ActorFacts(NamedTuple):
    """Where an actor is, and what it has to offer the others for their meeting."""

    node_id: str
    ip: str
    pid: int
    store: str  # path of an empty file in memory, on its machine


class RayWorker:
    """Its methods are called one after the other, and `run` is the last."""

    def __init__(self, rank: int, environ: dict[str, str], log_level: int) -> None:
        """`environ` is added to the process's environment, before torch is imported."""
        die_with_parent()  # also where Ray's own watch does not run, as in a process that stands
        os.environ.update(environ)
        logging.basicConfig(
            level=log_level,
            format=f"%(levelname)s worker {rank}: %(message)s",
            stream=sys.stderr,
            force=True,
        )
        self._rank = rank
        self._store = os.memfd_create("headrace-store")
        self._listener: socket.socket | None = None

    def facts(self) -> ActorFacts:
        """Where it is."""
        import ray

        context = ray.get_runtime_context()
        path = f"/proc/{os.getpid()}/fd/{self._store}"
        return ActorFacts(context.get_node_id(), ray.util.get_node_ip_address(), os.getpid(), path)

    def listen(self, ip: str) -> str:
        """Open the socket of a TCP store, on that address only; returns where."""
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        self._listener = socket.create_server((ip, 0), family=family)
        port = self._listener.getsockname()[1]
        return f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}"

    def run(
        self,
        hello: bytes,
        address: str,
        public: str,
        secret: str,
        engine_core: int | None,
        lifeline: str | None,
    ) -> int:
        """Be the worker, until told to exit; 0 then.

        `engine_core`: its process, if on this machine; `lifeline`: what to keep open meanwhile.
        """
        if engine_core is not None:
            watch = (os.pidfd_open(engine_core),)
            threading.Thread(target=_end_with, args=watch, name="parent-watch", daemon=True).start()
        if lifeline is not None:
            with contextlib.suppress(OSError):
                os.open(lifeline, os.O_RDONLY | os.O_CLOEXEC)
        message = decode_to_worker(hello)
        assert isinstance(message, WorkerHello)
        gc.disable()
        if not message.config.parallel_config.worker_cls:
            preload()
        if self._listener is not None:
            message.setup = msgspec.structs.replace(message.setup, store_fd=self._listener.fileno())
        channel = HubChannel(address, str(self._rank).encode(), DeploymentKey(public, secret))
        try:
            return WorkerServer(channel).run(message)
        finally:
            channel.close()


def _end_with(pidfd: int) -> None:
    select.select([pidfd], [], [])
    os._exit(1)
