"""The agent of a machine that runs workers for an engine core on another one."""

import logging
import os
import socket
import sys
import time
from dataclasses import replace

import zmq
from zmq.utils.monitor import recv_monitor_message

from headrace.configs.config import EngineConfig, ParallelConfig
from headrace.configs.errors import ConfigurationError
from headrace.executors.multinode import PROTOCOL
from headrace.executors.multiproc import STOP_TIMEOUT_S, WorkerHandle
from headrace.executors.node_messages import (
    FromRank,
    NodeExit,
    NodeHello,
    StartWorkers,
    ToWorkers,
    WorkerGone,
    decode_to_node,
    encode,
)
from headrace.executors.worker_hub import DeploymentKey, connect, milliseconds_to
from headrace.executors.worker_messages import WorkerHello
from headrace.executors.worker_messages import encode as encode_to_worker

logger = logging.getLogger(__name__)

MAX_REFUSALS = 3  # handshakes that fail, one after the other
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_FAILED |= zmq.EVENT_HANDSHAKE_FAILED_AUTH
_WATCHED = _FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


def run_agent(parallel: ParallelConfig, model_path: str | None = None) -> int:
    """Run workers until the engine on machine 0 ends; 0 then.

    When the engine core is lost, the workers end, and the agent waits for the next one.
    `model_path`: where the model is on this machine. Raises ConfigurationError if machine 0 does
    not come within `start_timeout_s`, or refuses.
    """
    agent = _Agent(parallel, model_path)
    try:
        while not agent.is_done:
            agent.serve_one()
    finally:
        agent.end_workers()
    return 0


class _Agent:
    def __init__(self, parallel: ParallelConfig, model_path: str | None) -> None:
        self.is_done = False
        self._parallel = parallel
        self._model_path = model_path
        self._key = DeploymentKey.read(parallel.cluster_key_file)
        host = parallel.master_addr
        self._place = f"{f'[{host}]' if ':' in host else host}:{parallel.master_port}"
        self._workers: list[WorkerHandle] = []
        self._num_refusals = 0

    def serve_one(self) -> None:
        """From the connection to one engine core until it is lost or has ended."""
        identity = str(self._parallel.node_rank).encode()
        with zmq.Context() as context:
            dealer = connect(context, f"tcp://{self._place}", identity, self._key)
            monitor = dealer.get_monitor_socket(_WATCHED)
            try:
                self._serve(dealer, monitor)
            finally:
                dealer.disable_monitor()
                monitor.close(linger=0)
                dealer.close(linger=0)
                self.end_workers()

    def end_workers(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.stop(STOP_TIMEOUT_S)
            worker.connection.close()
        self._workers.clear()

    def _serve(self, dealer: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]") -> None:
        deadline: float | None = time.monotonic() + self._parallel.start_timeout_s
        while not self.is_done:
            poller = zmq.Poller()
            poller.register(dealer, zmq.POLLIN)
            poller.register(monitor, zmq.POLLIN)
            for worker in self._workers:
                poller.register(worker.connection.fileno(), zmq.POLLIN)
                poller.register(worker.process.sentinel, zmq.POLLIN)
            events = dict(poller.poll(None if deadline is None else milliseconds_to(deadline)))
            if not events:
                raise ConfigurationError(
                    f"machine 0 was not reached at {self._place} within "
                    f"{self._parallel.start_timeout_s:g} s; is the engine running there, with "
                    f"--master-addr {self._parallel.master_addr}, and open to this machine?"
                )
            if monitor in events:
                event = recv_monitor_message(monitor)["event"]
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    deadline, self._num_refusals = None, 0
                    dealer.send(encode(self._hello()))
                elif event & _FAILED:
                    self._refused()
                elif deadline is None:  # disconnected: what is queued is for an engine core gone
                    self._obey_all(dealer)  # its last word may be that all has ended
                    if self.is_done:
                        return
                    logger.warning("the engine core at %s is lost; waiting for it", self._place)
                    return
            self._obey_all(dealer)
            for worker in list(self._workers):
                if worker.connection.fileno() in events or worker.process.sentinel in events:
                    self._hand_on(dealer, worker)

    def _hello(self) -> NodeHello:
        parallel = self._parallel
        family = socket.AF_INET6 if ":" in parallel.master_addr else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect((parallel.master_addr, parallel.master_port))
            address = probe.getsockname()[0]
        return NodeHello(parallel.node_rank, parallel.nnodes, PROTOCOL, address)

    def _refused(self) -> None:
        self._num_refusals += 1
        if self._num_refusals >= MAX_REFUSALS:
            raise ConfigurationError(
                f"{self._place} refuses the key in {self._parallel.cluster_key_file}: copy the "
                "file of machine 0 to this one (or something else listens there)"
            )

    def _obey_all(self, dealer: "zmq.Socket[bytes]") -> None:
        while not self.is_done and dealer.poll(0):
            self._obey(dealer.recv())

    def _obey(self, message: bytes) -> None:
        if not message:  # machine 0 looks whether we are there
            return
        order = decode_to_node(message)
        match order:
            case StartWorkers():
                self._start(order)
            case ToWorkers():
                for worker in self._workers:
                    try:
                        worker.connection.send_bytes(order.message)
                    except OSError:  # it has ended, which its sentinel tells
                        worker.process.kill()
            case NodeExit():
                if order.reason:
                    raise ConfigurationError(order.reason)
                for worker in self._workers:
                    worker.process.stop(STOP_TIMEOUT_S)
                self.is_done = True

    def _start(self, order: StartWorkers) -> None:
        self.end_workers()
        config = self._local_config(order.config)
        for setup in order.setups:
            worker = WorkerHandle(setup.rank, config.parallel_config.worker_cls, [])
            self._workers.append(worker)
            hello = WorkerHello(config, setup, sys.path, os.getcwd(), order.allows_callables)
            worker.connection.send_bytes(encode_to_worker(hello))

    def _local_config(self, config: EngineConfig) -> EngineConfig:
        if self._model_path is None:
            return config
        model = replace(config.model_config, path=self._model_path)
        return replace(config, model_config=model)

    def _hand_on(self, dealer: "zmq.Socket[bytes]", worker: WorkerHandle) -> None:
        try:
            if worker.connection.poll():
                message = worker.connection.recv_bytes()
                dealer.send(encode(FromRank(worker.rank, message)))
                return
        except (EOFError, OSError):
            pass
        worker.process.kill()
        worker.process.wait()
        gone = WorkerGone(worker.rank, worker.process.describe_exit(), worker.process.exit_code)
        dealer.send(encode(gone))
        worker.process.stop(0)
        worker.connection.close()
        self._workers.remove(worker)
