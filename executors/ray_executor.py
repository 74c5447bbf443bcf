"""Workers as Ray actors, on one machine or many. Ray places, starts and watches them."""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from headrace.configs import environment
from headrace.configs.config import EngineConfig
from headrace.executors.child_process import OPENMP_SPIN
from headrace.executors.executor import WorkerLostError
from headrace.executors.ray_cluster import (
    bundles_for,
    disconnect,
    find_group,
    import_ray,
    initialize_ray_cluster,
)
from headrace.executors.ray_worker import ActorFacts, RayWorker
from headrace.executors.remote_executor import RemoteExecutor
from headrace.executors.worker_hub import (
    RECHECK_INTERVAL_S,
    RECHECK_S,
    DeploymentKey,
    WorkerHub,
)
from headrace.executors.worker_messages import (
    WorkerExit,
    WorkerHello,
    decode_from_worker,
    encode,
)
from headrace.workers.protocol import WorkerInfo, WorkerSetup

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 1.0  # from the exit message to the end of the actor's process
_LAST_WORDS_S = 0.5  # that a message of an actor which has ended may take
# Of the environment, what actors get. `HEADRACE_RAY_EXTRA_ENV_VARS_TO_COPY` names more.
COPIED_PREFIXES = (
    *("HEADRACE_", "HF_", "HUGGING_FACE_", "GLOO_", "NCCL_", "TORCH_", "OMP_", "GOMP_"),
    *("CUDA_LAUNCH_", "UCX_"),
)
_NOT_COPIED = frozenset({environment.API_KEY.name})  # the server's alone


class ActorHandle:
    """An actor, where it is, and what it last said."""

    def __init__(self, rank: int, actor: Any) -> None:
        self.rank = rank
        self.actor = actor
        self.phase = "wait for a place in the cluster"
        self.info: WorkerInfo | None = None
        self.facts: ActorFacts | None = None
        self.run: Any = None  # Ray's reference to what `RayWorker.run` will return

    def describe(self) -> str:
        if self.facts is None:
            return f"worker {self.rank}"
        return f"worker {self.rank} (pid {self.facts.pid} on {self.facts.ip})"


