"""The supervisor: starts engine cores, watches them, restarts those that die, tells the clients.

It runs as a thread in a library, and as the main thread of the first process of `serve`; it loads
neither torch nor HTTP. Clients hold the state of their requests and replay them: the supervisor
knows no request, but for the ids of those that were in a step when an engine core died.
"""

import dataclasses
import heapq
import itertools
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from headrace.configs.config import EngineConfig, RecoveryConfig
from headrace.configs.errors import ConfigurationError
from headrace.configs.hardware import cpu_facts
from headrace.engine_core import control_messages as control
from headrace.engine_core.core_process import EngineCoreProcess
from headrace.engine_core.core_state import CoreState
from headrace.engine_core.deaths import Cause, OutOfMemoryKills, cause_of
from headrace.engine_core.run_directory import RunDirectory
from headrace.engine_core.suspicions import Suspicions
from headrace.workers.protocol import RequestFault

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 2.0  # from the Shutdown message to SIGKILL; with HTTP's own 2 s, under 5 in all
MAX_BACK_OFF_S = 30.0
FIRST_BACK_OFF_S = 0.5  # 0 for an engine core that had done something
GONE_POLL_S = 0.02
LAST_WORDS_S = 2.0  # that news of a death on another machine may take
MAX_GONE_S = 10.0  # that workers may take to end before a new engine core is started beside them

Action = Callable[[], None]


