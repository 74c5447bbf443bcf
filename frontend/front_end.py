"""What every engine of the front end shares, blocking or asyncio: a request's way in and out.

Admission, the caller's names for requests, output processing, statistics, and the log's lines about
requests. It talks to no engine core: its owner sends what it makes and brings what arrives.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace.configs.config import EngineConfig
from headrace.configs.errors import InvalidRequestError
from headrace.configs.sampling_params import SamplingParams
from headrace.engine_core.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineStats,
    Ready,
)
from headrace.frontend.admission import Admission, RenderedPrompt
from headrace.frontend.output_processor import OutputProcessor, Processed
from headrace.frontend.render_params import TokenizeParams
from headrace.frontend.renderer import Renderer
from headrace.frontend.stat_loggers import StatLoggers
from headrace.frontend.tokenizers import Tokenizer
from headrace.frontend.tokenizers.tokenizer import TokenizerFacts

logger = logging.getLogger(__name__)

_SUMMED = tuple(name for name in EngineStats.__struct_fields__ if name != "routed")
_DERIVED = ("output_text_buffer_length",)  # parameters that others determine


class FrontEnd:
    """All requests of one engine core's client. A request's label is the caller's name for it."""

    def __init__(
        self,
        config: EngineConfig,
        ready: Ready,
        renderer: Renderer,
        stat_loggers: StatLoggers,
        log_requests: bool = False,
        num_blocks: Mapping[int, int] | None = None,
    ) -> None:
        """`num_blocks`: of each replica, by rank; None: those of `ready`, of the only one."""
        self.config = config
        self.stat_loggers = stat_loggers
        self.log_requests = log_requests
        if num_blocks is None:
            num_blocks = {config.parallel_config.data_parallel_start_rank: ready.num_blocks}
        self._replicas = {
            rank: EngineStats(num_free_blocks=count, num_blocks=count)
            for rank, count in num_blocks.items()
        }
        self.stats = total_stats(list(self._replicas.values()))
        # Longest prompt that leaves room for one output token, in the window and in the KV cache.
        self.max_prompt_tokens = (
            min(config.model_config.max_model_len, ready.max_request_tokens) - 1
        )
        self.renderer = renderer
        self._processor = OutputProcessor(renderer.tokenizer)
        self._admission = Admission(
            config.model_config, ready, renderer.tokenizer, config.scheduler_config.policy
        )
        self._labels: dict[str, str] = {}  # live request -> its label
        self._ids: dict[str, set[str]] = {}  # label -> live requests
        self._last_step_time = time.monotonic()

    def __len__(self) -> int:
        return len(self._labels)

    def tok_params(
        self,
        params: SamplingParams,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        *,
        is_chat: bool = False,
    ) -> TokenizeParams:
        """How to tokenize the prompt of a request: cut if its parameters ask for that."""
        renderer = self.renderer
        chosen = renderer.default_chat_tok_params if is_chat else renderer.default_cmpl_tok_params
        if tokenization_kwargs:
            chosen = chosen.with_kwargs(tokenization_kwargs)
        size = getattr(params, "truncate_prompt_tokens", None)
        return chosen if size is None else replace(chosen, truncate_prompt_tokens=size)

    def check_priority(self, priority: int) -> None:
        """ValueError for a priority that this engine's queue does not know."""
        policy = self.config.scheduler_config.policy
        if priority != 0 and policy != "priority":
            raise ValueError(
                f"priority {priority} needs scheduling_policy='priority', this engine has "
                f"{policy!r}"
            )

    def check_rank(self, rank: int | None) -> None:
        """InvalidRequestError for a replica that is not one of this engine's."""
        ranks = self.config.parallel_config.ranks
        if rank is not None and rank not in ranks:
            raise InvalidRequestError(
                f"data_parallel_rank {rank} is out of range [{ranks.start}, {ranks.stop})",
                "data_parallel_rank",
            )

    def check_unused(self, label: str) -> None:
        """The Python API's rule: TypeError for what is no str, ValueError for one in flight."""
        if not isinstance(label, str):
            raise TypeError(f"request_id must be a str, got {type(label).__name__}")
        if label in self._ids:
            raise ValueError(
                f"request id {label!r} is in use; give another one or wait for its end"
            )

    def ids_of(self, label: str) -> list[str]:
        """The (internal) ids of the requests in flight that the caller calls `label`."""
        return sorted(self._ids.get(label, ()))

    def admit(
        self,
        prompt: RenderedPrompt,
        params: SamplingParams,
        label: str,
        *,
        priority: int = 0,
        ignores_unused_priority: bool = False,
    ) -> EngineCoreRequest:
        """Check a request and follow it from now on; raises InvalidRequestError.

        `params` is not modified.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"sampling parameters must be SamplingParams, got {type(params).__name__}"
            )
        request = self._admission.admit(
            prompt.token_ids,
            params,
            arrival_time=prompt.arrival_time or time.time(),
            priority=priority,
            cache_salt=prompt.cache_salt,
            ignores_unused_priority=ignores_unused_priority,
        )
        self._processor.add(request, label, prompt.text, params.output_kind)
        if not self._labels:
            self._last_step_time = time.monotonic()
        self._labels[request.request_id] = label
        self._ids.setdefault(label, set()).add(request.request_id)
        if self.log_requests:
            logger.info(
                "added request %s (%s): %d prompt tokens, %s",
                request.request_id, label, len(request.prompt_token_ids),
                describe(request.sampling_params),
            )  # fmt: skip
        return request

    def drop(self, request_id: str) -> bool:
        """Forget a request, which counts as aborted; False if it has ended already."""
        self._processor.drop(request_id)
        return self._forget(request_id, "aborted")

    def process(self, message: EngineCoreOutputs) -> dict[str, Processed]:
        """Take what one step produced; results by (internal) request id."""
        self._replicas[message.rank] = message.stats
        self.stats = total_stats(list(self._replicas.values()))
        self._last_step_time = time.monotonic()
        step = self._processor.process(message)
        self.stat_loggers.record(message.stats, step.iteration, message.rank)
        for request_id, result in step.results.items():
            if result.failure is not None:
                self._forget(request_id, f"failed ({result.failure.code})")
            elif result.output is not None and result.output.finished:
                self._forget(request_id, "finished")
        return step.results

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Use another tokenizer for all later requests.

        One of ours, or one of transformers that is built on the `tokenizers` library. ValueError
        if the engine runs without a tokenizer, RuntimeError while requests are in flight.
        """
        self.renderer.get_tokenizer()
        if self._labels:
            raise RuntimeError(f"the tokenizer cannot change under {len(self)} requests in flight")
        ours = adopted(tokenizer)
        self.renderer.shutdown()
        self.renderer = Renderer(self.config.model_config, ours)
        self._processor.tokenizer = self._admission.tokenizer = ours

    def log_stats(self) -> None:
        """Hand out a record of now for each replica, outside of any step."""
        for rank, stats in sorted(self._replicas.items()):
            step = self._processor.process(EngineCoreOutputs([], stats, time.time()))
            self.stat_loggers.record(stats, step.iteration, rank)

    def drop_all(self) -> None:
        """Forget every request: the engine core that ran them is gone."""
        for request_id in list(self._labels):
            self._processor.drop(request_id)
            self._forget(request_id, "lost")

    def progress(self) -> dict[str, float | int]:
        """Last step, seconds since it (0 when idle), running and waiting choices."""
        age = time.monotonic() - self._last_step_time if self._labels else 0.0
        return {
            "step": self.stats.step,
            "age_s": round(age, 3),
            "running": self.stats.num_running,
            "waiting": self.stats.num_waiting,
        }

    def _forget(self, request_id: str, how: str) -> bool:
        label = self._labels.pop(request_id, None)
        if label is None:
            return False
        ids = self._ids[label]
        ids.discard(request_id)
        if not ids:
            del self._ids[label]
        if self.log_requests:
            logger.info("%s request %s (%s)", how, request_id, label)
        return True


