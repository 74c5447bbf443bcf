"""`LLMEngine`: the blocking engine. Requests are added, `step()` gives their outputs."""

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from headrace.configs.config import (
    DecodingConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from headrace.configs.engine_args import EngineArgs, UsageContext
from headrace.configs.errors import EngineDeadError, HeadraceError
from headrace.configs.sampling_params import SamplingParams
from headrace.engine_core.client import InprocClient
from headrace.engine_core.messages import EngineCoreOutputs
from headrace.engine_core.supervisor import SupervisorThread
from headrace.frontend.admission import RenderedPrompt
from headrace.frontend.engine_attributes import EngineAttributes
from headrace.frontend.front_end import FrontEnd
from headrace.frontend.inputs import PromptType
from headrace.frontend.maintenance_calls import MaintenanceCalls
from headrace.frontend.outputs import RequestOutput
from headrace.frontend.renderer import Renderer
from headrace.frontend.start_engine import resolve, spawn, start_blocking
from headrace.frontend.startup_report import StartupReport
from headrace.frontend.stat_loggers import StatLoggers
from headrace.frontend.stats import StatLoggerBase
from headrace.frontend.tokenizers import Tokenizer
from headrace.frontend.unsupported import (
    LORA,
    PROMPT_ADAPTERS,
    TRACING,
    UnsupportedMethods,
    refuse_given,
)

logger = logging.getLogger(__name__)

Output = TypeVar("Output")


class LLMEngine(EngineAttributes, MaintenanceCalls, UnsupportedMethods):
    """An engine core and the front end for it, driven by one thread.

    The step loop runs in the engine core (a child process; HEADRACE_MULTIPROCESSING=0: this one):
    a request begins to run when it is added, and `step()` waits for the outputs of one step.
    """

    DO_VALIDATE_OUTPUT: ClassVar[bool] = False
    use_cached_outputs: ClassVar[bool] = False

    def __init__(
        self,
        vllm_config: EngineConfig,
        executor_class: None = None,
        log_stats: bool = True,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: dict[str, StatLoggerBase] | None = None,
        mm_registry: None = None,
        use_cached_outputs: bool = False,
        *,
        supervisor: SupervisorThread | None = None,
        report: StartupReport | None = None,
    ) -> None:
        """Start the engine core (or take that of `supervisor`) and wait until it is ready.

        `stat_loggers` replace the default ones. `usage_context` is taken for compatibility: no
        usage data is ever sent. Raises the HeadraceError that says why it cannot start.
        """
        refuse_given(
            executor_class=(executor_class, "choice of an executor class"),
            mm_registry=(mm_registry, "media in prompts"),
            use_cached_outputs=(use_cached_outputs or None, "output objects that change later"),
        )
        self.config = replace(vllm_config, log_stats=log_stats)
        self.report = report or StartupReport(time.time())
        loggers = StatLoggers.of(self.config, stat_loggers)
        if supervisor is None:
            parallel = self.config.parallel_config
            supervisor = spawn(
                parallel.data_parallel_backend != "ray", parallel.distributed_executor_backend
            )
        renderer, self._client = start_blocking(self.config, supervisor, self.report)
        self._finalizer = weakref.finalize(self, self._client.close)
        num_blocks = None if isinstance(self._client, InprocClient) else self._client.num_blocks
        self.front_end = FrontEnd(
            self.config, self._client.ready, renderer, loggers, num_blocks=num_blocks
        )
        self._outputs: list[RequestOutput] = []
        self._failures: deque[tuple[str, HeadraceError]] = deque()  # with the request's label

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: dict[str, StatLoggerBase] | None = None,
    ) -> "LLMEngine":
        """Resolve the arguments while the engine core's process starts, then wait for it."""
        report = StartupReport(time.time())
        supervisor = spawn(
            engine_args.data_parallel_backend != "ray", engine_args.distributed_executor_backend
        )
        config = resolve(engine_args, usage_context, supervisor, report)
        return cls(
            config,
            log_stats=not engine_args.disable_log_stats,
            stat_loggers=stat_loggers,
            supervisor=supervisor,
            report=report,
        )

    @classmethod
    def from_config(
        cls,
        vllm_config: EngineConfig,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        stat_loggers: dict[str, StatLoggerBase] | None = None,
        disable_log_stats: bool = False,
    ) -> "LLMEngine":
        """An engine for a resolved configuration."""
        return cls(vllm_config, None, not disable_log_stats, usage_context, stat_loggers)

    from_vllm_config = from_config

    def close(self) -> None:
        """End the engine core. Idempotent; also happens when the object or the script ends."""
        self._finalizer()

    @property
    def input_preprocessor(self) -> Renderer:
        """The renderer, under the name that vLLM's users know."""
        return self.renderer

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that leaves room for an output token."""
        return self.front_end.max_prompt_tokens

    def get_tokenizer(self, lora_request: Any = None) -> Tokenizer:
        """The tokenizer; ValueError with skip_tokenizer_init."""
        refuse_given(lora_request=(lora_request, LORA))
        return self.renderer.get_tokenizer()

    def get_tokenizer_group(self) -> Tokenizer:
        """The tokenizer: without adapters, the group is this one."""
        return self.get_tokenizer()

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Use another tokenizer from now on; see `FrontEnd.set_tokenizer`."""
        self.front_end.set_tokenizer(tokenizer)

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        prompt_adapter_request: Any = None,
        priority: int = 0,
    ) -> None:
        """Queue a request. TypeError for an id that is no str, else ValueError if it is refused.

        `params` may be changed or used again afterwards. `arrival_time`: seconds since the epoch.
        """
        self.front_end.check_unused(request_id)
        refuse_given(
            lora_request=(lora_request, LORA),
            trace_headers=(trace_headers, TRACING),
            prompt_adapter_request=(prompt_adapter_request, PROMPT_ADAPTERS),
        )
        self.front_end.check_priority(priority)
        tok_params = self.front_end.tok_params(params, tokenization_kwargs)
        (rendered,) = self.renderer.render_cmpl([prompt], tok_params)
        if arrival_time is not None:
            rendered = replace(rendered, arrival_time=arrival_time)
        self.add_rendered(request_id, rendered, params, priority)

    def add_rendered(
        self, request_id: str, prompt: RenderedPrompt, params: SamplingParams, priority: int = 0
    ) -> None:
        """`add_request` for a prompt that the renderer has made."""
        self.front_end.check_unused(request_id)
        request = self.front_end.admit(prompt, params, request_id, priority=priority)
        try:
            self._client.add_request(request)
        except BaseException:
            self.front_end.drop(request.request_id)
            raise

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Stop requests; unknown and finished ids are ignored.

        Their outputs and errors do not come any more; everything they hold is free before the next
        step.
        """
        labels = {request_id} if isinstance(request_id, str) else set(request_id)
        self._outputs = [output for output in self._outputs if output.request_id not in labels]
        self._failures = deque(item for item in self._failures if item[0] not in labels)
        ids = [internal for label in labels for internal in self.front_end.ids_of(label)]
        for internal in ids:
            self.front_end.drop(internal)
        for internal in ids:
            self._client.abort(internal)

    def step(self) -> list[RequestOutput]:
        """Wait for one step and return the outputs that are new; [] when nothing is unfinished.

        A request that fails is over, and its error is raised; outputs of others come with the next
        call. An engine core that dies is replaced, and requests go on; EngineDeadError when no
        other one will come: all requests are lost. EngineNotReadyError while the engine is paused
        or asleep and nothing is left to give.
        """
        if not self._outputs and not self._failures and len(self.front_end):
            if not self._client.has_outputs:
                self.check_serving()
            self._take(self._next_message())
        if self._failures:
            raise self._failures.popleft()[1]
        outputs, self._outputs = self._outputs, []
        return outputs

    def _next_message(self) -> EngineCoreOutputs:
        try:
            return self._client.get_outputs()
        except EngineDeadError:
            self.front_end.drop_all()
            raise

    def _take(self, message: EngineCoreOutputs) -> None:
        for request_id, result in self.front_end.process(message).items():
            for index in result.aborts:
                self._client.abort(request_id, index)
            if result.output is not None:
                self._outputs.append(result.output)
            if result.failure is not None:
                self._failures.append((result.label, result.failure))

    def get_num_unfinished_requests(self) -> int:
        """Requests that have not ended."""
        return len(self.front_end)

    def has_unfinished_requests(self) -> bool:
        """Whether `step()` has more to give."""
        return bool(self._outputs or self._failures or len(self.front_end))

    def has_unfinished_requests_for_virtual_engine(self, virtual_engine: int) -> bool:
        """`has_unfinished_requests()` of one scheduler; there is one, number 0."""
        if virtual_engine != 0:
            raise ValueError(f"there is no scheduler {virtual_engine}, only 0")
        return self.has_unfinished_requests()

    def stop_remote_worker_execution_loop(self) -> None:
        """Nothing to do: between two steps, workers wait for whatever comes."""

    @classmethod
    def validate_output(cls, output: Any, output_type: type[Output]) -> Output:
        """`output`; TypeError if validation is enabled and it is of another type."""
        if cls.DO_VALIDATE_OUTPUT and not isinstance(output, output_type):
            raise TypeError(f"expected {output_type.__name__}, found {type(output).__name__}")
        return output

    @classmethod
    def validate_outputs(
        cls, outputs: Sequence[Any], output_type: type[Output]
    ) -> Sequence[Output]:
        """`outputs` unchanged, or a checked new list if validation is enabled."""
        if not cls.DO_VALIDATE_OUTPUT:
            return outputs
        return [cls.validate_output(output, output_type) for output in outputs]

    @classmethod
    @contextmanager
    def enable_output_validation(cls) -> Iterator[None]:
        """Validate outputs inside the `with` block."""
        cls.DO_VALIDATE_OUTPUT = True
        try:
            yield
        finally:
            cls.DO_VALIDATE_OUTPUT = False

    def get_config(self) -> EngineConfig:
        return self.config

    get_vllm_config = get_config

    def get_model_config(self) -> ModelConfig:
        return self.model_config

    def get_parallel_config(self) -> ParallelConfig:
        return self.parallel_config

    def get_decoding_config(self) -> DecodingConfig:
        return self.decoding_config

    def get_scheduler_config(self) -> SchedulerConfig:
        return self.scheduler_config

    def get_lora_config(self) -> None:
        return self.lora_config

    def do_log_stats(
        self,
        scheduler_outputs: Any = None,
        model_output: Any = None,
        finished_before: Any = None,
        skip: Any = None,
    ) -> None:
        """Hand a record of now to every logger. The arguments, vLLM's own, are not looked at."""
        self.front_end.log_stats()

    def reset_prefix_cache(self, device: Any = None) -> bool:
        """Forget every cached prefix; always possible, so True.

        Running requests keep the blocks they hold, and no later request finds those.
        """
        refuse_given(device=(device, "caches of several devices"))
        return bool(self._client.call("reset_prefix_cache"))

    def reset_mm_cache(self) -> bool:
        """True: a model for text has no media cache that could hold anything."""
        return True

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine core is gone for good."""
        self._client.check_alive()

    def is_tracing_enabled(self) -> bool:
        """Whether requests are traced; never yet."""
        return False

    def start_profile(self) -> None:
        """Begin a torch profile; ConfigurationError without a directory for traces."""
        self.collective_rpc("start_profile")

    def stop_profile(self) -> None:
        """End the profile; the trace is in the configured directory then."""
        self.collective_rpc("stop_profile")

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Run a worker's method, or a callable that gets the worker first, on every worker.

        It runs between two steps; one result per worker, and of several replicas those of each one
        after the other, in order of rank. An exception there is raised here.
        TimeoutError after `timeout` seconds; the call itself, and the engine, go on then.
        """
        return self._client.call_workers(method, args, kwargs, timeout)