class Replica:
    """One data-parallel replica: its engine core of now, and how many came before."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.epoch = 0
        self.process: EngineCoreProcess | None = None
        self.num_idle_deaths = 0  # in a row, of engine cores that never finished a step
        self.lost_since: float | None = None  # monotonic seconds; None while it is up
        self.was_up = False
        self.pulse: float | None = None  # the last one seen
        self.num_still_checks = 0  # looks at the pulse since it changed
        self.state: CoreState | None = None  # that the next engine core is brought to


class Supervisor:
    """Owns the processes of all replicas.

    But for `connect`, one thread uses it: the one in `run`.
    """

    def __init__(self, *, has_worker: bool = True, ends_with_clients: bool = True) -> None:
        """The first engine core starts at once, so that it imports torch while the caller goes on.

        `ends_with_clients`: whether to stop when the last client has gone.
        """
        self.fault: RequestFault | None = None  # why no engine core will come any more
        self._has_worker = has_worker
        self._ends_with_clients = ends_with_clients
        self._run_directory = RunDirectory()
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count(1)
        self._clients: dict[str, control.Channel[control.FromClient]] = {}
        self._hello: control.Hello | None = None
        self._recovery = RecoveryConfig()
        self._suspicions = Suspicions()
        self._out_of_memory = OutOfMemoryKills()
        self._deaths: deque[tuple[float, str]] = deque()  # that count: when, why
        self._is_stopping = False
        self._ended: set[EngineCoreProcess] = set()  # whose workers may be ending still
        self._replicas = [Replica(0)]
        try:
            self._spawn(self._replicas[0])
        except BaseException:
            self._run_directory.remove()
            raise
        first = self._replicas[0].process
        assert first is not None
        self.started = first.started  # seconds since the epoch
        self.later(1.0, self._check_pulses)

    # -- clients ------------------------------------------------------------------------------

    def connect(self, client_id: str) -> socket.socket:
        """The client's end of a channel. Before `run`, or in its thread."""
        ours, theirs = socket.socketpair()
        channel: control.Channel[control.FromClient] = control.Channel(
            Connection(ours.detach()), control.FromClient
        )
        self._clients[client_id] = channel
        self._selector.register(
            channel, selectors.EVENT_READ, lambda: self._hear_client(client_id, channel)
        )
        if self._hello is not None:
            channel.send(control.Configured(self._hello.config))
        for replica in self._replicas:
            if replica.process is not None and replica.process.ready is not None:
                channel.send(_up(replica, replica.process))
            elif replica.was_up:
                channel.send(control.EngineDown(replica.rank, replica.epoch, "it was lost before"))
        if self.fault is not None:
            channel.send(control.GaveUp(self.fault))
        return theirs

    def _hear_client(self, client_id: str, channel: control.Channel[control.FromClient]) -> None:
        message = channel.receive()
        match message:
            case None:
                self.disconnect(client_id)
                if self._ends_with_clients and not self._clients:
                    self.stop()
            case control.Configure():
                self._configure(message.hello)
            case control.Stop():
                self.stop()
            case control.Unreachable():
                self._hear_of_loss(message)
            case control.ClientFailed():
                self.give_up(message.fault)

    def _hear_of_loss(self, message: control.Unreachable) -> None:
        """A client's connection is lost, and with it what was under way: so is the engine core.

        If it has died, whoever watches it says so, and why, in a moment.
        """

        def kill() -> None:
            for replica in self._replicas:
                process = replica.process
                if process is None or replica.rank != message.rank:
                    continue
                if process.epoch == message.epoch and process.kill_reason is None:
                    process.kill(message.reason)

        self.later(LAST_WORDS_S, kill)

    @property
    def is_configured(self) -> bool:
        """Whether it is known what engine cores run."""
        return self._hello is not None

    def hear_last(self, client_id: str) -> None:
        """Take what a client that has ended had said."""
        while (channel := self._clients.get(client_id)) is not None and channel.has_news():
            self._hear_client(client_id, channel)

    def disconnect(self, client_id: str) -> None:
        """A client has gone: engine cores free what its requests hold. Idempotent."""
        channel = self._clients.pop(client_id, None)
        if channel is None:
            return
        self._selector.unregister(channel)
        channel.close()
        for replica in self._replicas:
            if replica.process is not None and replica.process.ready is not None:
                replica.process.channel.send(control.ClientGone(client_id))

    def tell_clients(self, message: msgspec.Struct) -> None:
        """Send a message to every client."""
        for channel in list(self._clients.values()):
            channel.send(message)  # one that has gone is noticed by its channel

    def _configure(self, hello: control.Hello) -> None:
        if self._hello is not None:
            return
        parallel = hello.config.parallel_config
        if parallel.data_parallel_size_local > 1:  # before any of them takes some
            memory = cpu_facts().memory_available
            hello.config = _with_parallel(hello.config, memory_available=memory)
        self._hello = hello
        self._recovery = hello.config.recovery_config
        self._has_worker = parallel.runs_in_core
        self.tell_clients(control.Configured(hello.config))
        first = self._replicas[0]
        first.rank = parallel.data_parallel_start_rank
        if first.process is not None:
            first.process.channel.send(self._hello_of(first))
        for rank in parallel.ranks[1:]:
            self._replicas.append(Replica(rank))
            self._spawn(self._replicas[-1])

    def _hello_of(self, replica: Replica) -> control.Hello:
        """What the engine core of a replica is told."""
        assert self._hello is not None
        config = _with_parallel(self._hello.config, data_parallel_rank=replica.rank)
        return msgspec.structs.replace(self._hello, config=config)

    # -- engine cores -------------------------------------------------------------------------

    def _spawn(self, replica: Replica) -> None:
        replica.epoch += 1
        process = EngineCoreProcess(
            self._run_directory, replica.rank, replica.epoch, self._has_worker
        )
        replica.process = process
        replica.pulse, replica.num_still_checks = None, 0
        self._selector.register(
            process.channel, selectors.EVENT_READ, lambda: self._hear_core(replica, process)
        )
        self._selector.register(
            process.sentinel, selectors.EVENT_READ, lambda: self._lose(replica, process)
        )
        if self._hello is not None:
            hello = self._hello_of(replica)
            process.channel.send(msgspec.structs.replace(hello, state=replica.state))

    def _hear_core(self, replica: Replica, process: EngineCoreProcess) -> None:
        message = process.channel.receive()
        match message:
            case None:  # it is ending: its sentinel will tell
                self._selector.unregister(process.channel)
            case control.StartupProgress():
                self.tell_clients(message)
            case control.CoreReady():
                process.ready = message.ready
                process.address, process.key = message.address, message.key
                self._bring_up(replica, process)
            case control.StateChanged():
                replica.state = message.state
            case control.StartupFailed():
                process.fault = message.fault
            case control.EngineDied():
                process.fault = message.fault
                process.worker_exit_code = message.exit_code

    def _bring_up(self, replica: Replica, process: EngineCoreProcess) -> None:
        if replica.lost_since is not None:
            pause = time.monotonic() - replica.lost_since
            logger.debug(
                "replica %d: the engine core is back after %.2f s (epoch %d, pid %d)",
                replica.rank, pause, replica.epoch, process.pid,
            )  # fmt: skip
        replica.lost_since = None
        replica.was_up = True
        self.tell_clients(_up(replica, process))

    def _lose(self, replica: Replica, process: EngineCoreProcess) -> None:
        """A process has ended: say so, and start the next one."""
        self._selector.unregister(process.sentinel)
        while process.channel in self._selector.get_map() and process.channel.has_news():
            self._hear_core(replica, process)  # what it had said before
        if process.channel in self._selector.get_map():
            self._selector.unregister(process.channel)
        reason = process.describe_death()
        now = time.monotonic()
        delay = 0.0
        if self._is_stopping or self.fault is not None:
            pass
        elif not replica.was_up:  # what cannot start once will not the next time
            fault = process.fault or RequestFault(
                "engine_dead", f"{reason}. Its log above says why; start the engine again"
            )
            self.give_up(fault)
        else:
            delay = self._recover(replica, process, reason, now)
        replica.process = None
        if self._is_stopping or self.fault is not None:
            process.close()
        else:
            self._ended.add(process)
            self.later(delay, lambda: self._replace(replica, process, now + MAX_GONE_S))

    def _recover(
        self, replica: Replica, process: EngineCoreProcess, reason: str, now: float
    ) -> float:
        """Tell the clients of a loss; seconds to wait before the next start."""
        in_step = process.fence.suspects()
        cause = cause_of(process.exit_code, self._out_of_memory)
        suspects = [] if cause is Cause.OPERATOR else in_step
        verdict = self._suspicions.judge(suspects, cause, now)
        if verdict is None:
            self._deaths.append((now, reason))
        else:
            guilty = set(verdict.deaths)
            self._deaths = deque(death for death in self._deaths if death[0] not in guilty)
        if replica.lost_since is None:
            replica.lost_since = now
        logger.error(
            "replica %d: %s (epoch %d, %d sequences in its step%s); starting it again",
            replica.rank, reason, replica.epoch, len(in_step),
            f", request {verdict.request_id} is to blame" if verdict else "",
        )  # fmt: skip
        self.tell_clients(
            control.EngineDown(
                replica.rank,
                process.epoch,
                reason,
                suspects,
                None if verdict is None else verdict.request_id,
                process.fence.is_modified(),
            )
        )
        self._check_deaths(now)
        return self._back_off(replica, process, cause)

    def _check_deaths(self, now: float) -> None:
        """Give up after too many deaths in the window, with the first of them as the cause."""
        limit, window = self._recovery.max_restarts, self._recovery.restart_window_s
        while self._deaths and self._deaths[0][0] < now - window:
            self._deaths.popleft()
        if len(self._deaths) <= limit:
            return
        first = self._deaths[0][1]
        if len(self._deaths) == 1:
            text = f"{first}. Its log above says why; start the engine again"
        else:
            text = (
                f"the engine core died {len(self._deaths)} times within {window:g} s, more than "
                f"--max-restarts {limit} allows; the first time: {first}"
            )
        self.give_up(RequestFault("engine_dead", text))

    def _back_off(self, replica: Replica, process: EngineCoreProcess, cause: Cause) -> float:
        """Seconds to wait before the next start."""
        if cause is Cause.OPERATOR:  # that says nothing of whether the next one can do something
            return 0.0
        if process.fence.made_progress():
            replica.num_idle_deaths = 0
            return 0.0
        replica.num_idle_deaths += 1
        return min(MAX_BACK_OFF_S, FIRST_BACK_OFF_S * 2.0 ** (replica.num_idle_deaths - 1))

    def _replace(self, replica: Replica, old: EngineCoreProcess, deadline: float) -> None:
        """Start the next engine core, once the workers of the old one have gone."""
        if self._is_stopping or self.fault is not None:
            return
        if not old.is_all_gone() and time.monotonic() < deadline:
            self.later(GONE_POLL_S, lambda: self._replace(replica, old, deadline))
            return
        self._ended.discard(old)
        old.close()
        try:
            self._spawn(replica)
        except (OSError, ConfigurationError) as error:
            self.give_up(RequestFault("engine_dead", f"the engine core cannot start: {error}"))

    def _check_pulses(self) -> None:
        """Kill engine cores whose loop stands still; what counts is how often we saw it so."""
        self._out_of_memory.check()
        timeout = self._recovery.step_timeout_s
        interval = min(1.0, timeout / 4)
        self.later(interval, self._check_pulses)
        for replica in self._replicas:
            process = replica.process
            if process is None or process.ready is None or process.own_exit_code is not None:
                continue
            pulse = process.fence.pulse()
            if pulse is None or pulse != replica.pulse:
                replica.pulse, replica.num_still_checks = pulse, 0
                continue
            replica.num_still_checks += 1
            still_s = replica.num_still_checks * interval
            if still_s > timeout:
                process.kill(
                    f"it stood still for {still_s:.1f} s, longer than --step-timeout {timeout:g}"
                )

    # -- the end, and the loop ----------------------------------------------------------------

    def give_up(self, fault: RequestFault) -> None:
        """No engine core will come any more. The first reason is the one that counts."""
        if self.fault is None:
            self.fault = fault
            self.tell_clients(control.GaveUp(fault))
            self._end_cores()

    def stop(self) -> None:
        """End every engine core; `run` returns then. Idempotent."""
        if not self._is_stopping:
            self._is_stopping = True
            self._end_cores()

    def _end_cores(self) -> None:
        """Ask those that are up; those that are loading have nothing to end."""
        for replica in self._replicas:
            process = replica.process
            if process is None:
                continue
            if process.ready is not None and process.channel.send(control.Shutdown()):
                self.later(STOP_TIMEOUT_S, process.kill)
            else:
                process.kill()

    @property
    def is_over(self) -> bool:
        """Whether everything that was started has ended, as it was meant to."""
        return self._is_stopping and all(replica.process is None for replica in self._replicas)

    def run(self) -> None:
        """Until `stop()`, whoever calls it, and the end of everything that was started."""
        try:
            while not self.is_over:
                self.run_once()
        finally:
            self.close()

    def run_once(self) -> None:
        """Wait for the next event or timer, and do what it asks for."""
        wait = self._timers[0][0] - time.monotonic() if self._timers else None
        for key, _ in self._selector.select(None if wait is None else max(0.0, wait)):
            if self._selector.get_map().get(key.fd) is key:  # no earlier one has closed it
                key.data()
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()

    def close(self) -> None:
        """Kill what still runs and clean up."""
        for replica in self._replicas:
            if replica.process is not None:
                replica.process.kill()
                replica.process.close()
                replica.process = None
        for process in self._ended:
            process.close()
        for channel in self._clients.values():
            channel.close()
        self._clients.clear()
        self._selector.close()
        self._run_directory.remove()

    def watch(self, fd: int, action: Action) -> None:
        """Call `action` whenever `fd` is readable."""
        self._selector.register(fd, selectors.EVENT_READ, action)

    def unwatch(self, fd: int) -> None:
        """Do so no more."""
        self._selector.unregister(fd)

    def later(self, seconds: float, action: Action) -> None:
        """Call `action` after `seconds`."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), action))


def _up(replica: Replica, process: EngineCoreProcess) -> control.EngineUp:
    assert process.ready is not None
    return control.EngineUp(
        replica.rank, process.epoch, process.address, process.ready, process.key
    )


def _with_parallel(config: EngineConfig, **changes: Any) -> EngineConfig:
    parallel = dataclasses.replace(config.parallel_config, **changes)
    return dataclasses.replace(config, parallel_config=parallel)


class SupervisorLink:
    """A client's way to the supervisor: its channel, and the name that engine cores know it by."""

    def __init__(
        self, client_id: str, connection: Connection, started: float, has_others: bool = False
    ) -> None:
        """`started`: when the first engine core was, seconds since the epoch.

        `has_others`: whether it is one of several clients of the same engine cores.
        """
        self.client_id = client_id
        self.has_others = has_others
        self.started = started
        self.channel: control.Channel[control.ToClient] = control.Channel(
            connection, control.ToClient
        )

    def close(self) -> None:
        """The client ends. Idempotent."""
        self.channel.close()


class SupervisorThread(SupervisorLink):
    """A supervisor in a thread of a library, with one client. It lives as long as its client."""

    def __init__(self, has_worker: bool = True) -> None:
        self._supervisor = Supervisor(has_worker=has_worker)
        connection = Connection(self._supervisor.connect("client").detach())
        super().__init__("client", connection, self._supervisor.started)
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the engine core and everything that belongs to it. Idempotent."""
        if not self.channel.closed:
            self.channel.send(control.Stop())
            self._thread.join(2 * STOP_TIMEOUT_S)
            self.channel.close()

    def _run(self) -> None:
        try:
            self._supervisor.run()
        except Exception:  # its clients see the end of their channels
            logger.exception("the supervisor failed")
