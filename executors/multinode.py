"""Workers as processes on several machines: ours on machine 0, those of agents on the others."""

import contextlib
import os
import queue
import socket
import sys
import time
from collections.abc import Callable

from headrace.configs.config import EngineConfig
from headrace.executors.executor import WorkerLostError
from headrace.executors.multiproc import MultiprocExecutor, WorkerHandle
from headrace.executors.node_link import NodeLink, NodeLost
from headrace.executors.node_messages import (
    FromNode,
    FromRank,
    NodeExit,
    NodeHello,
    StartWorkers,
    ToWorkers,
    WorkerGone,
)
from headrace.executors.worker_hub import DeploymentKey
from headrace.executors.worker_messages import WorkerExit, WorkerHello, decode_from_worker, encode
from headrace.workers.protocol import WorkerInfo, WorkerSetup

PROTOCOL = "1"  # of `node_messages` and all that travels in them


class NodeWorker:
    """A worker of an agent's."""

    def __init__(self, rank: int, node: NodeHello) -> None:
        self.rank = rank
        self.node = node
        self.phase = "start of the process"
        self.info: WorkerInfo | None = None

    def describe(self) -> str:
        return f"worker {self.rank} (on node {self.node.node_rank}, {self.node.address})"


class MultiNodeExecutor(MultiprocExecutor):
    """Machine 0 listens at `master_addr`:`master_port`; agents come, and get workers to start.

    Rank r runs on machine r // (workers per machine), so that shards of a stage are together.
    """

    def __init__(
        self,
        config: EngineConfig,
        allows_callables: bool,
        on_death: Callable[[], None],
        lifeline: int | None = None,
    ) -> None:
        super().__init__(config, allows_callables, on_death, lifeline)
        self._key = DeploymentKey.read(config.parallel_config.cluster_key_file)
        self._link: NodeLink | None = None
        self._nodes: dict[int, NodeHello] = {}

    def check(self) -> None:
        super().check()
        self._take_from_nodes()

    def shutdown(self) -> None:
        link, self._link = self._link, None
        is_orderly = self._death is None
        if link is not None:
            for rank in self._nodes:
                link.send(rank, ToWorkers(encode(WorkerExit())))
                if is_orderly:  # else the agents wait for the next engine core
                    link.send(rank, NodeExit())
            self._more_handles.clear()
            link.close()
        super().shutdown()

    def _launch(self, deadline: float) -> None:
        parallel = self._config.parallel_config
        self._link = NodeLink(self._key, parallel.master_addr, parallel.master_port, self._hear)
        self._more_handles[self._link.ready] = self._take_from_nodes
        self._wait_for_nodes(self._link, deadline)
        family = socket.AF_INET6 if ":" in parallel.master_addr else socket.AF_INET
        with socket.create_server((parallel.master_addr, 0), family=family) as store:
            setups = self._setups(store)
            per_node = parallel.world_size // parallel.nnodes
            inherited = [] if self._lifeline is None else [self._lifeline]
            for rank in range(per_node):
                fds = [store.fileno(), *inherited] if rank == 0 else inherited
                self._local.append(WorkerHandle(rank, parallel.worker_cls, fds))
            for worker in self._local:
                setup = setups[worker.rank]
                hello = WorkerHello(
                    self._config, setup, sys.path, os.getcwd(), self._allows_callables
                )
                self._send(worker, encode(hello))
        for node_rank in range(1, parallel.nnodes):
            own = setups[node_rank * per_node : (node_rank + 1) * per_node]
            self._link.send(node_rank, StartWorkers(self._config, own, self._allows_callables))
        remote = [
            NodeWorker(rank, self._nodes[rank // per_node])
            for rank in range(per_node, parallel.world_size)
        ]
        self._workers = [*self._local, *remote]

    def _setups(self, store: socket.socket) -> list[WorkerSetup]:
        parallel = self._config.parallel_config
        per_node = parallel.world_size // parallel.nnodes
        host = parallel.master_addr
        place = f"[{host}]" if ":" in host else host
        addresses = {0: host} | {rank: node.address for rank, node in self._nodes.items()}
        return [
            WorkerSetup(
                rank=rank,
                local_rank=rank % per_node,
                local_size=per_node,
                store=f"tcp://{place}:{store.getsockname()[1]}",
                store_fd=store.fileno() if rank == 0 else -1,
                address=addresses[rank // per_node],
                answers=rank == self._output_rank,
            )
            for rank in range(parallel.world_size)
        ]

    def _wait_for_nodes(self, link: NodeLink, deadline: float) -> None:
        parallel = self._config.parallel_config
        expected = set(range(1, parallel.nnodes))
        while expected - set(self._nodes):
            try:
                rank, message = link.incoming.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                missing = ", ".join(map(str, sorted(expected - set(self._nodes))))
                self._die(
                    WorkerLostError(
                        f"node {missing} of {parallel.nnodes} did not come within "
                        f"{parallel.start_timeout_s:g} s. {self._meeting_place()}. On each of "
                        "them, run the same `headrace serve` command with --headless and its own "
                        "--node-rank"
                    )
                )
            if isinstance(message, NodeHello):
                problem = _problem(message, parallel.nnodes)
                if problem:
                    link.send(rank, NodeExit(problem))
                    self._die(WorkerLostError(problem))
                self._nodes[rank] = message
            elif isinstance(message, NodeLost):
                self._nodes.pop(rank, None)

    def _send_all(self, encoded: bytes) -> None:
        super()._send_all(encoded)
        if self._link is not None:
            for node_rank in self._nodes:
                self._link.send(node_rank, ToWorkers(encoded))

    def _take_from_nodes(self) -> None:
        """What has come. Raises EngineDeadError if a worker or a machine is gone."""
        link = self._link
        if link is None:
            return
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(link.ready)
        while not link.incoming.empty():
            node_rank, message = link.incoming.get()
            match message:
                case FromRank():
                    self._take(self._workers[message.rank], decode_from_worker(message.message))
                case WorkerGone():
                    text = f"worker {message.rank} on node {node_rank} is gone: "
                    self._die(WorkerLostError(text + message.description, message.exit_code))
                case NodeLost() | NodeHello():  # a new agent in its place has none of our workers
                    address = self._nodes[node_rank].address
                    self._die(WorkerLostError(f"node {node_rank} ({address}) is lost"))

    def _hear(self, message: FromNode | NodeLost) -> None:
        """In the link's thread: somebody may have to look, though nothing is asked of workers."""
        if isinstance(message, WorkerGone | NodeLost) and self._death is None:
            self._on_death()

    def _meeting_place(self) -> str:
        parallel = self._config.parallel_config
        nodes = ", ".join(node.address for node in self._nodes.values()) or "none so far"
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "of the machine's address")
        return (
            f"The engine core listens at {parallel.master_addr}:{parallel.master_port}, the other "
            f"machines that came are {nodes}; workers meet through Gloo on the interface "
            f"{interface}"
        )


def _problem(node: NodeHello, nnodes: int) -> str:
    if node.version != PROTOCOL:
        return (
            f"node {node.node_rank} ({node.address}) has another version of headrace (protocol "
            f"{node.version}, here {PROTOCOL}); install the same on every machine"
        )
    if node.nnodes != nnodes or not 0 < node.node_rank < nnodes:
        return (
            f"node {node.node_rank} ({node.address}) was started with nnodes {node.nnodes}, this "
            f"one with {nnodes}; give every machine the same, and its own node_rank"
        )
    return ""
