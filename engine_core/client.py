"""Clients of an engine core: in-process, or of a process, blocking or asyncio.

All have the same calls. A dead engine core raises EngineDeadError, a failed start-up the error that
the core named.
"""

import asyncio
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq
import zmq.asyncio

from headrace.configs.config import EngineConfig
from headrace.configs.errors import EngineDeadError, error_from_code
from headrace.engine_core.messages import (
    AbortRequest,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDied,
    FromCore,
    Hello,
    Ready,
    Shutdown,
    StartupFailed,
    StartupProgress,
    ToCore,
    UtilityCall,
    UtilityResult,
)
from headrace.engine_core.supervisor import EngineCoreProcess
from headrace.engine_core.wire import Codec

Progress = Callable[[str], None]


class InprocClient:
    """Runs the engine core in the caller's process (HEADRACE_MULTIPROCESSING=0). Imports torch."""

    def __init__(self, config: EngineConfig, progress: Progress) -> None:
        from headrace.engine_core.core import EngineCore

        self._core = EngineCore(config, os.getpid(), progress)
        self._outputs: list[Any] = []
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
        return EngineCoreOutputs(outputs, self._core.stats())

    def call(self, method: str) -> Any:
        return _result_value(self._core.call(UtilityCall(0, method)))

    def close(self) -> None:
        """Stop what runs in the background; the rest of the engine core goes with the object."""
        self._core.close()


