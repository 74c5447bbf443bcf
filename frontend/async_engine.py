"""`AsyncEngine`: the asyncio front end of one engine core. One per API-server process."""

import asyncio
import logging
import os
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, Literal

from headrace.configs.config import EngineConfig
from headrace.configs.engine_args import AsyncEngineArgs, EngineArgs, UsageContext
from headrace.configs.errors import (
    EngineDeadError,
    EngineNotReadyError,
    HeadraceError,
    RequestAbortedError,
)
from headrace.configs.sampling_params import RequestOutputKind, SamplingParams
from headrace.engine_core.client import AsyncClient
from headrace.engine_core.messages import EngineStats
from headrace.engine_core.supervisor import SupervisorLink, SupervisorThread
from headrace.frontend.admission import RenderedPrompt
from headrace.frontend.engine_attributes import EngineAttributes
from headrace.frontend.front_end import FrontEnd
from headrace.frontend.output_stream import OutputStream
from headrace.frontend.outputs import RequestOutput
from headrace.frontend.start_engine import resolve, start_async
from headrace.frontend.startup_report import StartupReport
from headrace.frontend.stat_loggers import StatLoggers
from headrace.frontend.stats import StatLoggerBase

logger = logging.getLogger(__name__)

EngineState = Literal["starting", "ready", "draining", "dead"]
LOOP_TIMEOUT_S = 1.0  # for an event loop in another thread to do what it was asked


