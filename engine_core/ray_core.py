"""What stands in for an engine core that runs on a node of a Ray cluster.

To the supervisor it is the engine core: a process of its own, with a channel, a fence and an end.
Ray finds a place for an actor with the CPUs or GPUs of one replica and tells if it is lost; the
actor (`core_actor`) starts the engine core beside it. Requests and outputs do not come by here:
clients connect to the engine core itself.
"""

import contextlib
import fcntl
import logging
import os
import signal
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from headrace.configs.errors import ConfigurationError, EngineDeadError, HeadraceError
from headrace.configs.process_times import process_creation_time
from headrace.engine_core import control_messages as control
from headrace.engine_core.core_actor import CoreActor, CoreFacts, CoreOrder
from headrace.engine_core.fence import FenceCopy
from headrace.engine_core.server import SocketThread, Supervisor
from headrace.executors.ray_cluster import (
    PLACEMENT_TIMEOUT_S,
    connect,
    import_ray,
    known_cluster,
)
from headrace.executors.ray_executor import worker_environ
from headrace.executors.ray_keeper import hold_cluster
from headrace.executors.worker_hub import (
    RECHECK_INTERVAL_S,
    RECHECK_S,
    DeploymentKey,
    WorkerHub,
)
from headrace.workers.protocol import RequestFault

logger = logging.getLogger(__name__)

ARRIVAL_TIMEOUT_S = 30.0  # from the actor's start to its connection to us
_FIRST_WAIT_S = 10.0  # until the log says that a place is waited for; then doubled
_LAST_WORDS_S = 0.5  # that a message of an actor which has ended may take


class _Lost(EngineDeadError):
    """The actor, or the node, is gone, and the engine core with it."""


