"""`LLM`: offline batch inference in a script."""

import itertools
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from headrace.configs import environment
from headrace.configs.config import ModelConfig
from headrace.configs.engine_args import DEFAULT_MODEL, EngineArgs, UsageContext
from headrace.configs.sampling_params import RequestOutputKind, SamplingParams
from headrace.engine_core.client import InprocClient, SyncClient
from headrace.engine_core.supervisor import EngineCoreProcess
from headrace.frontend.admission import Admission, RenderedPrompt
from headrace.frontend.output_processor import OutputProcessor
from headrace.frontend.outputs import RequestOutput
from headrace.frontend.renderer import Renderer, prompt_of
from headrace.frontend.sampling_defaults import applied_defaults, default_max_tokens
from headrace.frontend.startup_report import StartupReport, log_model_facts, memory_table
from headrace.frontend.stats_line import StatsLine
from headrace.frontend.tokenizers import Tokenizer

logger = logging.getLogger(__name__)

ProgressBar = bool | Callable[..., Any]


class LLM:
    """A model ready to answer batches. Keyword arguments are those of `EngineArgs`.

    The engine core runs in a child process (HEADRACE_MULTIPROCESSING=0: in this one), which ends
    with the object, with the script, or with `close()`.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **engine_args: Any) -> None:
        environment.check_environ(os.environ)
        engine_args.setdefault("disable_log_stats", True)
        args = EngineArgs(model=model, **engine_args)
        self.report = StartupReport(time.time())
        self._client = self._start_engine(args)
        self._admission = Admission(self.model_config, self._client.ready)
        self._processor = OutputProcessor(self._renderer.tokenizer)
        self._stats_line = None if args.disable_log_stats else StatsLine()
        self.request_counter = itertools.count()
        log_model_facts(self.model_config, self._renderer.tokenizer)
        logger.info("%s", memory_table(self._client.ready.memory))
        logger.info("%s", self.report.table())

    def _start_engine(self, args: EngineArgs) -> SyncClient | InprocClient:
        def progress(phase: str) -> None:
            logger.debug("phase: %s", phase)

        spawned = time.time()
        inproc = environment.read(environment.MULTIPROCESSING, os.environ) == "0"
        client = None if inproc else SyncClient(EngineCoreProcess())
        if client is not None:
            self._finalizer = weakref.finalize(self, client.close)
        try:
            config = args.create_engine_config(UsageContext.LLM_CLASS)
            self.report.add_overlapped("resolve model", spawned)
            self.model_config: ModelConfig = config.model_config
            self._policy = config.scheduler_config.policy
            began = time.time()
            self._renderer = Renderer.from_config(config.model_config)
            self.report.add_overlapped("tokenizer", began)
            if client is None:
                inproc_client = InprocClient(config, progress)
                self._finalizer = weakref.finalize(self, inproc_client.close)
                self.report.finish(spawned, inproc_client.ready.phases, time.time())
                return inproc_client
            client.start(config, progress)
        except BaseException:
            if client is not None:
                client.close()
            raise
        self.report.finish(spawned, client.ready.phases, time.time())
        return client

    def close(self) -> None:
        """End the engine core. Idempotent; also happens when the object or the script ends."""
        self._finalizer()

    def get_tokenizer(self) -> Tokenizer:
        return self._renderer.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """A fresh `SamplingParams` with the defaults of the model's generation config."""
        defaults = self.model_config.default_sampling_params
        params = SamplingParams(**applied_defaults(defaults))
        params.max_tokens = default_max_tokens(defaults) or params.max_tokens
        return params

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: ProgressBar = True,
        priority: list[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt (str, list of ids, or prompt dict); one output per prompt, in order.

        Raises InvalidRequestError or ValueError before anything runs if a prompt or the lengths of
        the lists are wrong, RequestFailedError or EngineDeadError if the engine fails.
        """
        items = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        rendered = [self._renderer.completion(prompt_of(item)) for item in items]
        return self._run(rendered, sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: ProgressBar = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of message dicts) or several (a list of such lists)."""
        many = bool(messages) and not isinstance(messages[0], Mapping)
        conversations = messages if many or not messages else [messages]
        rendered = [
            self._renderer.chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
                chat_template=chat_template,
            )
            for conversation in conversations
        ]
        return self._run(rendered, sampling_params, use_tqdm, None)

    def _run(
        self,
        prompts: list[RenderedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: ProgressBar,
        priority: list[int] | None,
    ) -> list[RequestOutput]:
        params = self._params_per_prompt(sampling_params, len(prompts))
        if priority is not None and len(priority) != len(prompts):
            raise ValueError(f"priority has {len(priority)} entries for {len(prompts)} prompts")
        if any(priority or []) and self._policy != "priority":
            raise ValueError(
                f"priority {priority} needs scheduling_policy='priority', this engine has "
                f"{self._policy!r}"
            )
        for warning in dict.fromkeys(text for prompt in prompts for text in prompt.warnings):
            logger.warning("%s", warning)
        ids: list[str] = []
        numbers: dict[str, int] = {}
        try:
            for i, prompt in enumerate(_with_bar(prompts, use_tqdm)):
                request = self._admission.admit(
                    prompt.token_ids,
                    params[i],
                    arrival_time=time.time(),
                    priority=priority[i] if priority else 0,
                )
                numbers[request.request_id] = i
                ids.append(request.request_id)
                label = str(next(self.request_counter))
                self._processor.add(request, label, prompt.text, RequestOutputKind.FINAL_ONLY)
                self._client.add_request(request)
            return self._collect(numbers, sum(p.n for p in params), use_tqdm)
        except BaseException:  # also Ctrl-C: what this call has queued must not run on
            for request_id in ids:
                self._drop(request_id)
            raise

    def _params_per_prompt(
        self, params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * num_prompts
        if len(params) != num_prompts:
            raise ValueError(f"{len(params)} sampling parameters for {num_prompts} prompts")
        return list(params)

    def _collect(
        self, numbers: dict[str, int], num_choices: int, use_tqdm: ProgressBar
    ) -> list[RequestOutput]:
        results: dict[int, RequestOutput] = {}
        bar = _processed_bar(num_choices, use_tqdm)
        speed = _Speed(num_choices)
        while len(results) < len(numbers):
            message = self._client.get_outputs()
            if self._stats_line is not None:
                self._stats_line.update(message.stats, message.outputs)
            for request_id, result in self._processor.process(message.outputs).items():
                for index in result.aborts:
                    self._client.abort(request_id, index)
                if result.failure is not None:
                    raise result.failure
                if result.output is not None and request_id in numbers:
                    results[numbers[request_id]] = result.output
                    if bar is not None:
                        speed.advance(bar, result.output)
        if bar is not None:
            bar.close()
        return [results[i] for i in range(len(numbers))]

    def _drop(self, request_id: str) -> None:
        self._processor.drop(request_id)
        try:
            self._client.abort(request_id)
        except Exception as error:  # the first error is the one to show
            logger.debug("could not abort %s: %s", request_id, error)


class _Speed:
    """Progress over `total` choices, with estimated tokens/s."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._num_input = 0
        self._num_output = 0

    def advance(self, bar: Any, output: RequestOutput) -> None:
        n = len(output.outputs)
        self._num_input += len(output.prompt_token_ids or []) * n
        self._num_output += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed = max(1e-9, bar.format_dict["elapsed"])
        bar.postfix = (
            f"est. speed input: {self._num_input / elapsed:.2f} toks/s, "
            f"output: {self._num_output / elapsed:.2f} toks/s"
        )
        bar.update(n)
        if bar.n >= self._total:
            bar.refresh()


def _bar_factory(use_tqdm: ProgressBar) -> Callable[..., Any]:
    if callable(use_tqdm):
        return use_tqdm
    from tqdm.auto import tqdm

    return cast(Callable[..., Any], tqdm)


def _with_bar(prompts: list[RenderedPrompt], use_tqdm: ProgressBar) -> Iterable[RenderedPrompt]:
    if not use_tqdm:
        return prompts
    return cast(Iterable[RenderedPrompt], _bar_factory(use_tqdm)(prompts, desc="Adding requests"))


def _processed_bar(total: int, use_tqdm: ProgressBar) -> Any:
    if not use_tqdm:
        return None
    return _bar_factory(use_tqdm)(
        total=total,
        desc="Processed prompts",
        dynamic_ncols=True,
        postfix="est. speed input: 0.00 toks/s, output: 0.00 toks/s",
    )