def total_stats(replicas: Sequence[EngineStats]) -> EngineStats:
    """The statistics of all replicas together; those of the only one are given back as they are."""
    if len(replicas) == 1:
        return replicas[0]
    total = EngineStats()
    for stats in replicas:
        for name in _SUMMED:
            setattr(total, name, getattr(total, name) + getattr(stats, name))
    return total


def describe(params: SamplingParams) -> str:
    """The numbers among a request's parameters; of texts and lists only how many there are."""
    shown, defaults = [], SamplingParams()
    for name in params.__struct_fields__:
        value = getattr(params, name)
        if name.startswith("_") or name in _DERIVED or value == getattr(defaults, name):
            continue
        if isinstance(value, bool | int | float):
            shown.append(f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}")
        elif isinstance(value, list | dict | str):
            shown.append(f"{name}: {len(value)}")
    return ", ".join(shown) or "default parameters"


def adopted(tokenizer: Any) -> Tokenizer:
    """A tokenizer of ours: as it is, or made from a fast tokenizer of transformers.

    TypeError for anything else.
    """
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise TypeError(
            f"a {type(tokenizer).__name__} cannot be the tokenizer: it must be one of headrace's, "
            "or a fast tokenizer of transformers"
        )
    facts = TokenizerFacts(
        source=type(tokenizer).__name__,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        chat_template=tokenizer.chat_template,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Tokenizer(type(backend).from_str(backend.to_str()), facts)
