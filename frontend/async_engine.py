"""`AsyncEngine`: the asyncio front end of one engine core. One per API-server process."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

from headrace.configs.config import EngineConfig, ModelConfig
from headrace.configs.engine_args import EngineArgs, UsageContext
from headrace.configs.errors import EngineDeadError, EngineNotReadyError, HeadraceError
from headrace.configs.sampling_params import RequestOutputKind, SamplingParams
from headrace.engine_core.client import AsyncClient
from headrace.engine_core.messages import EngineStats
from headrace.engine_core.supervisor import EngineCoreProcess
from headrace.frontend.admission import Admission, RenderedPrompt
from headrace.frontend.output_processor import OutputProcessor
from headrace.frontend.outputs import RequestOutput
from headrace.frontend.renderer import Renderer
from headrace.frontend.startup_report import StartupReport, log_model_facts, memory_table
from headrace.frontend.stats_line import StatsLine
from headrace.frontend.tokenizers import Tokenizer

logger = logging.getLogger(__name__)

EngineState = Literal["starting", "ready", "draining", "dead"]


class _Stream:
    """Outputs of one request on their way to its consumer.

    A slow consumer gets them merged, not queued.
    """

    def __init__(self, merges_deltas: bool) -> None:
        self._merges_deltas = merges_deltas
        self._item: RequestOutput | None = None
        self._error: HeadraceError | None = None
        self._news = asyncio.Event()

    def put(self, item: RequestOutput) -> None:
        if self._item is None:
            self._item = item
        elif self._merges_deltas:
            self._item.add(item, aggregate=True)
        else:
            self._item = item
        self._news.set()

    def fail(self, error: HeadraceError) -> None:
        self._error = error
        self._news.set()

    async def get(self) -> RequestOutput:
        """The next output; an error is raised after the outputs that came before it."""
        await self._news.wait()
        if self._item is not None:
            item, self._item = self._item, None
            if self._error is None:
                self._news.clear()
            return item
        assert self._error is not None
        raise self._error


class AsyncEngine:
    """Starts its engine core at construction; `start()` waits until it is ready."""

    def __init__(
        self,
        args: EngineArgs,
        began: float | None = None,
        process: EngineCoreProcess | None = None,
    ) -> None:
        """`process`: the engine core, if it was started already; `began`: of the start-up clock."""
        self.state: EngineState = "starting"
        self.report = StartupReport(began or time.time())
        self.renderer: Renderer
        self.model_config: ModelConfig
        self.config: EngineConfig
        self._args = args
        self._process = process or EngineCoreProcess()  # imports torch while we go on
        self._client: AsyncClient | None = None
        self._admission: Admission
        self._processor: OutputProcessor
        self._streams: dict[str, _Stream] = {}
        self._receiver: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self._stats: EngineStats | None = None
        self._last_step_time = time.monotonic()
        self._stats_line = StatsLine()
        self._dead: asyncio.Future[HeadraceError] | None = None

    async def start(self) -> None:
        """Resolve the model, load the tokenizer beside the engine core, wait until both are ready.

        Raises the HeadraceError that says why it cannot start; everything started is ended then.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        self._dead = asyncio.get_running_loop().create_future()
        self._client = AsyncClient(self._process)
        began = time.time()
        make_config = self._args.create_engine_config
        self.config = await asyncio.to_thread(make_config, UsageContext.API_SERVER)
        self.report.add_overlapped("resolve model", began)
        self.model_config = self.config.model_config
        loading = asyncio.create_task(self._load_renderer())
        try:
            await self._client.start(self.config, lambda phase: logger.debug("phase: %s", phase))
            core_ready = time.time()
        except BaseException:
            loading.cancel()
            raise
        self.renderer = await loading
        ready = self._client.ready
        self._admission = Admission(self.model_config, ready)
        self._processor = OutputProcessor(self.renderer.tokenizer)
        self._stats = EngineStats(num_free_blocks=ready.num_blocks, num_blocks=ready.num_blocks)
        self._receiver = asyncio.create_task(self._receive())
        self.state = "ready"
        self.report.finish(self._process.started, ready.phases, core_ready)
        log_model_facts(self.model_config, self.tokenizer)
        logger.info("%s", memory_table(ready.memory))
        logger.info("%s", self.report.table())

    async def _load_renderer(self) -> Renderer:
        began = time.time()
        renderer = await asyncio.to_thread(Renderer.from_config, self.model_config)
        self.report.add_overlapped("tokenizer", began)
        return renderer

    @property
    def tokenizer(self) -> Tokenizer:
        return self.renderer.tokenizer

    async def generate(
        self,
        prompt: RenderedPrompt,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request, shaped by `params.output_kind`; `request_id` is only a label.

        Raises InvalidRequestError at admission, RequestFailedError or EngineDeadError later.
        Closing the iterator early, or cancelling its consumer, aborts the request.
        """
        client = self._require_ready()
        request = self._admission.admit(
            prompt.token_ids, params, arrival_time=time.time(), priority=priority,
            cache_salt=cache_salt,
        )  # fmt: skip
        stream = _Stream(merges_deltas=params.output_kind is RequestOutputKind.DELTA)
        self._streams[request.request_id] = stream
        self._processor.add(request, request_id, prompt.text, params.output_kind)
        if len(self._processor) == 1:
            self._last_step_time = time.monotonic()
        finished = False
        try:
            await client.add_request(request)
            while not finished:
                item = await stream.get()
                finished = item.finished
                yield item
        except HeadraceError:
            finished = True  # the engine core has ended it, or is gone
            raise
        finally:
            del self._streams[request.request_id]
            if not finished:
                self._processor.drop(request.request_id)
                self._in_background(self._abort(request.request_id, None))

    def _require_ready(self) -> AsyncClient:
        if self.state == "dead" and self._dead is not None and self._dead.done():
            raise self._dead.result()
        if self.state != "ready" or self._client is None:
            raise EngineNotReadyError(f"the engine is {self.state}; try again in a moment")
        return self._client

    async def _receive(self) -> None:
        assert self._client is not None
        try:
            while True:
                message = await self._client.get_outputs()
                self._stats = message.stats
                self._last_step_time = time.monotonic()
                results = self._processor.process(message.outputs)
                for request_id, result in results.items():
                    stream = self._streams.get(request_id)
                    if stream is not None and result.output is not None:
                        stream.put(result.output)
                    if stream is not None and result.failure is not None:
                        stream.fail(result.failure)
                    for index in result.aborts:
                        await self._client.abort(request_id, index)
                if self.config.log_stats:
                    self._stats_line.update(message.stats, message.outputs)
        except HeadraceError as error:
            self._die(error)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # without this task nobody would get an answer
            logger.exception("the front end's receiver failed")
            self._die(EngineDeadError(f"the front end failed: {type(error).__name__}"))

    def _die(self, error: HeadraceError) -> None:
        self.state = "dead"
        for stream in self._streams.values():
            stream.fail(error)
        if self._dead is not None and not self._dead.done():
            self._dead.set_result(error)

    async def wait_dead(self) -> HeadraceError:
        """Return when the engine core has died, with the reason. Call it after `start()`."""
        assert self._dead is not None
        return await asyncio.shield(self._dead)

    async def _abort(self, request_id: str, index: int | None) -> None:
        if self._client is not None:
            with contextlib.suppress(EngineDeadError):
                await self._client.abort(request_id, index)

    def _in_background(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def progress(self) -> dict[str, float | int]:
        """Last step, seconds since it (0 when idle), running and waiting choices."""
        stats = self._stats or EngineStats()
        busy = self.state == "ready" and len(self._processor) > 0
        age = time.monotonic() - self._last_step_time if busy else 0.0
        return {
            "step": stats.step,
            "age_s": round(age, 3),
            "running": stats.num_running,
            "waiting": stats.num_waiting,
        }

    def stats(self) -> EngineStats | None:
        """Statistics of the last step; None before the engine is ready."""
        return self._stats

    @property
    def num_requests(self) -> int:
        """Requests this front end follows."""
        return len(self._processor) if self.state == "ready" else 0

    async def call(self, method: str) -> Any:
        """Run a utility of the engine core (`EngineCore.UTILITIES`)."""
        return await self._require_ready().call(method)

    async def stop(self) -> None:
        """Fail what runs, end the engine core and everything that belongs to it. Idempotent."""
        if self.state != "dead":
            self._die(EngineDeadError(f"the server (pid {os.getpid()}) is shutting down"))
        if self._receiver is not None:
            self._receiver.cancel()
            await asyncio.gather(self._receiver, return_exceptions=True)
            self._receiver = None
        for task in list(self._background):
            task.cancel()
        if self._client is not None:
            await self._client.close()
        else:
            self._process.kill()