class SyncClient:
    """Blocking client of an engine-core process, which it ends in `close()`."""

    def __init__(self, process: EngineCoreProcess) -> None:
        self._process = process
        self._codec = Codec(process.epoch)
        self._context = zmq.Context()
        self._socket = _connect(self._context, process)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(process.sentinel, zmq.POLLIN)
        self._pending: list[EngineCoreOutputs] = []
        self._num_calls = 0
        self._closed = False
        self.ready: Ready

    def start(self, config: EngineConfig, progress: Progress) -> None:
        """Send the configuration and wait until the engine core takes requests."""
        self._send(Hello(config, sys.path, os.getcwd()))
        while True:
            ready = _startup_step(self._receive(), progress)
            if ready is not None:
                self.ready = ready
                return

    def add_request(self, request: EngineCoreRequest) -> None:
        self._send(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        self._send(AbortRequest(request_id, index))

    def get_outputs(self) -> EngineCoreOutputs:
        """Wait for the outputs of a step."""
        if self._pending:
            return self._pending.pop(0)
        while True:
            message = self._receive()
            if isinstance(message, EngineCoreOutputs):
                return message

    def call(self, method: str) -> Any:
        """Run a utility of the engine core and return its value."""
        self._num_calls += 1
        self._send(UtilityCall(self._num_calls, method))
        while True:
            message = self._receive()
            if isinstance(message, EngineCoreOutputs):
                self._pending.append(message)
            elif isinstance(message, UtilityResult) and message.call_id == self._num_calls:
                return _result_value(message)

    def close(self) -> None:
        """End the engine core and everything that belongs to it. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if hasattr(self, "ready"):
            with suppress(zmq.ZMQError):
                self._socket.send_multipart(self._codec.encode(Shutdown()), zmq.DONTWAIT)
            self._process.stop()
        else:  # still loading: nothing to finish
            self._process.kill()
        self._socket.close(linger=0)
        self._context.term()

    def _send(self, message: ToCore) -> None:
        if self._closed or self._process.exit_code is not None:
            raise EngineDeadError(_death(self._process))
        self._socket.send_multipart(self._codec.encode(message))

    def _receive(self) -> FromCore:
        while True:
            events = dict(self._poller.poll())
            if self._socket in events:
                message = self._codec.decode_from_core(self._socket.recv_multipart())
                if message is not None:
                    return _raise_if_died(message)
            else:
                raise EngineDeadError(_death(self._process))


class AsyncClient:
    """Asyncio client of an engine-core process, which it ends in `close()`.

    Use it on one event loop.
    """

    def __init__(self, process: EngineCoreProcess) -> None:
        self._process = process
        self._codec = Codec(process.epoch)
        self._context = zmq.asyncio.Context()
        self._socket = _connect(self._context, process)
        self._calls: dict[int, asyncio.Future[UtilityResult]] = {}
        self._num_calls = 0
        self._closed = False
        self._died = asyncio.Event()
        asyncio.get_running_loop().add_reader(process.sentinel, self._on_death)
        self.ready: Ready

    async def start(self, config: EngineConfig, progress: Progress) -> None:
        """Send the configuration and wait until the engine core takes requests."""
        await self._send(Hello(config, sys.path, os.getcwd()))
        while True:
            ready = _startup_step(await self._receive(), progress)
            if ready is not None:
                self.ready = ready
                return

    async def add_request(self, request: EngineCoreRequest) -> None:
        await self._send(request)

    async def abort(self, request_id: str, index: int | None = None) -> None:
        await self._send(AbortRequest(request_id, index))

    async def get_outputs(self) -> EngineCoreOutputs:
        """Wait for the outputs of a step.

        One task at a time; answers to calls are handed out meanwhile.
        """
        while True:
            message = await self._receive()
            if isinstance(message, EngineCoreOutputs):
                return message
            if isinstance(message, UtilityResult):
                future = self._calls.pop(message.call_id, None)
                if future is not None and not future.done():
                    future.set_result(message)

    async def call(self, method: str) -> Any:
        """Run a utility of the engine core; some task must be in `get_outputs` meanwhile."""
        self._num_calls += 1
        future: asyncio.Future[UtilityResult] = asyncio.get_running_loop().create_future()
        self._calls[self._num_calls] = future
        await self._send(UtilityCall(self._num_calls, method))
        return _result_value(await future)

    async def close(self) -> None:
        """End the engine core and everything that belongs to it. Idempotent."""
        if self._closed:
            return
        self._closed = True
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        if not hasattr(self, "ready"):  # still loading: nothing to finish
            self._process.kill()
        elif self._process.exit_code is None:
            await self._socket.send_multipart(self._codec.encode(Shutdown()))
        await asyncio.to_thread(self._process.stop)
        for future in self._calls.values():
            future.cancel()
        self._socket.close(linger=0)
        self._context.term()

    def _on_death(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._died.set()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(_death(self._process)))

    async def _send(self, message: ToCore) -> None:
        if self._closed or self._died.is_set():
            raise EngineDeadError(_death(self._process))
        await self._socket.send_multipart(self._codec.encode(message))

    async def _receive(self) -> FromCore:
        while True:
            frames = await self._next_frames()
            message = self._codec.decode_from_core(frames)
            if message is not None:
                return _raise_if_died(message)

    async def _next_frames(self) -> list[bytes]:
        """The next message; what a dead engine core had sent is still delivered first."""
        receive = asyncio.ensure_future(self._socket.recv_multipart())
        death = asyncio.ensure_future(self._died.wait())
        try:
            await asyncio.wait({receive, death}, return_when=asyncio.FIRST_COMPLETED)
            if not receive.done() and not await self._socket.poll(timeout=50):
                raise EngineDeadError(_death(self._process))
            return list(await receive)
        finally:
            death.cancel()
            if not receive.done():
                receive.cancel()


def _connect(context: Any, process: EngineCoreProcess) -> Any:
    socket = context.socket(zmq.DEALER)
    for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
        socket.setsockopt(option, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 10)  # ms: the engine core binds a moment after we connect
    socket.connect(f"ipc://{process.socket_path}")
    return socket


def _startup_step(message: FromCore, progress: Progress) -> Ready | None:
    match message:
        case StartupProgress():
            progress(message.phase)
        case StartupFailed():
            raise error_from_code(message.fault.code, message.fault.message)
        case Ready():
            return message
    return None


def _raise_if_died(message: FromCore) -> FromCore:
    if isinstance(message, EngineDied):
        raise EngineDeadError(message.fault.message)
    return message


def _result_value(result: UtilityResult) -> Any:
    if result.fault is not None:
        raise error_from_code(result.fault.code, result.fault.message)
    return result.value


def _death(process: EngineCoreProcess) -> str:
    # The socket can close a moment before the process can be waited for.
    deadline = time.monotonic() + 0.5
    while process.exit_code is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return (
        f"the engine core (pid {process.pid}) is gone: {process.describe_exit()}. Its log above "
        "says why; start the engine again"
    )
