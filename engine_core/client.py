"""Clients of an engine core: in-process, or of a process, blocking or asyncio.

All have the same calls. A failed start-up raises the error that the core named. An engine core that
dies is replaced, and requests go on; EngineDeadError says that no other one will come.
"""

import asyncio
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zmq

from headrace.configs.config import EngineConfig
from headrace.configs.errors import CallLostError, error_from_code
from headrace.engine_core.connection import Connection
from headrace.engine_core.control_messages import Hello, StartupProgress
from headrace.engine_core.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FromCore,
    Ready,
    UtilityCall,
    UtilityResult,
)
from headrace.engine_core.session import Session, events_of
from headrace.engine_core.supervisor import SupervisorLink
from headrace.executors.worker_calls import Method, decode_results, encode_call
from headrace.workers.protocol import WorkerCall

Progress = Callable[[str], None]
_MAX_MESSAGES_AT_ONCE = 100  # before other tasks of the event loop get their turn


class InprocClient:
    """Runs the engine core in the caller's process (HEADRACE_MULTIPROCESSING=0). Imports torch."""

    def __init__(self, config: EngineConfig, progress: Progress) -> None:
        from headrace.engine_core.core import EngineCore

        self._core = EngineCore(config, os.getpid(), progress, allows_callables=True)
        self._outputs: list[EngineCoreOutput] = []
        self.ready: Ready = self._core.ready

    def add_request(self, request: EngineCoreRequest, rank: int | None = None) -> None:
        """`rank`: of the only replica."""
        self._outputs += self._core.add_request(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        self._outputs += self._core.abort(request_id, index)

    def get_outputs(self) -> EngineCoreOutputs:
        """Run one step, or return what is there."""
        outputs, self._outputs = self._outputs, []
        if self._core.has_work():
            outputs = outputs + self._core.step()
        self._core.advance()
        version = self._core.weight_version
        return EngineCoreOutputs(outputs, self._core.stats(), time.time(), weight_version=version)

    @property
    def weight_version(self) -> str:
        """Of the weights that compute now."""
        return self._core.weight_version

    @property
    def has_outputs(self) -> bool:
        """Whether outputs are there, or come of a step."""
        return bool(self._outputs) or self._core.has_work()

    def call(
        self, method: str, timeout: float | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a utility of the engine core; `timeout` does not interrupt it.

        One that waits until nothing runs makes the steps for that itself; their outputs come with
        the next `get_outputs`.
        """
        results: list[UtilityResult] = []
        self._core.call(UtilityCall(0, method, dict(kwargs or {})), results.append)
        while not results:
            self._outputs += self._core.step()
            self._core.advance()
        return _joined_value([results[0]])

    def call_workers(
        self,
        method: Method,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Run `method` on the worker; `timeout` does not interrupt it."""
        return _worker_values([self._core.call_workers(encode_call(0, method, args, kwargs))])

    def check_alive(self) -> None:
        """Nothing to check: it lives as long as the caller."""

    def close(self) -> None:
        """Stop what runs in the background; the rest of the engine core goes with the object."""
        self._core.close()


class SyncClient:
    """Blocking client of one or several engine cores.

    It ends them in `close()` if they are its program's own.
    """

    def __init__(self, link: SupervisorLink) -> None:
        self._session = Session(link)
        self._poller = zmq.Poller()
        self._poller.register(link.channel.fileno(), zmq.POLLIN)
        self._polled: dict[int, Connection] = {}  # whose sockets the poller has, by rank
        self._turn = 0  # whose message is taken next, where there are several
        self._inbox: deque[FromCore] = deque()
        self._num_calls = 0

    @property
    def ready(self) -> Ready:
        ready = self._session.ready
        assert ready is not None, "wait_ready() comes first"
        return ready

    @property
    def num_blocks(self) -> dict[int, int]:
        """KV-cache blocks of each replica, by rank."""
        return _num_blocks(self._session)

    def send_config(self, config: EngineConfig) -> None:
        """Let the engine cores begin to load; callables are allowed, it is this program's own."""
        self._session.configure(config, make_hello(config, allows_callables=True))

    def wait_ready(self, progress: Progress) -> None:
        """Wait until every engine core takes requests."""
        kept: list[FromCore] = []
        while not self._session.is_ready:
            self._session.check_alive()
            if not self._receive_one(kept):
                self._wait(None, progress)
        self._inbox.extendleft(reversed(kept))

    def add_request(self, request: EngineCoreRequest, rank: int | None = None) -> None:
        """`rank`: of the replica that is to run it; None: the router chooses."""
        self._session.add_request(request, rank)

    def abort(self, request_id: str, index: int | None = None) -> None:
        self._session.abort(request_id, index)

    def get_outputs(self) -> EngineCoreOutputs:
        """Wait for the outputs of a step of any replica, however many engine cores that takes."""
        while True:
            message = self._receive(None)
            if isinstance(message, EngineCoreOutputs):
                return message

    @property
    def weight_version(self) -> str:
        """Of the weights that the last outputs came from."""
        return self._session.weight_version

    def call(
        self, method: str, timeout: float | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a utility of the engine core and return its value; TimeoutError after `timeout` s.

        With several replicas it runs on all: the value is what all of them say, whether all said
        True, or else a list with the value of each.
        """
        self._num_calls += 1
        call = UtilityCall(self._num_calls, method, dict(kwargs or {}))
        return _joined_value(self._answers(call, method, timeout))

    def call_workers(
        self,
        method: Method,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Run `method` on every worker; one result each, replica by replica.

        After TimeoutError it still runs there.
        """
        self._num_calls += 1
        call = encode_call(self._num_calls, method, args, kwargs)
        return _worker_values(self._answers(call, _name(method), timeout))

    @property
    def has_outputs(self) -> bool:
        """Whether messages have been received that nobody has taken."""
        return bool(self._inbox)

    def check_alive(self) -> None:
        """Raise EngineDeadError if there is no engine core, and none will come."""
        self._take_events()
        self._session.check_alive()

    def close(self) -> None:
        """End the engine cores and everything that belongs to them. Idempotent."""
        if not self._session.closed:
            self._session.close()

    def _answers(
        self, call: UtilityCall | WorkerCall, name: str, timeout: float | None
    ) -> list[UtilityResult]:
        """What every replica answers, by rank."""
        deadline = None if timeout is None else time.monotonic() + timeout
        session, kept = self._session, list[FromCore]()
        results: dict[int, UtilityResult] = {}
        self._take_events()
        try:
            while not session.is_whole:  # one is being restarted; others go on
                session.check_alive()
                if self._receive_one(kept):
                    continue
                if not self._wait(deadline):
                    raise _late(name, timeout)
            session.send_call(call)
            num_losses = session.num_losses
            while len(results) < len(session.ranks):
                message = self._receive(deadline)
                if message is None:
                    raise _late(name, timeout)
                if isinstance(message, UtilityResult):
                    if message.call_id == call.call_id:
                        results[message.rank] = message
                    continue  # else a late answer to a call that timed out
                kept.append(message)
                if session.num_losses != num_losses:
                    raise _lost(name)
        finally:
            self._inbox.extendleft(reversed(kept))
        return [results[rank] for rank in sorted(results)]

    def _receive(self, deadline: float | None) -> FromCore | None:
        """The next message; None only once `deadline` (monotonic seconds) has passed.

        What an engine core had sent comes before the error that says that it is gone.
        """
        while True:
            if self._inbox:
                return self._inbox.popleft()
            received = self._receive_frames()
            if received is not None:
                message = self._session.take(*received)
                if message is not None:
                    return message
                continue
            self._session.check_alive()
            if not self._wait(deadline):
                return None

    def _receive_one(self, kept: list[FromCore]) -> bool:
        """Take a message that has arrived; what is new in it is kept. False if there is none."""
        received = self._receive_frames()
        message = None if received is None else self._session.take(*received)
        if message is not None:
            kept.append(message)
        return received is not None

    def _receive_frames(self) -> tuple[int, list[bytes]] | None:
        """A message that has arrived, and from which rank; replicas take turns."""
        connections = list(self._session.connections.items())
        for i in range(len(connections)):
            rank, connection = connections[(self._turn + i) % len(connections)]
            frames = connection.receive()
            if frames is not None:
                self._turn += i + 1
                return rank, frames
        return None

    def _wait(self, deadline: float | None, progress: Progress = lambda phase: None) -> bool:
        """Wait for an engine core or the supervisor, whose events are taken; False: too late."""
        connections = self._session.connections
        for rank, polled in list(self._polled.items()):
            if connections.get(rank) is not polled:
                self._poller.unregister(polled.socket)
                del self._polled[rank]
        for rank, connection in connections.items():
            if rank not in self._polled:
                self._poller.register(connection.socket, zmq.POLLIN)
                self._polled[rank] = connection
        wait = None if deadline is None else _milliseconds(deadline - time.monotonic())
        ready = dict(self._poller.poll(wait))
        if self._session.link.channel.fileno() in ready:
            self._take_events(progress)
        return bool(ready)

    def _take_events(self, progress: Progress = lambda phase: None) -> None:
        if self._session.closed or self._session.error is not None:
            return
        for event in events_of(self._session.link):
            if isinstance(event, StartupProgress):
                progress(event.phase)
            self._inbox += self._session.take_event(event)


class AsyncClient:
    """Asyncio client of one or several engine cores.

    It ends them in `close()` if they are its program's own. It receives on the event loop on which
    `attach()` was called; `detach()` frees it for another.
    """

    def __init__(self, link: SupervisorLink) -> None:
        self._session = Session(link)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket_fds: dict[int, int] = {}  # that the event loop watches, by rank
        self._inbox: deque[FromCore] = deque()
        self._news = asyncio.Event()
        self._events = asyncio.Event()  # the supervisor has said something
        self._progress: Progress = lambda phase: None
        self._calls: dict[int, _Call] = {}
        self._num_calls = 0

    @property
    def ready(self) -> Ready:
        ready = self._session.ready
        assert ready is not None, "wait_ready() comes first"
        return ready

    @property
    def num_blocks(self) -> dict[int, int]:
        """KV-cache blocks of each replica, by rank."""
        return _num_blocks(self._session)

    def attach(self) -> None:
        """Receive on the running event loop from now on."""
        self.detach()
        self._loop = asyncio.get_running_loop()
        self._news, self._events = asyncio.Event(), asyncio.Event()
        if not self._session.closed:
            self._loop.add_reader(self._session.link.channel.fileno(), self._take_events)
            self._take_events()

    def detach(self) -> None:
        """Stop receiving; what arrives meanwhile waits. Calls in progress end with their loop."""
        if self._loop is not None and not self._loop.is_closed():
            if not self._session.link.channel.closed:
                self._loop.remove_reader(self._session.link.channel.fileno())
            for fd in self._socket_fds.values():
                self._loop.remove_reader(fd)
            for call in self._calls.values():
                call.future.cancel()
        self._calls.clear()
        self._socket_fds.clear()
        self._loop = None

    def fail_calls(self, error: Exception) -> None:
        """End the calls in progress with `error`."""
        for call in self._calls.values():
            if not call.future.done():
                call.future.set_exception(error)

    def send_config(self, config: EngineConfig, allows_callables: bool) -> None:
        """Let the engine cores begin to load. A server never allows callables."""
        self._session.configure(config, make_hello(config, allows_callables))

    async def wait_config(self) -> EngineConfig:
        """The configuration that the supervisor has, from whichever client it came."""
        while self._session.config is None:
            await self._wait_event()
        return self._session.config

    async def wait_ready(self, progress: Progress) -> None:
        """Wait until every engine core takes requests, or has done so and is being restarted."""
        self._progress = progress
        while not self._session.is_ready:
            await self._wait_event()

    def add_request(self, request: EngineCoreRequest, rank: int | None = None) -> None:
        """`rank`: of the replica that is to run it; None: the router chooses."""
        self._session.add_request(request, rank)
        self._look_again()

    def abort(self, request_id: str, index: int | None = None) -> None:
        self._session.abort(request_id, index)
        self._look_again()

    async def get_outputs(self) -> EngineCoreOutputs:
        """Wait for the outputs of a step of any replica, however many engine cores that takes.

        One task at a time. What an engine core had sent comes before the error that says that it is
        gone for good.
        """
        while True:
            while self._inbox:
                message = self._inbox.popleft()
                if isinstance(message, EngineCoreOutputs):
                    return message
            self._session.check_alive()
            self._news.clear()
            await self._news.wait()

    @property
    def weight_version(self) -> str:
        """Of the weights that the last outputs came from."""
        return self._session.weight_version

    async def call(
        self, method: str, timeout: float | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a utility of every engine core; see `SyncClient.call`."""
        self._num_calls += 1
        call = UtilityCall(self._num_calls, method, dict(kwargs or {}))
        return _joined_value(await self._answers(call, method, timeout))

    async def call_workers(
        self,
        method: Method,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Run `method` on every worker; see `SyncClient.call_workers`."""
        self._num_calls += 1
        call = encode_call(self._num_calls, method, args, kwargs)
        return _worker_values(await self._answers(call, _name(method), timeout))

    @property
    def is_up(self) -> bool:
        """Whether an engine core is there at this moment."""
        return self._session.is_up

    def check_alive(self) -> None:
        """Raise EngineDeadError if there is no engine core, and none will come."""
        self._session.check_alive()

    async def close(self) -> None:
        """End the engine cores and everything that belongs to them. Idempotent."""
        if not self._session.closed:
            self.detach()
            await asyncio.to_thread(self._session.close)

    def close_blocking(self) -> None:
        """`close()` for a caller without an event loop."""
        if not self._session.closed:
            self.detach()
            self._session.close()

    # A socket's file descriptor tells of news once: whoever may have taken the signal, by sending
    # say, looks again.
    def _look_again(self) -> None:
        if self._loop is None:
            return
        for rank, connection in self._session.connections.items():
            if connection.option(zmq.EVENTS) & zmq.POLLIN:
                self._loop.call_soon(self._drain, rank)

    def _drain(self, rank: int) -> None:
        """Take what has arrived; the rest, if that is much, after the loop's other work."""
        for _ in range(_MAX_MESSAGES_AT_ONCE):
            connection = self._session.replicas[rank].connection
            if self._loop is None or connection is None:
                return
            frames = connection.receive()
            if frames is None:
                return
            message = self._session.take(rank, frames)
            if message is not None:
                self._put(message)
        if self._loop is not None:
            self._loop.call_soon(self._drain, rank)

    def _put(self, message: FromCore) -> None:
        if isinstance(message, UtilityResult):
            call = self._calls.get(message.call_id)
            if call is not None:
                call.take(message)
            return
        self._inbox.append(message)
        self._news.set()

    def _take_events(self) -> None:
        """Follow the supervisor, and watch the sockets of the engine cores that there are now."""
        session = self._session
        if self._loop is None or session.closed:
            return
        num_losses = session.num_losses
        if session.error is None:
            for event in events_of(session.link):
                if isinstance(event, StartupProgress):
                    self._progress(event.phase)
                for message in session.take_event(event):
                    self._put(message)
        if session.error is not None:
            self._loop.remove_reader(session.link.channel.fileno())
            self._news.set()
            self.fail_calls(session.error)
        if session.num_losses != num_losses:
            self.fail_calls(_lost("the call"))
        self._watch_sockets()
        self._events.set()

    def _watch_sockets(self) -> None:
        assert self._loop is not None
        # A number that comes again may be another socket: all are registered anew.
        for fd in self._socket_fds.values():
            self._loop.remove_reader(fd)
        self._socket_fds = {
            rank: connection.option(zmq.FD)
            for rank, connection in self._session.connections.items()
        }
        for rank, fd in self._socket_fds.items():
            self._loop.add_reader(fd, self._drain, rank)
            self._loop.call_soon(self._drain, rank)

    async def _wait_event(self) -> None:
        """Until the supervisor says something; raises the error that ends the engine."""
        self._session.check_alive()
        self._events.clear()
        await self._events.wait()

    async def _answers(
        self, call: UtilityCall | WorkerCall, name: str, timeout: float | None
    ) -> list[UtilityResult]:
        """What every replica answers, by rank."""

        async def answers() -> list[UtilityResult]:
            while not self._session.is_whole:
                await self._wait_event()
            pending = self._calls[call.call_id] = _Call(len(self._session.ranks))
            self._session.send_call(call)
            self._look_again()
            return await pending.future

        try:
            return await asyncio.wait_for(answers(), timeout)
        except TimeoutError:
            raise _late(name, timeout) from None
        finally:
            self._calls.pop(call.call_id, None)


class _Call:
    """A call in progress on every replica; made on the event loop that waits for it."""

    def __init__(self, num_replicas: int) -> None:
        self.future: asyncio.Future[list[UtilityResult]] = (
            asyncio.get_running_loop().create_future()
        )
        self._num_replicas = num_replicas
        self._results: dict[int, UtilityResult] = {}

    def take(self, result: UtilityResult) -> None:
        self._results[result.rank] = result
        if len(self._results) == self._num_replicas and not self.future.done():
            self.future.set_result([self._results[rank] for rank in sorted(self._results)])


def make_hello(config: EngineConfig, allows_callables: bool) -> Hello:
    """What an engine core is told first: to load as if it were this process."""
    return Hello(config, sys.path, os.getcwd(), allows_callables)


def _result_value(result: UtilityResult) -> Any:
    if result.fault is not None:
        raise error_from_code(result.fault.code, result.fault.message)
    return result.value


def _joined_value(results: list[UtilityResult]) -> Any:
    values = [_result_value(result) for result in results]
    if all(value == values[0] for value in values):
        return values[0]
    return all(values) if all(isinstance(value, bool) for value in values) else values


def _worker_values(results: list[UtilityResult]) -> list[Any]:
    values = []
    for result in results:
        _result_value(result)
        values += decode_results(result.workers)
    return values


def _num_blocks(session: Session) -> dict[int, int]:
    return {
        rank: 0 if replica.ready is None else replica.ready.num_blocks
        for rank, replica in sorted(session.replicas.items())
    }


def _milliseconds(seconds: float) -> int:
    return max(0, math.ceil(1000 * seconds))


def _late(name: str, timeout: float | None) -> TimeoutError:
    return TimeoutError(f"{name} did not answer within {timeout} s; it goes on in the engine core")


def _lost(name: str) -> CallLostError:
    return CallLostError(f"the engine core was lost while {name} ran; it is not repeated")


def _name(method: Method) -> str:
    return method if isinstance(method, str) else getattr(method, "__name__", repr(method))