class RayCore:
    """One epoch of one replica."""

    def __init__(
        self,
        hello: control.Hello,
        epoch: int,
        sockets: SocketThread,
        supervisor: Supervisor,
        fence: int,
        socket_path: Path,
    ) -> None:
        """The arguments of an engine core's process; what it must not be without is kept there."""
        self._hello = hello
        self._parallel = hello.config.parallel_config
        self._epoch = epoch
        self._incoming = sockets.incoming
        self._supervisor = supervisor
        self._fence = FenceCopy(fence)
        self._directory = socket_path.parent
        self._ray: Any = None
        self._phases: dict[str, float] = {}  # seconds, before those of the engine core itself
        self._key = DeploymentKey.generate()
        self._hub = WorkerHub(self._key)
        self._hub.on_disconnect = self._suspect
        self._recheck_until = 0.0
        self._orders: deque[bytes] = deque()
        self._identity = str(self._parallel.data_parallel_rank).encode()
        self._decoder: msgspec.msgpack.Decoder[control.FromAgent] = msgspec.msgpack.Decoder(
            control.FromAgent
        )
        self._actor: Any = None
        self._run: Any = None  # Ray's reference to what `CoreActor.run` will return
        self._facts: CoreFacts | None = None
        self._is_here = False
        self._hold = -1  # of a cluster of our own
        self._is_gone = False  # the actor, says Ray
        self._is_ready = False
        self._is_ending = False  # as it was asked to

    def run(self) -> int:
        """Until the engine core has ended; the exit code is 0 if it was asked to."""
        try:
            self._start()
            return self._relay()
        except HeadraceError as error:
            fault = RequestFault(error.code, str(error))
            failed = control.EngineDied if self._is_ready else control.StartupFailed
            self._supervisor.send(failed(fault))
            return 1
        finally:
            self._close()

    # -- the actor ----------------------------------------------------------------------------

    def _start(self) -> None:
        parallel, began = self._parallel, process_creation_time(os.getpid())
        self._supervisor.send(control.StartupProgress("connect to Ray"))
        self._ray = ray = import_ray("data_parallel_backend")
        address = parallel.ray_address or known_cluster()
        if address is None:
            workers = parallel.data_parallel_size_local * parallel.world_size
            address, self._hold = hold_cluster(self._directory, workers)
        connect(ray, parallel.world_size, address)
        self._phases["connect to Ray"] = time.time() - began
        self._supervisor.send(control.StartupProgress("wait for a place in the Ray cluster"))
        began = time.time()
        placement = self._place()
        self._facts = facts = self._wait_for_actor()
        self._phases["start the actor"] = time.time() - began
        self._is_here = facts.node_id == ray.get_runtime_context().get_node_id()
        if self._is_here:
            address = self._hub.listen_here()
        else:
            address = self._hub.listen(ray.util.get_node_ip_address())
        recovery = self._hello.config.recovery_config
        order = CoreOrder(
            rank=parallel.data_parallel_rank,
            epoch=self._epoch,
            address=address,
            key=(self._key.public, self._key.secret),
            host=facts.ip,
            stand_in=os.getpid() if self._is_here else None,
            has_worker=parallel.distributed_executor_backend == "uni",
            pulse_interval_s=min(1.0, recovery.step_timeout_s / 4),
        )
        self._run = self._actor.run.remote(msgspec.msgpack.encode(order))
        self._orders.append(msgspec.msgpack.encode(self._hello_there(placement, facts)))
        threading.Thread(target=self._watch, name="actor-watch", daemon=True).start()
        threading.Thread(target=self._take_orders, name="orders", daemon=True).start()

    def _place(self) -> tuple[int, int]:
        """Make the actor; how many replicas its node is to have, and which of them this is.

        Replicas take turns on the nodes with room for one, this one first. Where things are not as
        they were when others were placed, Ray chooses.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        parallel, ray = self._parallel, self._ray
        resource, needed = parallel.ray_resource, parallel.world_size
        here = ray.get_runtime_context().get_node_id()
        rooms = {
            node["NodeID"]: int(node["Resources"].get(resource, 0) // needed)
            for node in ray.nodes()
            if node["Alive"]
        }
        nodes = [node for node in rooms if rooms[node]]
        nodes.sort(key=lambda node: (node != here, node))
        if sum(rooms.values()) < parallel.data_parallel_size_local:
            logger.warning(
                "the Ray cluster has room for %d of %d replicas, each of which needs %d %ss on one "
                "node (%s): waiting for it to grow",
                sum(rooms.values()), parallel.data_parallel_size_local, needed, resource,
                _resources(ray.cluster_resources()),
            )  # fmt: skip
        number = parallel.data_parallel_rank - parallel.data_parallel_start_rank
        strategy: Any = "SPREAD"
        if nodes:
            strategy = NodeAffinitySchedulingStrategy(
                nodes[number % len(nodes)], soft=True, _spill_on_unavailable=True
            )
        is_gpu = resource == "GPU"
        log_level = logging.getLogger("headrace").getEffectiveLevel()
        self._actor = (
            ray.remote(CoreActor)
            .options(
                num_cpus=0 if is_gpu else needed,
                num_gpus=needed if is_gpu else 0,
                max_restarts=0,
                scheduling_strategy=strategy,
            )
            .remote(worker_environ(os.environ), log_level)
        )
        num_nodes = max(1, len(nodes))
        return -(-parallel.data_parallel_size_local // num_nodes), number // num_nodes

    def _wait_for_actor(self) -> CoreFacts:
        parallel, ray = self._parallel, self._ray
        limit = min(PLACEMENT_TIMEOUT_S, parallel.start_timeout_s)
        reference, began, wait_s = self._actor.facts.remote(), time.monotonic(), _FIRST_WAIT_S
        needs = f"{parallel.world_size} {parallel.ray_resource}s on one node"
        while (left := began + limit - time.monotonic()) > 0:
            if ray.wait([reference], timeout=min(wait_s, left))[0]:
                try:
                    return CoreFacts(*ray.get(reference))
                except ray.exceptions.RayError as error:
                    raise ConfigurationError(
                        f"{self._name()}: its actor cannot start ({_one_line(error)}). Is the same "
                        "headrace installed on every node of the Ray cluster?"
                    ) from error
            if left > wait_s:
                waited = time.monotonic() - began
                logger.info("%s waits for %s since %.0f s", self._name(), needs, waited)
                wait_s *= 2
        raise ConfigurationError(
            f"the Ray cluster had no place for {self._name()} within {limit:g} s: it needs "
            f"{needs}; there are {_resources(ray.cluster_resources())}, of which "
            f"{_resources(ray.available_resources())} are free. Add nodes, lower "
            f"data_parallel_size {parallel.data_parallel_size}, or see `ray status`"
        )

    def _hello_there(self, placement: tuple[int, int], facts: CoreFacts) -> control.Hello:
        """What the engine core is told: it is a plain one of its machine, a part of which it gets.

        Callables must not come over a network (there is no telling who has sent them).
        """
        parallel = replace(
            self._parallel,
            data_parallel_backend="mp",
            replicas_on_node=placement[0],
            replica_on_node=placement[1],
            memory_available=_memory_of(self._directory, facts) if placement[0] > 1 else None,
            ray_address=None,
        )
        return msgspec.structs.replace(
            self._hello,
            config=replace(self._hello.config, parallel_config=parallel),
            allows_callables=self._hello.allows_callables and self._is_here,
        )

    # -- between it and the supervisor ---------------------------------------------------------

    def _relay(self) -> int:
        arrival: float | None = time.monotonic() + ARRIVAL_TIMEOUT_S
        while True:
            now = time.monotonic()
            rechecks = now < self._recheck_until
            deadline = now + RECHECK_INTERVAL_S if rechecks else arrival
            received = self._hub.receive(deadline)
            if received is not None:
                arrival = None
                code = self._take(received[1])
                if code is not None:
                    return code
            elif self._is_gone:
                return self._take_last_words()
            elif rechecks and arrival is None and self._hub.is_missing(self._identity):
                self._recheck_until = 0.0
                return self._take_last_words()
            elif arrival is not None and time.monotonic() > arrival:
                raise _Lost(f"{self._name()} does not connect to this machine; is it open to it?")
            if arrival is None:
                self._send_orders()

    def _take(self, encoded: bytes) -> int | None:
        """Hand on a message; the exit code after the last one."""
        message = self._decoder.decode(encoded)
        match message:
            case control.FenceChanged():
                self._fence.put(message.pieces)
            case control.CoreEnded():
                if message.reason and not self._is_ending:
                    reason = f"{message.reason}, on the node {self._facts and self._facts.ip}"
                    fault = RequestFault("engine_dead", reason)
                    self._supervisor.send(control.EngineDied(fault, message.exit_code))
                return 0 if self._is_ending else 1
            case control.CoreReady():
                self._is_ready = True
                message.ready.phases = self._phases | message.ready.phases
                if not self._is_here:
                    message.key = (self._key.public, self._key.secret)
                self._supervisor.send(message)
            case _:
                self._supervisor.send(message)
        return None

    def _take_last_words(self) -> int:
        until = time.monotonic() + _LAST_WORDS_S
        while (left := until - time.monotonic()) > 0:
            received = self._hub.receive(time.monotonic() + left)
            if received is not None and (code := self._take(received[1])) is not None:
                return code
        if self._is_ending:
            return 0
        raise _Lost(f"{self._name()} is lost: {self._reason()}")

    def _reason(self) -> str:
        try:
            self._ray.get(self._run, timeout=0.1)
        except self._ray.exceptions.GetTimeoutError:
            return "its node does not answer any more"
        except Exception as error:
            return _one_line(error)
        return "its actor has ended"

    def _send_orders(self) -> None:
        while self._orders:
            with contextlib.suppress(ConnectionError):  # it is gone, which is noticed
                self._hub.send(self._identity, self._orders.popleft())

    def _take_orders(self) -> None:
        """Run in a thread: what the supervisor says is sent on in the one of the hub."""
        while True:
            _, message = self._incoming.get()
            if isinstance(message, control.Shutdown):
                self._is_ending = True
            if isinstance(message, control.ClientGone | control.Shutdown):
                self._orders.append(msgspec.msgpack.encode(message))
                self._hub.wake()

    def _watch(self) -> None:
        """Run in a thread: notice the end of the actor."""
        with contextlib.suppress(Exception):  # the connection to Ray has been closed
            self._ray.wait([self._run])
        self._is_gone = True
        self._hub.wake()

    def _suspect(self) -> None:
        """The connection has ended: sooner than Ray knows that a process or node is gone."""
        self._recheck_until = time.monotonic() + RECHECK_S

    def _close(self) -> None:
        """End the actor, and the cluster if it is ours and nobody else needs it."""
        has_ended: list[Any] = []
        if self._actor is not None:
            with contextlib.suppress(Exception):
                if self._run is not None:  # it cleans up
                    has_ended, _ = self._ray.wait([self._run], timeout=_LAST_WORDS_S)
                self._ray.kill(self._actor, no_restart=True)
            if self._is_here and self._facts is not None and not has_ended:
                with contextlib.suppress(ProcessLookupError):  # Ray waits for one that stands
                    os.kill(self._facts.pid, signal.SIGKILL)
        if self._ray is not None:
            with contextlib.suppress(Exception):
                self._ray.shutdown()
        if self._hold >= 0:
            os.close(self._hold)
        self._hub.close()

    def _name(self) -> str:
        name = f"replica {self._parallel.data_parallel_rank}"
        if self._facts is None:
            return name
        return f"{name} (actor with pid {self._facts.pid} on the node {self._facts.ip})"


def _memory_of(directory: Path, facts: CoreFacts) -> int:
    """Memory of a node (bytes) before any replica took some: what the first to ask found."""
    path = directory / f"memory-{facts.node_id}"
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if known := file.read():
            return int(known)
        file.write(str(facts.memory_available))
        return facts.memory_available


def _resources(amounts: dict[str, float]) -> str:
    return ", ".join(f"{amounts.get(name, 0):g} {name}s" for name in ("CPU", "GPU"))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