class RayExecutor(RemoteExecutor):
    """One actor per worker, in the bundles of a placement group.

    Ray is asked for nothing once they run: messages go over a `WorkerHub`, which listens at a
    network address only if there are workers on other nodes.
    """

    _workers: list[ActorHandle]

    def __init__(
        self,
        config: EngineConfig,
        allows_callables: bool,
        on_death: Callable[[], None],
        lifeline: int | None = None,
    ) -> None:
        super().__init__(config, allows_callables, on_death, lifeline)
        self._ray = import_ray()
        self._workers = []
        self._key = DeploymentKey.generate()
        self._hub = WorkerHub(self._key)
        self._hub.on_disconnect = self._suspect
        self._recheck_until = 0.0
        self._owns_connection = False
        self._owns_group = False
        self._lost: ActorHandle | None = None  # the first one, told by the watch
        self._node_id = ""
        self._is_shut_down = False

    def check(self) -> None:
        super().check()
        if self._lost is not None:
            self._lose(self._lost)

    def shutdown(self) -> None:
        if self._is_shut_down:
            return
        self._is_shut_down = True
        with self._lock:
            self._death = self._death or WorkerLostError("the workers have been shut down")
        for worker in self._workers:
            with contextlib.suppress(ConnectionError):
                self._hub.send(_identity(worker.rank), encode(WorkerExit()))
        if self._ray.is_initialized():
            runs = [worker.run for worker in self._workers if worker.run is not None]
            if runs:
                self._ray.wait(runs, num_returns=len(runs), timeout=STOP_TIMEOUT_S)
            self._kill_all()
            group = self._config.parallel_config.placement_group
            if self._owns_group and group is not None:
                self._ray.util.remove_placement_group(find_group(group))
            if self._owns_connection:
                disconnect()
        self._hub.close()
        self._workers = []

    def _launch(self, deadline: float) -> None:
        parallel = self._config.parallel_config
        self._owns_connection = not self._ray.is_initialized()
        had_group = parallel.placement_group
        initialize_ray_cluster(parallel, parallel.ray_address)
        group = find_group(parallel.placement_group or "")
        self._owns_group = had_group is None and not _is_current(group)
        self._node_id = self._ray.get_runtime_context().get_node_id()
        self._make_actors(group)
        facts = self._wait_for_actors(deadline)
        on_one_node = len({fact.node_id for fact in facts}) == 1
        store = facts[0].store
        if not on_one_node:
            store = self._ray.get(self._workers[0].actor.listen.remote(facts[0].ip))
        here, elsewhere = self._listen(facts)
        for worker, setup in zip(self._workers, self._setups(facts, store), strict=True):
            is_here = facts[worker.rank].node_id == self._node_id
            hello = WorkerHello(self._config, setup, sys.path, os.getcwd(), self._allows_callables)
            lifeline = f"/proc/{os.getpid()}/fd/{self._lifeline}"
            worker.run = worker.actor.run.remote(
                encode(hello),
                here if is_here else elsewhere,
                self._key.public,
                self._key.secret,
                os.getpid() if is_here else None,
                lifeline if is_here and self._lifeline is not None else None,
            )
            worker.phase = "start of the worker"
        watch = ([worker.run for worker in self._workers],)
        threading.Thread(target=self._watch, args=watch, name="worker-watch", daemon=True).start()

    def _make_actors(self, group: Any) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        parallel = self._config.parallel_config
        environ = worker_environ(os.environ)
        log_level = logging.getLogger("headrace").getEffectiveLevel()
        is_gpu = parallel.ray_resource == "GPU"
        actor_class = self._ray.remote(RayWorker)
        for rank, bundle in enumerate(bundles_for(parallel, self._node_id)):
            actor = actor_class.options(
                num_cpus=0 if is_gpu else 1,
                num_gpus=1 if is_gpu else 0,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=bundle.number
                ),
            ).remote(rank, environ, log_level)
            self._workers.append(ActorHandle(rank, actor))

    def _wait_for_actors(self, deadline: float) -> list[ActorFacts]:
        by_reference = {worker.actor.facts.remote(): worker for worker in self._workers}
        waiting = list(by_reference)
        while waiting:
            timeout = max(0.0, deadline - time.monotonic())
            ready, waiting = self._ray.wait(waiting, timeout=timeout)
            if not ready:
                self._die(WorkerLostError(self._late()))
            for reference in ready:
                worker = by_reference[reference]
                try:
                    worker.facts = ActorFacts(*self._ray.get(reference))
                except self._ray.exceptions.RayError as error:
                    self._die(WorkerLostError(f"{worker.describe()} cannot start: {error}"))
        return [worker.facts for worker in self._workers if worker.facts is not None]

    def _listen(self, facts: list[ActorFacts]) -> tuple[str, str]:
        """The hub's addresses for workers on this node and on others."""
        here = elsewhere = ""
        if any(fact.node_id == self._node_id for fact in facts):
            here = self._hub.listen_here()
        if any(fact.node_id != self._node_id for fact in facts):
            elsewhere = self._hub.listen(self._ray.util.get_node_ip_address())
        return here, elsewhere

    def _setups(self, facts: list[ActorFacts], store: str) -> list[WorkerSetup]:
        nodes = [fact.node_id for fact in facts]
        return [
            WorkerSetup(
                rank=rank,
                local_rank=nodes[:rank].count(fact.node_id),
                local_size=nodes.count(fact.node_id),
                store=store if len(facts) > 1 else "",
                address=fact.ip,
                answers=rank == self._output_rank,
            )
            for rank, fact in enumerate(facts)
        ]

    def _send_all(self, encoded: bytes) -> None:
        for worker in self._workers:
            try:
                self._hub.send(_identity(worker.rank), encoded)
            except ConnectionError:
                self._lose(worker)

    def _receive(self, deadline: float | None) -> bool:
        super().check()
        if time.monotonic() < self._recheck_until:
            self._look_for_workers()
            soon = time.monotonic() + RECHECK_INTERVAL_S
            received = self._hub.receive(soon if deadline is None else min(soon, deadline))
        else:
            received = self._hub.receive(deadline)
        if received is not None:
            identity, message = received
            self._take(self._workers[int(identity)], decode_from_worker(message))
            return True
        if self._lost is not None:  # it may have said why
            last_words = time.monotonic() + _LAST_WORDS_S
            while (received := self._hub.receive(last_words)) is not None:
                identity, message = received
                self._take(self._workers[int(identity)], decode_from_worker(message))
            self._lose(self._lost)
        return deadline is None or time.monotonic() < deadline

    def _look_for_workers(self) -> None:
        for worker in self._workers:
            if worker.info is not None and self._hub.is_missing(_identity(worker.rank)):
                self._lose(worker)

    def _suspect(self) -> None:
        """Somebody's connection has ended: sooner than Ray knows that a process or node is gone."""
        self._recheck_until = time.monotonic() + RECHECK_S

    def _kill_all(self) -> None:
        for worker in self._workers:
            with contextlib.suppress(Exception):
                self._ray.kill(worker.actor, no_restart=True)
            if worker.facts is not None and worker.facts.node_id == self._node_id:
                with contextlib.suppress(ProcessLookupError):  # Ray waits for one that stands still
                    os.kill(worker.facts.pid, signal.SIGKILL)

    def _meeting_place(self) -> str:
        if not self._ray.is_initialized():
            return "Ray is not connected"
        address = self._ray.get_runtime_context().gcs_address
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "of the node's address")
        nodes = sorted({worker.facts.ip for worker in self._workers if worker.facts is not None})
        return (
            f"They are actors of the Ray cluster at {address}, on the nodes {', '.join(nodes)}, "
            f"and meet through Gloo on the interface {interface}"
        )

    def _lose(self, worker: ActorHandle) -> NoReturn:
        self._die(WorkerLostError(f"{worker.describe()} is gone: {self._reason(worker)}"))

    def _reason(self, worker: ActorHandle) -> str:
        try:
            code = self._ray.get(worker.run, timeout=_LAST_WORDS_S)
        except self._ray.exceptions.GetTimeoutError:
            return "it does not answer"
        except Exception as error:
            return " ".join(str(error).split())
        return f"it ended with code {code}"

    def _watch(self, runs: list[Any]) -> None:
        """Notice the end of an actor, also while nothing is asked of them."""
        try:
            ended, _ = self._ray.wait(runs, num_returns=1)
        except Exception:  # the connection to Ray has been closed
            return
        with self._lock:
            if self._death is not None:
                return
        self._lost = self._workers[runs.index(ended[0])]
        self._hub.wake()
        self._on_death()


def worker_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """What of this process's environment actors get."""
    more = environment.read(environment.RAY_EXTRA_ENV_VARS, environ)
    names = {name.strip() for name in more.split(",")}
    copied = {
        name: value
        for name, value in environ.items()
        if (name.startswith(COPIED_PREFIXES) or name in names) and name not in _NOT_COPIED
    }
    return OPENMP_SPIN | copied


def _identity(rank: int) -> bytes:
    return str(rank).encode()


def _is_current(group: Any) -> bool:
    from ray.util.placement_group import get_current_placement_group

    current = get_current_placement_group()
    return current is not None and current.id == group.id
