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

    def add_request(self, request: EngineCoreRequest) -> None:
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
        return EngineCoreOutputs(outputs, self._core.stats(), time.time(), version)

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
        return _result_value(results[0])

    def call_workers(
        self,
        method: Method,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Run `method` on the worker; `timeout` does not interrupt it."""
        return _worker_values(self._core.call_workers(encode_call(0, method, args, kwargs)))

    def check_alive(self) -> None:
        """Nothing to check: it lives as long as the caller."""

    def close(self) -> None:
        """Stop what runs in the background; the rest of the engine core goes with the object."""
        self._core.close()


class SyncClient:
    """Blocking client of an engine core, which it ends in `close()` if it is its program's own."""

    def __init__(self, link: SupervisorLink) -> None:
        self._session = Session(link)
        self._poller = zmq.Poller()
        self._poller.register(link.channel.fileno(), zmq.POLLIN)
        self._polled: Connection | None = None  # whose socket the poller has
        self._inbox: deque[FromCore] = deque()
        self._num_calls = 0

    @property
    def ready(self) -> Ready:
        assert self._session.ready is not None, "wait_ready() comes first"
        return self._session.ready

    def send_config(self, config: EngineConfig) -> None:
        """Let the engine core begin to load; callables are allowed, it is this program's own."""
        self._session.configure(config, make_hello(config, allows_callables=True))

    def wait_ready(self, progress: Progress) -> None:
        """Wait until the engine core takes requests."""
        while self._session.ready is None:
            self._session.check_alive()
            self._wait(None, progress)

    def add_request(self, request: EngineCoreRequest) -> None:
        self._session.add_request(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        self._session.abort(request_id, index)

    def get_outputs(self) -> EngineCoreOutputs:
        """Wait for the outputs of a step, however many engine cores that takes."""
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
        """Run a utility of the engine core and return its value; TimeoutError after `timeout` s."""
        self._num_calls += 1
        call = UtilityCall(self._num_calls, method, dict(kwargs or {}))
        return _result_value(self._answer(call, method, timeout))

    def call_workers(
        self,
        method: Method,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Run `method` on every worker; one result each. After TimeoutError it still runs there."""
        self._num_calls += 1
        call = encode_call(self._num_calls, method, args, kwargs)
        return _worker_values(self._answer(call, _name(method), timeout))

    @property
    def has_outputs(self) -> bool:
        """Whether messages have been received that nobody has taken."""
        return bool(self._inbox)

    def check_alive(self) -> None:
        """Raise EngineDeadError if there is no engine core, and none will come."""
        self._take_events()
        self._session.check_alive()

    def close(self) -> None:
        """End the engine core and everything that belongs to it. Idempotent."""
        if not self._session.closed:
            self._session.close()

    def _answer(
        self, call: UtilityCall | WorkerCall, name: str, timeout: float | None
    ) -> UtilityResult:
        deadline = None if timeout is None else time.monotonic() + timeout
        session, kept = self._session, list[FromCore]()
        self._take_events()
        while session.connection is None:  # it is being restarted
            session.check_alive()
            if not self._wait(deadline):
                raise _late(name, timeout)
        session.send_call(call)
        num_connections = session.num_connections
        try:
            while True:
                message = self._receive(deadline)
                if message is None:
                    raise _late(name, timeout)
                if isinstance(message, UtilityResult):
                    if message.call_id == call.call_id:
                        return message
                    continue  # a late answer to a call that timed out
                kept.append(message)
                if session.connection is None or session.num_connections != num_connections:
                    raise _lost(name)
        finally:
            self._inbox.extendleft(reversed(kept))

    def _receive(self, deadline: float | None) -> FromCore | None:
        """The next message; None only once `deadline` (monotonic seconds) has passed.

        What the engine core had sent comes before the error that says that it is gone.
        """
        while True:
            if self._inbox:
                return self._inbox.popleft()
            connection = self._session.connection
            if connection is not None and (frames := connection.receive()) is not None:
                message = self._session.take(frames)
                if message is not None:
                    return message
                continue
            self._session.check_alive()
            if not self._wait(deadline):
                return None

    def _wait(self, deadline: float | None, progress: Progress = lambda phase: None) -> bool:
        """Wait for the engine core or the supervisor, whose events are taken; False: too late."""
        connection = self._session.connection
        if connection is not self._polled:
            if self._polled is not None:
                self._poller.unregister(self._polled.socket)
            if connection is not None:
                self._poller.register(connection.socket, zmq.POLLIN)
            self._polled = connection
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
    """Asyncio client of an engine core, which it ends in `close()` if it is its program's own.

    It receives on the event loop on which `attach()` was called; `detach()` frees it for another.
    """

    def __init__(self, link: SupervisorLink) -> None:
        self._session = Session(link)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket_fd: int | None = None  # that the event loop watches
        self._inbox: deque[FromCore] = deque()
        self._news = asyncio.Event()
        self._events = asyncio.Event()  # the supervisor has said something
        self._progress: Progress = lambda phase: None
        self._calls: dict[int, asyncio.Future[UtilityResult]] = {}
        self._num_calls = 0

    @property
    def ready(self) -> Ready:
        assert self._session.ready is not None, "wait_ready() comes first"
        return self._session.ready

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
            if self._socket_fd is not None:
                self._loop.remove_reader(self._socket_fd)
            for future in self._calls.values():
                future.cancel()
        self._calls.clear()
        self._loop = self._socket_fd = None

    def fail_calls(self, error: Exception) -> None:
        """End the calls in progress with `error`."""
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)

    def send_config(self, config: EngineConfig, allows_callables: bool) -> None:
        """Let the engine core begin to load. A server never allows callables."""
        self._session.configure(config, make_hello(config, allows_callables))

    async def wait_config(self) -> EngineConfig:
        """The configuration that the supervisor has, from whichever client it came."""
        while self._session.config is None:
            await self._wait_event()
        return self._session.config

    async def wait_ready(self, progress: Progress) -> None:
        """Wait until the engine core takes requests."""
        self._progress = progress
        while self._session.ready is None:
            await self._wait_event()

    def add_request(self, request: EngineCoreRequest) -> None:
        self._session.add_request(request)
        self._look_again()

    def abort(self, request_id: str, index: int | None = None) -> None:
        self._session.abort(request_id, index)
        self._look_again()

    async def get_outputs(self) -> EngineCoreOutputs:
        """Wait for the outputs of a step, however many engine cores that takes.

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
        """Run a utility of the engine core."""
        self._num_calls += 1
        call = UtilityCall(self._num_calls, method, dict(kwargs or {}))
        return _result_value(await self._answer(call, method, timeout))

    async def call_workers(
        self,
        method: Method,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Run `method` on every worker; one result each. After TimeoutError it still runs there."""
        self._num_calls += 1
        call = encode_call(self._num_calls, method, args, kwargs)
        return _worker_values(await self._answer(call, _name(method), timeout))

    @property
    def is_up(self) -> bool:
        """Whether an engine core is there at this moment."""
        return self._session.connection is not None

    def check_alive(self) -> None:
        """Raise EngineDeadError if there is no engine core, and none will come."""
        self._session.check_alive()

    async def close(self) -> None:
        """End the engine core and everything that belongs to it. Idempotent."""
        if not self._session.closed:
            self.detach()
            await asyncio.to_thread(self._session.close)

    def close_blocking(self) -> None:
        """`close()` for a caller without an event loop."""
        if not self._session.closed:
            self.detach()
            self._session.close()

    # The socket's file descriptor tells of news once: whoever may have taken the signal, by sending
    # say, looks again.
    def _look_again(self) -> None:
        connection = self._session.connection
        if (
            self._loop is not None
            and connection is not None
            and connection.option(zmq.EVENTS) & zmq.POLLIN
        ):
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        """Take what has arrived; the rest, if that is much, after the loop's other work."""
        connection = self._session.connection
        if self._loop is None or connection is None:
            return
        for _ in range(_MAX_MESSAGES_AT_ONCE):
            frames = connection.receive()
            if frames is None:
                return
            message = self._session.take(frames)
            if message is not None:
                self._put(message)
        self._loop.call_soon(self._drain)

    def _put(self, message: FromCore) -> None:
        if isinstance(message, UtilityResult):
            future = self._calls.get(message.call_id)
            if future is not None and not future.done():
                future.set_result(message)
            return
        self._inbox.append(message)
        self._news.set()

    def _take_events(self) -> None:
        """Follow the supervisor, and watch the socket of the engine core that there is now."""
        session = self._session
        if self._loop is None or session.closed:
            return
        num_connections, was_up = session.num_connections, session.connection is not None
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
        if was_up and (session.connection is None or session.num_connections != num_connections):
            self.fail_calls(_lost("the call"))
        self._watch_socket()
        self._events.set()

    def _watch_socket(self) -> None:
        assert self._loop is not None
        connection = self._session.connection
        fd = None if connection is None else connection.option(zmq.FD)
        # A number that comes again may be another socket: it is always registered anew.
        if self._socket_fd is not None:
            self._loop.remove_reader(self._socket_fd)
        self._socket_fd = fd
        if fd is not None:
            self._loop.add_reader(fd, self._drain)
            self._loop.call_soon(self._drain)

    async def _wait_event(self) -> None:
        """Until the supervisor says something; raises the error that ends the engine."""
        self._session.check_alive()
        self._events.clear()
        await self._events.wait()

    async def _answer(
        self, call: UtilityCall | WorkerCall, name: str, timeout: float | None
    ) -> UtilityResult:
        future: asyncio.Future[UtilityResult] = asyncio.get_running_loop().create_future()

        async def answer() -> UtilityResult:
            while not self.is_up:
                await self._wait_event()
            self._calls[call.call_id] = future
            self._session.send_call(call)
            self._look_again()
            return await future

        try:
            return await asyncio.wait_for(answer(), timeout)
        except TimeoutError:
            raise _late(name, timeout) from None
        finally:
            self._calls.pop(call.call_id, None)


def make_hello(config: EngineConfig, allows_callables: bool) -> Hello:
    """What an engine core is told first: to load as if it were this process."""
    return Hello(config, sys.path, os.getcwd(), allows_callables)


def _result_value(result: UtilityResult) -> Any:
    if result.fault is not None:
        raise error_from_code(result.fault.code, result.fault.message)
    return result.value


def _worker_values(result: UtilityResult) -> list[Any]:
    _result_value(result)
    return decode_results(result.workers)


def _milliseconds(seconds: float) -> int:
    return max(0, math.ceil(1000 * seconds))


def _late(name: str, timeout: float | None) -> TimeoutError:
    return TimeoutError(f"{name} did not answer within {timeout} s; it goes on in the engine core")


def _lost(name: str) -> CallLostError:
    return CallLostError(f"the engine core was lost while {name} ran; it is not repeated")


def _name(method: Method) -> str:
    return method if isinstance(method, str) else getattr(method, "__name__", repr(method))
