"""The executor's link to the machines that run its workers: a thread owns the socket."""

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from headrace.executors.node_messages import FromNode, ToNode, decode_from_node, encode
from headrace.executors.worker_hub import (
    RECHECK_INTERVAL_S,
    RECHECK_S,
    DeploymentKey,
    WorkerHub,
)


class NodeLost:
    """Among the incoming messages: a machine cannot be reached any more."""


class NodeLink:
    """`incoming` yields (node rank, message); `ready` is a descriptor to wait for it with."""

    def __init__(
        self,
        key: DeploymentKey,
        address: str,
        port: int,
        on_news: Callable[[FromNode | NodeLost], None],
    ) -> None:
        """Listens at that address only. `on_news` is called in the thread, with every message."""
        self.incoming: queue.SimpleQueue[tuple[int, FromNode | NodeLost]] = queue.SimpleQueue()
        self.ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._outgoing: deque[tuple[int, bytes] | None] = deque()
        self._on_news = on_news
        self._nodes: set[int] = set()
        self._recheck_until = 0.0
        self._hub = WorkerHub(key)
        try:
            self._hub.listen(address, port)
        except BaseException:
            self._hub.close()
            raise
        self._hub.on_disconnect = self._suspect
        self._thread = threading.Thread(target=self._run, name="node-link", daemon=True)
        self._thread.start()

    def send(self, node_rank: int, message: ToNode) -> None:
        self._outgoing.append((node_rank, encode(message)))
        self._hub.wake()

    def close(self) -> None:
        """Send what is queued. Idempotent."""
        if self._thread.is_alive():
            self._outgoing.append(None)
            self._hub.wake()
            self._thread.join()
            os.close(self.ready)

    def _run(self) -> None:
        while self._flush():
            now = time.monotonic()
            rechecks = now < self._recheck_until
            received = self._hub.receive(now + RECHECK_INTERVAL_S if rechecks else None)
            if received is not None:
                node_rank = int(received[0])
                self._nodes.add(node_rank)
                self._tell(node_rank, decode_from_node(received[1]))
            if rechecks:
                self._look_for_nodes()
        self._hub.close()

    def _look_for_nodes(self) -> None:
        for node_rank in list(self._nodes):
            if self._hub.is_missing(str(node_rank).encode()):
                self._lose(node_rank)

    def _flush(self) -> bool:
        """False after the closing mark."""
        while self._outgoing:
            entry = self._outgoing.popleft()
            if entry is None:
                return False
            self._send(*entry)
        return True

    def _send(self, node_rank: int, message: bytes) -> None:
        try:
            self._hub.send(str(node_rank).encode(), message)
        except ConnectionError:
            self._lose(node_rank)

    def _lose(self, node_rank: int) -> None:
        if node_rank in self._nodes:
            self._nodes.discard(node_rank)
            self._tell(node_rank, NodeLost())

    def _tell(self, node_rank: int, message: FromNode | NodeLost) -> None:
        self.incoming.put((node_rank, message))
        os.eventfd_write(self.ready, 1)
        self._on_news(message)

    def _suspect(self) -> None:
        self._recheck_until = time.monotonic() + RECHECK_S