class AsyncEngine(EngineAttributes):
    """Starts its engine core at construction; `start()` waits until it is ready.

    A request's `request_id` is the caller's label: requests that run at once may share it.
    """

    def __init__(
        self,
        args: EngineArgs | EngineConfig | None,
        report: StartupReport | None = None,
        supervisor: SupervisorLink | None = None,
        *,
        usage_context: UsageContext = UsageContext.API_SERVER,
        stat_loggers: dict[str, StatLoggerBase] | None = None,
        log_requests: bool | None = None,
        allows_callables: bool = False,
    ) -> None:
        """`supervisor`: the engine core's, if it was started already, as `report` may have been.

        `args` None: the supervisor has the configuration. `stat_loggers` replace the default ones.
        `log_requests` None: as the arguments say. `allows_callables`: for `collective_rpc`; never
        in a server.
        """
        self.state: EngineState = "starting"
        self.report = report or StartupReport(time.time())
        self._args = args
        self._usage_context = usage_context
        self._given_loggers = stat_loggers
        self._log_requests = log_requests
        self._allows_callables = allows_callables
        # Its engine core imports torch while we go on.
        self._supervisor = supervisor or SupervisorThread()
        self._finalizer = weakref.finalize(self, self._supervisor.close)
        self._client: AsyncClient | None = None
        self._streams: dict[str, OutputStream] = {}
        self._receiver: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self._died = asyncio.Event()

    async def start(self) -> None:
        """Resolve the model, load the tokenizer beside the engine core, wait until both are ready.

        Raises the HeadraceError that says why it cannot start; everything started is ended then.
        """
        try:
            await self.load()
            self.receive()
            self.front_end.log_stats()  # so that gauges are right before the first step
        except BaseException:
            await self.stop()
            raise

    async def load(self) -> None:
        """The part of `start()` that comes before messages are received."""
        if self._error is not None:
            raise self._error
        self._client = client = AsyncClient(self._supervisor)
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, client.close_blocking)
        client.attach()
        if self._args is None:
            self.config = await client.wait_config()
        else:
            self.config = await self._resolved(self._args)
            client.send_config(self.config, self._allows_callables)
        renderer = await start_async(self.config, self._supervisor.started, client, self.report)
        self.front_end = FrontEnd(
            self.config,
            self._client.ready,
            renderer,
            StatLoggers.of(self.config, self._given_loggers),
            self._logs_requests(),
            self._client.num_blocks,
        )
        self.state = "ready"

    async def _resolved(self, args: EngineArgs | EngineConfig) -> EngineConfig:
        if isinstance(args, EngineConfig):
            return args
        return await asyncio.to_thread(resolve, args, self._usage_context, None, self.report)

    def _logs_requests(self) -> bool:
        if self._log_requests is not None:
            return self._log_requests
        return isinstance(self._args, AsyncEngineArgs) and self._args.logs_requests

    def receive(self) -> "asyncio.Task[None]":
        """Take the engine core's messages on the running event loop, from now on."""
        assert self._client is not None, "load() comes first"
        self._stop_receiving()
        self._client.attach()
        self._receiver = asyncio.create_task(self._receive(), name="engine-receiver")
        return self._receiver

    async def generate(
        self,
        prompt: RenderedPrompt,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request, shaped by `params.output_kind`; `request_id` is only a label.

        Raises InvalidRequestError at admission, RequestFailedError or EngineDeadError later.
        Closing the iterator early, or cancelling its consumer, aborts the request. A `priority` is
        ignored where the scheduling policy does not know it. `data_parallel_rank`: of the replica
        that is to run it, whatever others do.
        """
        stream = self.submit(
            prompt, params, request_id, priority=priority, data_parallel_rank=data_parallel_rank
        )
        async with aclosing(self.follow(stream)) as outputs:
            async for output in outputs:
                yield output

    def submit(
        self,
        prompt: RenderedPrompt,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> OutputStream:
        """Send a request; its outputs are in the stream, whether somebody reads them or not."""
        client = self._require_ready()
        self.front_end.check_rank(data_parallel_rank)
        request = self.front_end.admit(
            prompt, params, request_id, priority=priority, ignores_unused_priority=True
        )
        stream = OutputStream(
            request.request_id, merges_deltas=params.output_kind is RequestOutputKind.DELTA
        )
        self._streams[request.request_id] = stream
        try:
            client.add_request(request, data_parallel_rank)
        except BaseException:
            self._release(request.request_id)
            raise
        return stream

    async def follow(self, stream: OutputStream) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a stream; when its consumer leaves early, the request is aborted."""
        finished = False
        try:
            while not finished:
                item = await stream.get()
                finished = item.finished
                yield item
        finally:
            self.release(stream)

    def release(self, stream: OutputStream) -> None:
        """Nobody reads a stream any more: its request is aborted if it still runs."""
        self._release(stream.request_id)

    def abort(self, request_id: str) -> int:
        """Abort every request of that label; their streams raise RequestAbortedError.

        What they hold is free before the next step. Returns how many there were.
        """
        ids = self.front_end.ids_of(request_id)
        for internal in ids:
            stream = self._streams.get(internal)
            self._release(internal)
            if stream is not None:
                stream.fail(RequestAbortedError(f"request {request_id!r} was aborted"))
        return len(ids)

    def _release(self, request_id: str) -> None:
        """Forget a request, and stop it if it still runs."""
        self._streams.pop(request_id, None)
        if not self.front_end.drop(request_id) or self._client is None:
            return
        try:
            self._client.abort(request_id)
        except EngineDeadError as error:  # then it does not run
            logger.debug("request %s was not aborted: %s", request_id, error)

    def _require_ready(self) -> AsyncClient:
        if self._error is not None:
            raise self._error
        if self.state != "ready" or self._client is None:
            raise EngineNotReadyError(f"the engine is {self.state}; try again in a moment")
        return self._client

    async def _receive(self) -> None:
        client = self._client
        assert client is not None
        try:
            while True:
                message = await client.get_outputs()
                for request_id, result in self.front_end.process(message).items():
                    for index in result.aborts:
                        client.abort(request_id, index)
                    stream = self._streams.get(request_id)
                    if stream is None:
                        continue
                    if result.output is not None:
                        stream.put(result.output)
                    if result.failure is not None:
                        stream.fail(result.failure)
                    if result.failure is not None or (result.output and result.output.finished):
                        del self._streams[request_id]
        except HeadraceError as error:
            self.die(error)
        except Exception as error:  # without this task nobody would get an answer
            logger.exception("the front end's receiver failed")
            self.die(EngineDeadError(f"the front end failed: {type(error).__name__}"))

    def die(self, error: Exception) -> None:
        """End every request, and all later ones, with `error`. The first error is the one kept."""
        self.state = "dead"
        self._error = self._error or error
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()
        if self._client is not None:
            self._client.fail_calls(error)
        if hasattr(self, "front_end"):
            self.front_end.drop_all()
        self._died.set()

    @property
    def error(self) -> Exception | None:
        """Why the engine is dead."""
        return self._error

    async def wait_dead(self) -> HeadraceError:
        """Return when the engine core has died, with the reason. Call it after `start()`."""
        await self._died.wait()
        if isinstance(self._error, HeadraceError):
            return self._error
        return EngineDeadError(f"the engine failed: {self._error}")

    def progress(self) -> dict[str, float | int]:
        """Last step, seconds since it (0 when idle), running and waiting choices."""
        if self.state == "ready":
            return self.front_end.progress()
        return {"step": 0, "age_s": 0.0, "running": 0, "waiting": 0}

    def stats(self) -> EngineStats | None:
        """Statistics of the last step; None before the engine is ready."""
        return self.front_end.stats if hasattr(self, "front_end") else None

    @property
    def num_requests(self) -> int:
        """Requests this front end follows."""
        return len(self.front_end) if self.state == "ready" else 0

    async def call(self, method: str, kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run a utility of every engine core (`EngineCore.UTILITIES`)."""
        return await self._require_ready().call(method, kwargs=kwargs)

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Run a method on every worker between two steps; see `LLMEngine.collective_rpc`."""
        return await self._require_ready().call_workers(method, args, kwargs, timeout)

    @property
    def is_up(self) -> bool:
        """Whether an engine core is there now; while there is none, requests wait."""
        return self.state == "ready" and self._client is not None and self._client.is_up

    def check_health(self) -> None:
        """Raise the error that ended the engine; one that is being restarted is healthy."""
        self._require_ready().check_alive()

    def rest(self) -> None:
        """Receive nothing until `receive()` is called again; requests go on in the engine core."""
        self._where_it_receives(self._stop_receiving)

    def abandon(self) -> None:
        """`stop()` for a caller without an event loop, from any thread."""

        def end() -> None:
            self.die(EngineDeadError("the engine has been closed; make a new one"))
            self._stop_receiving()
            self._end_rendering()

        self._where_it_receives(end)
        self._finalizer()

    def _where_it_receives(self, work: Callable[[], None]) -> None:
        """Run `work` here, or in the thread of the event loop that the streams belong to."""
        loop = None if self._receiver is None else self._receiver.get_loop()
        if loop is None or not loop.is_running() or loop is asyncio._get_running_loop():
            work()
            return
        done = threading.Event()

        def run() -> None:
            try:
                work()
            finally:
                done.set()

        with suppress(RuntimeError):  # it was closed just now
            loop.call_soon_threadsafe(run)
            if done.wait(LOOP_TIMEOUT_S):
                return
        work()  # the loop is stuck, or gone

    def _stop_receiving(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None and not receiver.get_loop().is_closed():
            receiver.cancel()
        if self._client is not None:
            self._client.detach()

    def _end_rendering(self) -> None:
        """Let the renderer's threads go; at the very end, since it drops what waits for them."""
        if hasattr(self, "front_end"):
            self.front_end.renderer.shutdown()

    async def stop(self) -> None:
        """Fail what runs, end the engine core and everything that belongs to it. Idempotent.

        Not while `start()` runs: cancel that, and it stops the engine itself.
        """
        if self.state != "dead":
            self.die(EngineDeadError(f"the server (pid {os.getpid()}) is shutting down"))
        receiver = self._receiver
        self._stop_receiving()
        if receiver is not None:
            await asyncio.gather(receiver, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
        else:
            self._supervisor.close()
        self._finalizer.detach()
        self._end_rendering()
