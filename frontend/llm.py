"""`LLM`: offline batch inference in a script."""

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn

from headrace.configs.beam_search_params import BeamSearchParams
from headrace.configs.engine_args import DEFAULT_MODEL, EngineArgs, UsageContext
from headrace.configs.sampling_params import RequestOutputKind, SamplingParams
from headrace.frontend.admission import RenderedPrompt
from headrace.frontend.beam_search import BeamSearchOutput, TokenScores, beam_search
from headrace.frontend.llm_engine import LLMEngine
from headrace.frontend.metrics_reader import Metric, read_metrics
from headrace.frontend.outputs import RequestOutput
from headrace.frontend.progress_bars import ProcessedBar, ProgressBar, adding, token_steps
from headrace.frontend.prompt_arguments import conversation_list, legacy_prompts, prompt_list
from headrace.frontend.render_params import ChatParams, ContentFormat
from headrace.frontend.sampling_defaults import applied_defaults, default_max_tokens
from headrace.frontend.tokenizers import Tokenizer
from headrace.frontend.unsupported import (
    LORA,
    POOLING,
    PROMPT_ADAPTERS,
    refuse,
    refuse_given,
)

logger = logging.getLogger(__name__)

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model ready to answer batches. Keyword arguments are those of `EngineArgs`.

    The engine core runs in a child process (HEADRACE_MULTIPROCESSING=0: in this one), which ends
    with the object, with the script, or with `close()`. Statistics are kept for `get_metrics`;
    there is no periodic line in the log unless `disable_log_stats=False` asks for it.
    """

    DEPRECATE_LEGACY: ClassVar[bool] = True

    def __init__(self, model: str = DEFAULT_MODEL, **engine_args: Any) -> None:
        """TypeError for an unknown argument, else the HeadraceError that says what is wrong."""
        if engine_args.get("hf_overrides", {}) is None:
            del engine_args["hf_overrides"]
        with_line = "disable_log_stats" in engine_args
        self.llm_engine = LLMEngine.from_engine_args(
            EngineArgs(model=model, **engine_args), UsageContext.LLM_CLASS
        )
        if not with_line:
            self.llm_engine.stat_loggers.pop("logging", None)
        self.engine_class = type(self.llm_engine)
        self.request_counter = itertools.count()
        self.default_sampling_params: dict[str, Any] | None = None

    @classmethod
    @contextmanager
    def deprecate_legacy_api(cls) -> Iterator[None]:
        """Warn of the legacy argument `prompt_token_ids` inside the `with` block."""
        before, cls.DEPRECATE_LEGACY = cls.DEPRECATE_LEGACY, True
        try:
            yield
        finally:
            cls.DEPRECATE_LEGACY = before

    def close(self) -> None:
        """End the engine core. Idempotent; also happens when the object or the script ends."""
        self.llm_engine.close()

    def get_tokenizer(self, lora_request: Any = None) -> Tokenizer:
        """The tokenizer; ValueError with skip_tokenizer_init."""
        return self.llm_engine.get_tokenizer(lora_request)

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Replace the tokenizer by another of ours, or a fast one of transformers.

        ValueError with skip_tokenizer_init.
        """
        self.llm_engine.set_tokenizer(tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """A fresh `SamplingParams` with the defaults of the model's generation config."""
        if self.default_sampling_params is None:
            defaults = self.llm_engine.model_config.default_sampling_params
            self.default_sampling_params = applied_defaults(defaults)
            limit = default_max_tokens(defaults)
            if limit is not None:
                self.default_sampling_params["max_tokens"] = limit
        return SamplingParams.from_optional(**self.default_sampling_params)

    def generate(
        self,
        prompts: Any = None,
        sampling_params: Params = None,
        prompt_token_ids: Any = None,
        use_tqdm: ProgressBar = True,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        guided_options_request: Any = None,
        priority: list[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt (str, list of ids, or prompt dict); one output per prompt, in order.

        `prompt_token_ids` is the deprecated form for ids. `sampling_params` are shared or one per
        prompt, and are never modified. Raises ValueError or TypeError before anything runs if an
        argument is wrong, RequestFailedError or EngineDeadError if the engine fails; nothing of the
        call runs on then.
        """
        if prompt_token_ids is not None:
            items = legacy_prompts(prompts, prompt_token_ids, warns=self.DEPRECATE_LEGACY)
        elif prompts is None:
            raise ValueError("give prompts")
        else:
            items = prompt_list(prompts)
        refuse_given(
            guided_options_request=(guided_options_request, "structured output"),
            lora_request=(lora_request, LORA),
            prompt_adapter_request=(prompt_adapter_request, PROMPT_ADAPTERS),
        )
        params = self._params_per_prompt(sampling_params, len(items))
        priorities = self._priorities(priority, len(items))
        return self._run(self._render(items, params), params, use_tqdm, priorities)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: Params = None,
        use_tqdm: ProgressBar = True,
        lora_request: Any = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of message dicts) or several (a list of such lists).

        `chat_template_kwargs` go before the arguments of the same name, and are variables of the
        template else. `tools` are given to the template only: outputs are not parsed. The rest is
        as in `generate`.
        """
        conversations = conversation_list(messages)
        refuse_given(
            lora_request=(lora_request, LORA),
            mm_processor_kwargs=(mm_processor_kwargs, "media in messages"),
        )
        chat_params = ChatParams(
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
        ).overridden_by(chat_template_kwargs)
        if chat_params.continue_final_message and chat_params.add_generation_prompt:
            raise ValueError(
                "continue_final_message=True needs add_generation_prompt=False: either the last "
                "message goes on or a new one begins"
            )
        params = self._params_per_prompt(sampling_params, len(conversations))
        prompts = self._render_chats(conversations, chat_params, params)
        return self._run(prompts, params, use_tqdm, [0] * len(prompts))

    def beam_search(
        self,
        prompts: Sequence[Any],
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """The best continuations of each prompt by beam search; `frontend/beam_search.py` has it.

        2 * `beam_width` log-probabilities are asked for, so max_logprobs must allow that many.
        """
        refuse_given(lora_request=(lora_request, LORA))
        if use_tqdm:
            logger.warning("the bar of a beam search shows the most steps; it may end earlier")
        engine, config = self.llm_engine, self.llm_engine.model_config
        items = prompt_list(prompts)
        rendered = engine.renderer.render_cmpl(items) if items else []
        step = SamplingParams(
            logprobs=2 * params.beam_width, max_tokens=1, temperature=params.temperature
        )

        def score(tokens: list[list[int]]) -> list[TokenScores | None]:
            beams = [RenderedPrompt(None, ids) for ids in tokens]
            outputs = self._run(beams, [step] * len(beams), False, [0] * len(beams))
            scores = [output.outputs[0].logprobs for output in outputs]
            return [entries[0] if entries else None for entries in scores]

        ends = {config.eos_token_id, *config.extra_eos_token_ids}
        found = beam_search(
            [prompt.token_ids for prompt in rendered],
            params,
            score=score,
            eos_token_ids=frozenset(token for token in ends if token is not None),
            max_prompt_tokens=engine.max_prompt_tokens,
            steps=token_steps(params.max_tokens, use_tqdm),
        )
        tokenizer = engine.get_tokenizer()
        for output in found:
            for beam in output.sequences:
                beam.text = tokenizer.decode(beam.tokens, skip_special_tokens=False)
        return found

    def encode(self, *arguments: Any, **options: Any) -> NoReturn:
        refuse(POOLING)

    def embed(self, *arguments: Any, **options: Any) -> NoReturn:
        refuse(POOLING)

    def classify(self, *arguments: Any, **options: Any) -> NoReturn:
        refuse(POOLING)

    def score(self, *arguments: Any, **options: Any) -> NoReturn:
        refuse(POOLING)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Run a method on every worker between two steps; see `LLMEngine.collective_rpc`."""
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """`func(model)` inside each worker; one result per worker."""
        return self.collective_rpc("apply_model", args=(func,))

    def start_profile(self) -> None:
        """Begin a torch profile; ConfigurationError without a directory for traces."""
        self.llm_engine.start_profile()

    def stop_profile(self) -> None:
        """End the profile; the trace is in the configured directory then."""
        self.llm_engine.stop_profile()

    def reset_prefix_cache(self, device: Any = None) -> bool:
        """Forget every cached prefix; always possible, so True."""
        return self.llm_engine.reset_prefix_cache(device)

    def sleep(self, level: int = 1) -> None:
        """Forget cached prefixes and give memory back; see `LLMEngine.sleep`."""
        self.llm_engine.reset_prefix_cache()
        self.llm_engine.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Bring memory back; see `LLMEngine.wake_up`."""
        self.llm_engine.wake_up(tags)

    def reload_weights(self) -> None:
        """Read the weights again from their files, as after `sleep(2)`."""
        self.llm_engine.reload_weights()

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any] | None = None) -> None:
        """Meet a trainer; see `LLMEngine.init_weight_transfer_engine`."""
        self.llm_engine.init_weight_transfer_engine(init_info)

    def shutdown_weight_transfer_engine(self) -> None:
        """Leave the trainer."""
        self.llm_engine.shutdown_weight_transfer_engine()

    def start_weight_update(self) -> None:
        """Begin to take new weights; those that serve go on."""
        self.llm_engine.start_weight_update()

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        """Take new weights; see `LLMEngine.update_weights`."""
        self.llm_engine.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> str:
        """Have the new weights serve; returns their version."""
        return self.llm_engine.finish_weight_update(weight_version)

    def rollback_weight_update(self) -> None:
        """Drop the new weights; the old ones serve as before."""
        self.llm_engine.rollback_weight_update()

    def get_metrics(self) -> list[Metric]:
        """A snapshot of the engine's metrics, those under `headrace:` of a server's `/metrics`.

        RuntimeError with `disable_log_stats=True`, which keeps no statistics.
        """
        prometheus = self.llm_engine.stat_loggers.get("prometheus")
        if prometheus is None:
            raise RuntimeError("there are no statistics: leave disable_log_stats=True out")
        self.llm_engine.do_log_stats()  # what was aborted since the last step
        return read_metrics(prometheus.registry)  # type: ignore[attr-defined]

    def _params_per_prompt(self, params: Params, num_prompts: int) -> list[SamplingParams]:
        """Copies that ask for the final output only, one per prompt (shared where they were)."""
        if params is None:
            params = self.get_default_sampling_params()
        given = list(params) if isinstance(params, Sequence) else [params] * num_prompts
        if len(given) != num_prompts:
            raise ValueError(f"{len(given)} sampling parameters for {num_prompts} prompts")
        copies: dict[int, SamplingParams] = {}
        for item in given:
            if not isinstance(item, SamplingParams):
                raise ValueError(
                    f"sampling_params must be SamplingParams, got {type(item).__name__}"
                )
            if id(item) not in copies:
                copies[id(item)] = item.clone()
                copies[id(item)].output_kind = RequestOutputKind.FINAL_ONLY
        return [copies[id(item)] for item in given]

    def _priorities(self, priority: list[int] | None, num_prompts: int) -> list[int]:
        if not priority:
            return [0] * num_prompts
        if len(priority) != num_prompts:
            raise ValueError(f"priority has {len(priority)} entries for {num_prompts} prompts")
        for value in priority:
            self.llm_engine.front_end.check_priority(value)
        return priority

    def _render(self, prompts: list[Any], params: list[SamplingParams]) -> list[RenderedPrompt]:
        engine = self.llm_engine
        if len({item.truncate_prompt_tokens for item in params}) == 1:
            return engine.renderer.render_cmpl(prompts, engine.front_end.tok_params(params[0]))
        return [
            engine.renderer.render_cmpl([prompt], engine.front_end.tok_params(item))[0]
            for prompt, item in zip(prompts, params, strict=True)
        ]

    def _render_chats(
        self, conversations: list[Any], chat_params: ChatParams, params: list[SamplingParams]
    ) -> list[RenderedPrompt]:
        engine = self.llm_engine
        prompts: list[RenderedPrompt] = []
        for conversation, item in zip(conversations, params, strict=True):
            tok_params = engine.front_end.tok_params(item, is_chat=True)
            prompts += engine.renderer.render_chat([conversation], chat_params, tok_params)[1]
        return prompts

    def _run(
        self,
        prompts: list[RenderedPrompt],
        params: list[SamplingParams],
        use_tqdm: ProgressBar,
        priorities: list[int],
    ) -> list[RequestOutput]:
        self.llm_engine.check_serving()
        for warning in dict.fromkeys(text for prompt in prompts for text in prompt.warnings):
            logger.warning("%s", warning)
        labels: list[str] = []
        try:
            for i, prompt in enumerate(adding(prompts, use_tqdm)):
                labels.append(str(next(self.request_counter)))
                self.llm_engine.add_rendered(labels[i], prompt, params[i], priorities[i])
            outputs = self._collect(labels, sum(item.num_returned for item in params), use_tqdm)
        except BaseException:  # also Ctrl-C: what this call has queued must not run on
            with contextlib.suppress(Exception):  # the first error is the one to show
                self.llm_engine.abort_request(labels)
            raise
        return list(self.engine_class.validate_outputs(outputs, RequestOutput))

    def _collect(
        self, labels: list[str], num_sequences: int, use_tqdm: ProgressBar
    ) -> list[RequestOutput]:
        """Outputs in the order of `labels`; those of requests that others added are left out."""
        results: dict[str, RequestOutput] = {}
        open_labels = set(labels)
        with contextlib.closing(ProcessedBar(num_sequences, use_tqdm)) as bar:
            while open_labels and self.llm_engine.has_unfinished_requests():
                for output in self.llm_engine.step():
                    if output.finished and output.request_id in open_labels:
                        open_labels.discard(output.request_id)
                        results[output.request_id] = output
                        bar.advance(output)
        return [results[label] for label in labels if label in results]
