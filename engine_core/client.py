"""Clients of an engine core: in-process, or of a process, blocking or asyncio.

All have the same calls. A dead engine core raises EngineDeadError, a failed start-up the error that
the core named.
"""

import asyncio
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zmq

from headrace.configs.config import EngineConfig
from headrace.configs.errors import EngineDeadError, error_from_code
from headrace.engine_core.connection import Connection
from headrace.engine_core.messages import (
    AbortRequest,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FromCore,
    Ready,
    StartupFailed,
    StartupProgress,
    ToCore,
    UtilityCall,
    UtilityResult,
)
from headrace.engine_core.supervisor import EngineCoreProcess
from headrace.executors.worker_calls import Method, decode_results, encode_call
from headrace.workers.protocol import WorkerCall

Progress = Callable[[str], None]
_MAX_MESSAGES_AT_ONCE = 100  # before other tasks of the event loop get their turn
_LAST_WORDS_MS = 50  # for what a dead engine core had sent and is still on its way


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
        return EngineCoreOutputs(outputs, self._core.stats(), time.time())

    def call(self, method: str, timeout: float | None = None) -> Any:
        """Run a utility of the engine core; `timeout` does not interrupt it."""
        return _result_value(self._core.call(UtilityCall(0, method)))

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
    """Blocking client of an engine-core process, which it ends in `close()`."""

    def __init__(self, process: EngineCoreProcess) -> None:
        self._connection = Connection(process)
        self._poller = zmq.Poller()
        self._poller.register(self._connection.socket, zmq.POLLIN)
        self._poller.register(process.sentinel, zmq.POLLIN)
        self._pending: deque[EngineCoreOutputs] = deque()
        self._num_calls = 0

    @property
    def ready(self) -> Ready:
        assert self._connection.ready is not None, "wait_ready() comes first"
        return self._connection.ready

    def send_config(self, config: EngineConfig) -> None:
        """Let the engine core begin to load; callables are allowed, it is this program's own."""
        self._connection.hello(config, allows_callables=True)

    def wait_ready(self, progress: Progress) -> None:
        """Wait until the engine core takes requests."""
        while self._connection.ready is None:
            self._connection.ready = _startup_step(self._receive(None), progress)

    def add_request(self, request: EngineCoreRequest) -> None:
        self._connection.send(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        self._connection.send(AbortRequest(request_id, index))

    def get_outputs(self) -> EngineCoreOutputs:
        """Wait for the outputs of a step."""
        if self._pending:
            return self._pending.popleft()
        while True:
            message = self._receive(None)
            if isinstance(message, EngineCoreOutputs):
                return message

    def call(self, method: str, timeout: float | None = None) -> Any:
        """Run a utility of the engine core and return its value; TimeoutError after `timeout` s."""
        self._num_calls += 1
        self._connection.send(UtilityCall(self._num_calls, method))
        return _result_value(self._wait_result(method, timeout))

    def call_workers(
        self,
        method: Method,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Run `method` on every worker; one result each. After TimeoutError it still runs there."""
        self._num_calls += 1
        self._connection.send(encode_call(self._num_calls, method, args, kwargs))
        return _worker_values(self._wait_result(_name(method), timeout))

    def check_alive(self) -> None:
        """Raise EngineDeadError if the engine core is gone."""
        self._connection.check_alive()

    def close(self) -> None:
        """End the engine core and everything that belongs to it. Idempotent."""
        if self._connection.closed:
            return
        self._connection.say_goodbye()
        self._connection.closed = True
        self._connection.close()

    def _wait_result(self, name: str, timeout: float | None) -> UtilityResult:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            message = self._receive(deadline)
            if message is None:
                raise _late(name, timeout)
            if isinstance(message, EngineCoreOutputs):
                self._pending.append(message)
            elif isinstance(message, UtilityResult) and message.call_id == self._num_calls:
                return message  # others are late answers to calls that timed out

    def _receive(self, deadline: float | None) -> FromCore | None:
        """The next message; None only once `deadline` (monotonic seconds) has passed."""
        connection = self._connection
        while True:
            frames = connection.receive()
            if frames is not None:
                message = connection.decode(frames)
                if message is not None:
                    return message
                continue
            wait = None if deadline is None else _milliseconds(deadline - time.monotonic())
            events = dict(self._poller.poll(wait))
            if not events:
                return None
            if connection.socket not in events and not connection.socket.poll(_LAST_WORDS_MS):
                raise EngineDeadError(connection.death())


class AsyncClient:
    """Asyncio client of an engine-core process, which it ends in `close()`.

    It receives on the event loop on which `attach()` was called; `detach()` frees it for another.
    """

    def __init__(self, process: EngineCoreProcess) -> None:
        self._connection = Connection(process)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: deque[list[bytes]] = deque()
        self._news = asyncio.Event()
        self._is_dead = False
        self._calls: dict[int, asyncio.Future[UtilityResult]] = {}
        self._num_calls = 0

    @property
    def ready(self) -> Ready:
        assert self._connection.ready is not None, "wait_ready() comes first"
        return self._connection.ready

    def attach(self) -> None:
        """Receive on the running event loop from now on."""
        self.detach()
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._loop.add_reader(self._connection.option(zmq.FD), self._drain)
        if not self._is_dead:
            self._loop.add_reader(self._connection.process.sentinel, self._on_exit)
        self._loop.call_soon(self._drain)

    def detach(self) -> None:
        """Stop receiving; what arrives meanwhile waits. Calls in progress end with their loop."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._connection.option(zmq.FD))
            self._loop.remove_reader(self._connection.process.sentinel)
            for future in self._calls.values():
                future.cancel()
        self._calls.clear()
        self._loop = None

    def fail_calls(self, error: Exception) -> None:
        """End the calls in progress with `error`."""
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)

    def send_config(self, config: EngineConfig, allows_callables: bool) -> None:
        """Let the engine core begin to load. A server never allows callables."""
        self._connection.hello(config, allows_callables)

    async def wait_ready(self, progress: Progress) -> None:
        """Wait until the engine core takes requests."""
        while self._connection.ready is None:
            self._connection.ready = _startup_step(await self._receive(), progress)

    def add_request(self, request: EngineCoreRequest) -> None:
        self._send(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        self._send(AbortRequest(request_id, index))

    async def get_outputs(self) -> EngineCoreOutputs:
        """Wait for the outputs of a step.

        One task at a time; answers to calls are handed out meanwhile.
        """
        while True:
            message = await self._receive()
            if isinstance(message, EngineCoreOutputs):
                return message
            if isinstance(message, UtilityResult):
                future = self._calls.get(message.call_id)
                if future is not None and not future.done():
                    future.set_result(message)

    async def call(self, method: str, timeout: float | None = None) -> Any:
        """Run a utility of the engine core; some task must be in `get_outputs` meanwhile."""
        self._num_calls += 1
        call = UtilityCall(self._num_calls, method)
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

    def check_alive(self) -> None:
        """Raise EngineDeadError if the engine core is gone."""
        self._connection.check_alive()

    async def close(self) -> None:
        """End the engine core and everything that belongs to it. Idempotent."""
        if self._start_closing():
            await asyncio.to_thread(self._connection.close)

    def close_blocking(self) -> None:
        """`close()` for a caller without an event loop."""
        if self._start_closing():
            self._connection.close()

    def _start_closing(self) -> bool:
        if self._connection.closed:
            return False
        self.detach()
        self._connection.say_goodbye()
        self._connection.closed = True
        return True

    def _send(self, message: ToCore) -> None:
        self._connection.send(message)
        # The socket's file descriptor tells of news once: sending may have taken the signal.
        if self._loop is not None and self._has_messages():
            self._loop.call_soon(self._drain)

    def _has_messages(self) -> bool:
        return bool(self._connection.option(zmq.EVENTS) & zmq.POLLIN)

    def _drain(self) -> None:
        """Take what has arrived; the rest, if that is much, after the loop's other work."""
        if self._loop is None:
            return
        for _ in range(_MAX_MESSAGES_AT_ONCE):
            frames = self._connection.receive()
            if frames is None:
                return
            self._inbox.append(frames)
            self._news.set()
        self._loop.call_soon(self._drain)

    def _on_exit(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._connection.process.sentinel)
            self._loop.call_later(_LAST_WORDS_MS / 1000, self._mark_dead)

    def _mark_dead(self) -> None:
        self._drain()
        self._is_dead = True
        self._news.set()
        self.fail_calls(EngineDeadError(self._connection.death()))

    async def _answer(
        self, call: UtilityCall | WorkerCall, name: str, timeout: float | None
    ) -> UtilityResult:
        future: asyncio.Future[UtilityResult] = asyncio.get_running_loop().create_future()
        self._calls[call.call_id] = future
        try:
            self._send(call)
            return await asyncio.wait_for(future, timeout)
        except TimeoutError:
            raise _late(name, timeout) from None
        finally:
            self._calls.pop(call.call_id, None)

    async def _receive(self) -> FromCore:
        """The next message; what a dead engine core had sent is still delivered first."""
        while True:
            while self._inbox:
                message = self._connection.decode(self._inbox.popleft())
                if message is not None:
                    return message
            if self._is_dead:
                raise EngineDeadError(self._connection.death())
            self._news.clear()
            await self._news.wait()


def _startup_step(message: FromCore | None, progress: Progress) -> Ready | None:
    match message:
        case StartupProgress():
            progress(message.phase)
        case StartupFailed():
            raise error_from_code(message.fault.code, message.fault.message)
        case Ready():
            return message
    return None


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


def _name(method: Method) -> str:
    return method if isinstance(method, str) else getattr(method, "__name__", repr(method))
