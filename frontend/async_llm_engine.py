"""`AsyncLLMEngine`: the asyncio engine of the Python API, over `AsyncEngine`.

The step loop runs in the engine core's process. What is called the background loop here is the task
that receives its outputs: without it, requests that were sent go on, and their outputs wait.
"""

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, NoReturn

from headrace.configs.config import (
    DecodingConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from headrace.configs.engine_args import AsyncEngineArgs, EngineArgs, UsageContext
from headrace.configs.errors import EngineDeadError, RequestAbortedError
from headrace.configs.sampling_params import SamplingParams
from headrace.engine_core.supervisor import SupervisorThread
from headrace.frontend.async_engine import AsyncEngine
from headrace.frontend.async_maintenance_calls import AsyncMaintenanceCalls
from headrace.frontend.engine_attributes import EngineAttributes
from headrace.frontend.inputs import PromptType
from headrace.frontend.llm_engine import LLMEngine
from headrace.frontend.outputs import RequestOutput
from headrace.frontend.renderer import Renderer
from headrace.frontend.start_engine import resolve, spawn_process
from headrace.frontend.startup_report import StartupReport
from headrace.frontend.stats import StatLoggerBase
from headrace.frontend.tokenizers import Tokenizer
from headrace.frontend.unsupported import (
    LORA,
    POOLING,
    PROMPT_ADAPTERS,
    TRACING,
    refuse,
    refuse_given,
)


class AsyncEngineDeadError(EngineDeadError):
    """The background loop does not run, or the engine is dead."""

    code = "async_engine_dead"


class AsyncLLMEngine(EngineAttributes, AsyncMaintenanceCalls):
    """Construction loads the model and blocks until it can be used, from any thread.

    The background loop starts with the first request, on its event loop. When the object goes, the
    engine core and all that belongs to it end.
    """

    def __init__(
        self,
        vllm_config: EngineConfig,
        executor_class: None = None,
        log_stats: bool = True,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: dict[str, StatLoggerBase] | None = None,
        *,
        log_requests: bool = True,
        start_engine_loop: bool = True,
        supervisor: SupervisorThread | None = None,
        report: StartupReport | None = None,
    ) -> None:
        """As `LLMEngine`; `log_requests`: a line in the log when a request comes and ends.

        Without `start_engine_loop` the loop starts only with `start_background_loop()`.
        """
        refuse_given(executor_class=(executor_class, "choice of an executor class"))
        self.config = replace(vllm_config, log_stats=log_stats)
        self.log_requests = log_requests
        self.start_engine_loop = start_engine_loop
        self.engine = AsyncEngine(
            self.config,
            report,
            supervisor or spawn_process(self.config.parallel_config.data_parallel_backend != "ray"),
            stat_loggers=stat_loggers,
            log_requests=log_requests,
            allows_callables=True,
        )
        self._finalizer = weakref.finalize(self, self.engine.abandon)
        self._task: asyncio.Task[None] | None = None
        self.background_loop: asyncio.Future[None] | None = None
        try:
            _load_in_thread(self.engine)
        except BaseException:
            self._finalizer()
            raise
        self.front_end = self.engine.front_end

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: dict[str, StatLoggerBase] | None = None,
    ) -> "AsyncLLMEngine":
        """Resolve the arguments while the engine core's process starts, then wait for it."""
        report = StartupReport(time.time())
        supervisor = spawn_process(engine_args.data_parallel_backend != "ray")
        config = resolve(engine_args, usage_context, supervisor, report)
        return cls(
            config,
            log_stats=not engine_args.disable_log_stats,
            stat_loggers=stat_loggers,
            log_requests=isinstance(engine_args, AsyncEngineArgs) and engine_args.logs_requests,
            start_engine_loop=start_engine_loop,
            supervisor=supervisor,
            report=report,
        )

    @classmethod
    def from_config(
        cls,
        vllm_config: EngineConfig,
        start_engine_loop: bool = True,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: dict[str, StatLoggerBase] | None = None,
        disable_log_requests: bool = False,
        disable_log_stats: bool = False,
    ) -> "AsyncLLMEngine":
        """An engine for a resolved configuration."""
        return cls(
            vllm_config,
            log_stats=not disable_log_stats,
            usage_context=usage_context,
            stat_loggers=stat_loggers,
            log_requests=not disable_log_requests,
            start_engine_loop=start_engine_loop,
        )

    from_vllm_config = from_config

    def close(self) -> None:
        """End the engine core and everything that belongs to it. Idempotent."""
        self._finalizer()

    @property
    def is_running(self) -> bool:
        """Whether the background loop runs."""
        return self.background_loop is not None and self._task is not None and not self._task.done()

    @property
    def is_stopped(self) -> bool:
        """Whether an error was recorded or the background loop has ended by itself."""
        return self.errored or (
            self.background_loop is not None and self._task is not None and self._task.done()
        )

    @property
    def errored(self) -> bool:
        return self.engine.error is not None

    @property
    def dead_error(self) -> AsyncEngineDeadError:
        """A new error that says that the loop does not run."""
        return AsyncEngineDeadError(
            "the background loop is not running; the first error above, or the cause of this one, "
            "says why"
        )

    def set_errored(self, exc: Exception) -> None:
        """Record an error and deliver it to every open stream."""
        self.engine.die(exc)

    def start_background_loop(self) -> None:
        """Receive outputs on the running event loop.

        RuntimeError if the loop runs already, AsyncEngineDeadError if the engine has failed.
        """
        if self.errored:
            raise self.dead_error from self.engine.error
        if self.is_running:
            raise RuntimeError("the background loop is running already")
        self._task = self.engine.receive()
        self.background_loop = asyncio.shield(self._task)

    def shutdown_background_loop(self) -> None:
        """Stop receiving; `start_background_loop()` goes on. Idempotent."""
        self.engine.rest()
        self._task = self.background_loop = None

    async def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        prompt_adapter_request: Any = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Send a request and return the generator of its outputs.

        A dead engine, a priority without that policy, a replica that there is not, and an id that
        is in use are errors at once; what is wrong with the request itself is raised by the
        generator. `data_parallel_rank`: of the replica that is to run it, whatever others do.
        """
        self._require_running()
        self.front_end.check_priority(priority)
        if data_parallel_rank is not None and self.parallel_config.data_parallel_size == 1:
            raise ValueError(
                f"data_parallel_rank {data_parallel_rank} needs data parallelism, there is none"
            )
        self.front_end.check_rank(data_parallel_rank)
        self.front_end.check_unused(request_id)
        refuse_given(
            lora_request=(lora_request, LORA),
            trace_headers=(trace_headers, TRACING),
            prompt_adapter_request=(prompt_adapter_request, PROMPT_ADAPTERS),
        )
        try:
            tok_params = self.front_end.tok_params(params)
            (rendered,) = await self.renderer.render_cmpl_async([prompt], tok_params)
            if arrival_time is not None:
                rendered = replace(rendered, arrival_time=arrival_time)
            self.front_end.check_unused(request_id)  # once more: time has passed
            stream = self.engine.submit(
                rendered,
                params,
                request_id,
                priority=priority,
                data_parallel_rank=data_parallel_rank,
            )
        except (ValueError, TypeError) as error:
            return _raising(error)
        return self._outputs(self.engine.follow(stream))

    def _require_running(self) -> None:
        """Start the loop if that is wanted; AsyncEngineDeadError if it cannot run.

        RuntimeError if it runs on the event loop of another thread.
        """
        if self.errored:
            raise self.dead_error from self.engine.error
        loop = None if self._task is None else self._task.get_loop()
        if self.is_running and loop is not None and loop is not asyncio.get_running_loop():
            if loop.is_running():
                raise RuntimeError(
                    "the background loop runs on an event loop of another thread: use the engine "
                    "there, or call shutdown_background_loop() first"
                )
            self.shutdown_background_loop()  # that loop was left without being closed
        if not self.is_running:
            if not self.start_engine_loop:
                raise self.dead_error
            self.start_background_loop()

    async def _outputs(
        self, outputs: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[RequestOutput, None]:
        """`self` is referred to as long as somebody reads."""
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    yield LLMEngine.validate_output(output, RequestOutput)
        except RequestAbortedError as error:
            raise asyncio.CancelledError(str(error)) from error

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        lora_request: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        prompt_adapter_request: Any = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request until it is finished.

        A cancelled consumer, or one that closes the generator, aborts the request. Raises what
        `add_request` raises, and asyncio.CancelledError when the request is aborted by its id.
        """
        outputs = await self.add_request(
            request_id,
            prompt,
            sampling_params,
            lora_request=lora_request,
            trace_headers=trace_headers,
            prompt_adapter_request=prompt_adapter_request,
            priority=priority,
            data_parallel_rank=data_parallel_rank,
        )
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def encode(self, *arguments: Any, **options: Any) -> NoReturn:
        refuse(POOLING)

    async def abort(self, request_id: str) -> None:
        """Abort a request: its stream raises CancelledError. Unknown and finished ids: nothing.

        AsyncEngineDeadError when the loop does not run.
        """
        if not self.is_running:
            raise self.dead_error
        self.engine.abort(request_id)

    async def check_health(self) -> None:
        """AsyncEngineDeadError if the engine has stopped; one that never started is healthy."""
        if self.is_stopped:
            raise self.dead_error from self.engine.error
        self.engine.check_health()

    async def get_tokenizer(self, lora_request: Any = None) -> Tokenizer:
        """The tokenizer; ValueError with skip_tokenizer_init."""
        refuse_given(lora_request=(lora_request, LORA))
        return self.renderer.get_tokenizer()

    async def get_input_preprocessor(self) -> Renderer:
        """What makes token ids of prompts."""
        return self.renderer

    async def get_config(self) -> EngineConfig:
        return self.config

    get_vllm_config = get_config

    async def get_model_config(self) -> ModelConfig:
        return self.model_config

    async def get_parallel_config(self) -> ParallelConfig:
        return self.parallel_config

    async def get_decoding_config(self) -> DecodingConfig:
        return self.decoding_config

    async def get_scheduler_config(self) -> SchedulerConfig:
        return self.scheduler_config

    async def get_lora_config(self) -> None:
        return self.lora_config

    async def do_log_stats(self, scheduler_outputs: Any = None, model_output: Any = None) -> None:
        """Hand a record of now to every logger; the arguments are not looked at."""
        self.front_end.log_stats()

    async def is_tracing_enabled(self) -> bool:
        return False

    async def add_lora(self, lora_request: Any) -> None:
        refuse(LORA)

    async def reset_mm_cache(self) -> None:
        """Nothing to do: a model for text has no media cache."""

    async def reset_prefix_cache(self, device: Any = None) -> None:
        """Forget every cached prefix; see `LLMEngine.reset_prefix_cache`."""
        refuse_given(device=(device, "caches of several devices"))
        self._require_running()
        await self.engine.call("reset_prefix_cache")

    async def start_profile(self) -> None:
        """Begin a torch profile; ConfigurationError without a directory for traces."""
        await self.collective_rpc("start_profile")

    async def stop_profile(self) -> None:
        """End the profile; the trace is in the configured directory then."""
        await self.collective_rpc("stop_profile")

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Run a method on every worker between two steps; see `LLMEngine.collective_rpc`."""
        self._require_running()
        return await self.engine.collective_rpc(method, timeout, args, kwargs)


def _load_in_thread(engine: AsyncEngine) -> None:
    """`engine.load()` on an event loop in a thread, since the caller may be on one of its own."""
    running: list[asyncio.Task[None]] = []
    failures: list[BaseException] = []

    async def load() -> None:
        running.append(asyncio.ensure_future(engine.load()))
        await running[0]
        engine.rest()

    def run() -> None:
        try:
            asyncio.run(load())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="engine-start", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:  # Ctrl-C; the thread ends before anything of the engine is taken away
        with suppress(RuntimeError):  # its event loop has been closed meanwhile
            for task in running:
                task.get_loop().call_soon_threadsafe(task.cancel)
        thread.join()
        raise
    if failures:
        raise failures[0]


async def _raising(error: Exception) -> AsyncGenerator[RequestOutput, None]:
    """The stream of a request that was refused."""
    raise error
    yield  # makes this a generator
