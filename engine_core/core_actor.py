"""The actor on a node of a Ray cluster: starts an engine core there, and says how it ends.

To the engine core it is the supervisor: it holds its channel, its fence, its lifeline. It hands on
what goes through the channel to the process that stands in for the engine core on the supervisor's
machine (`ray_core`), over a socket of ours.
"""

import logging
import os
import select
import sys
import threading
import time
from typing import NamedTuple

import msgspec
import zmq

from headrace.configs.hardware import cpu_facts
from headrace.engine_core import control_messages as control
from headrace.engine_core.core_process import EngineCoreProcess
from headrace.engine_core.deaths import Cause, OutOfMemoryKills, cause_of
from headrace.engine_core.run_directory import RunDirectory
from headrace.executors.child_process import die_with_parent
from headrace.executors.worker_hub import DeploymentKey, connect, milliseconds_to

_LINGER_MS = 500


class CoreFacts(NamedTuple):
    """Where an actor is, and the memory there (bytes) before its engine core takes some."""

    node_id: str
    ip: str
    pid: int
    memory_available: int


class CoreOrder(msgspec.Struct, array_like=True):
    """What an actor is to start, and whom to tell.

    `stand_in`: the process that it talks to, if on this machine; the engine core then listens at a
    Unix socket, else at `host`.
    """

    rank: int
    epoch: int
    address: str
    key: tuple[str, str]
    host: str
    stand_in: int | None
    has_worker: bool
    pulse_interval_s: float


class CoreActor:
    """Its methods are called one after the other, and `run` is the last."""

    def __init__(self, environ: dict[str, str], log_level: int) -> None:
        """`environ` is added to the process's environment, before any child is started."""
        die_with_parent()  # also where Ray's own watch does not run, as in a process that stands
        os.environ.update(environ)
        logging.basicConfig(level=log_level, stream=sys.stderr, force=True)
        logging.getLogger("headrace").setLevel(log_level)

    def facts(self) -> CoreFacts:
        """Where it is."""
        import ray

        node_id = ray.get_runtime_context().get_node_id()
        memory = cpu_facts().memory_available
        return CoreFacts(node_id, ray.util.get_node_ip_address(), os.getpid(), memory)

    def run(self, encoded: bytes) -> None:
        """Start an engine core (a `CoreOrder`), and stay until it has ended or nobody asks."""
        order = msgspec.msgpack.decode(encoded, type=CoreOrder)
        key = DeploymentKey(*order.key)
        run_directory = RunDirectory()
        if order.stand_in is not None:
            watch = (os.pidfd_open(order.stand_in), run_directory)
            threading.Thread(target=_end_with, args=watch, name="parent-watch", daemon=True).start()
        try:
            process = EngineCoreProcess(
                run_directory, order.rank, order.epoch, order.has_worker, order.host,
                None if order.stand_in is not None else key,
            )  # fmt: skip
            try:
                with zmq.Context() as context:
                    _Relay(process, context, order, key).run()
            finally:
                process.kill()
                process.close()
        finally:
            run_directory.remove()


class _Relay:
    """Between an engine core and the process that stands in for it."""

    def __init__(
        self,
        process: EngineCoreProcess,
        context: "zmq.Context[zmq.Socket[bytes]]",
        order: CoreOrder,
        key: DeploymentKey,
    ) -> None:
        self._process = process
        self._interval_s = order.pulse_interval_s
        self._out_of_memory = OutOfMemoryKills()
        self._has_said_why = False
        self._decoder: msgspec.msgpack.Decoder[control.ToCore] = msgspec.msgpack.Decoder(
            control.ToCore
        )
        self._dealer = connect(context, order.address, str(order.rank).encode(), key)
        self._monitor = self._dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        self._poller.register(self._dealer, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(process.channel.fileno(), zmq.POLLIN)
        self._poller.register(process.sentinel, zmq.POLLIN)

    def run(self) -> None:
        """Until the engine core has ended, or the connection has."""
        try:
            self._hand_on()
        finally:
            self._dealer.disable_monitor()
            self._monitor.close(linger=0)
            self._dealer.close(linger=_LINGER_MS)

    def _hand_on(self) -> None:
        process = self._process
        next_pulse = 0.0
        while True:
            if (now := time.monotonic()) >= next_pulse:
                self._tell(control.FenceChanged(process.fence.header()))
                next_pulse = now + self._interval_s
            events = dict(self._poller.poll(milliseconds_to(next_pulse)))
            if self._monitor in events:
                return
            while self._dealer.poll(0):
                self._obey(self._dealer.recv())
            if process.channel.fileno() in events:
                self._hear()
            if process.sentinel in events:
                self._tell_end()
                return

    def _obey(self, message: bytes) -> None:
        if not message:  # somebody looks whether we are there
            return
        order = self._decoder.decode(message)
        if isinstance(order, control.Hello) and not os.path.isdir(order.cwd):
            order.cwd = os.getcwd()
        self._process.channel.send(order)

    def _hear(self) -> None:
        message = self._process.channel.receive()
        if message is None:  # it is ending: its sentinel will tell
            self._poller.unregister(self._process.channel.fileno())
            return
        self._has_said_why |= isinstance(message, control.StartupFailed | control.EngineDied)
        self._tell(message)

    def _tell_end(self) -> None:
        process = self._process
        reason = process.describe_death()
        while process.channel.has_news() and (message := process.channel.receive()) is not None:
            self._has_said_why |= isinstance(message, control.StartupFailed | control.EngineDied)
            self._tell(message)
        code = process.own_exit_code
        if cause_of(code, self._out_of_memory) is Cause.MEMORY:
            code = None  # the supervisor looks at its own machine's memory
        self._tell(control.FenceChanged(process.fence.content()))
        self._tell(control.CoreEnded(code, "" if self._has_said_why else reason))

    def _tell(self, message: control.FromAgent) -> None:
        self._dealer.send(msgspec.msgpack.encode(message))


def _end_with(pidfd: int, run_directory: RunDirectory) -> None:
    select.select([pidfd], [], [])
    run_directory.remove()  # Ray may end the engine core before that does it
    os._exit(1)
