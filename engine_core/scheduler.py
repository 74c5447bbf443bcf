"""The scheduler: which choices get how many tokens in the next step, and what the results mean.

There are no phases. Every choice has `num_computed_tokens` and `num_tokens`; a step hands out a
token budget to the difference, to running choices first, then to waiting ones. A step may be handed
out before the results of earlier ones have arrived: `num_computed_tokens` then advances at once and
the sampled token counts as pending. Steps are executed in the order in which they are handed out,
so blocks can be given away as soon as their holder ends.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headrace.configs.config import EngineConfig
from headrace.configs.errors import InvalidRequestError, NonFiniteLogitsError
from headrace.engine_core.admission import AdmissionLimits
from headrace.engine_core.block_hash import root_hash
from headrace.engine_core.forks import Forks
from headrace.engine_core.kv_cache_manager import KVCacheManager
from headrace.engine_core.messages import EngineCoreOutput, EngineCoreRequest, EngineStats
from headrace.engine_core.request import Choice, FinishReason, Request, Status, WaitsFor
from headrace.engine_core.request_queue import make_rank
from headrace.engine_core.step_planner import StepPlanner
from headrace.workers.protocol import (
    BlockCopy,
    CachedRequestData,
    ChoiceId,
    KVCacheSpec,
    ModelRunnerOutput,
    NewRequestData,
    RequestFault,
    SampledTokens,
    SchedulerOutput,
    TokenLogprobs,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _InFlight:
    """What a handed-out step does to one choice."""

    choice: Choice
    num_computed_tokens: int  # after the step
    samples: bool


class Scheduler:
    """Owns all requests and, through the KV-cache manager, all blocks.

    One thread calls it. Every choice ends exactly once, in `_end`, and every request with its last
    choice.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv_cache_spec: KVCacheSpec,
        num_blocks: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`num_blocks` includes the null block. `clock` gives wall-clock seconds."""
        self._config = config.scheduler_config
        self._clock = clock
        self._kv = KVCacheManager(
            kv_cache_spec,
            num_blocks,
            enable_prefix_caching=config.cache_config.enable_prefix_caching,
            max_step_tokens=self._config.max_num_batched_tokens,
        )
        self._limits = AdmissionLimits(
            vocab_size=config.model_config.vocab_size,
            max_model_len=config.model_config.max_model_len,
            max_pool_tokens=self._kv.max_request_tokens(),
            num_blocks=self._kv.num_usable_blocks,
            block_size=kv_cache_spec.block_size,
        )
        model = config.model_config
        self._model_identity = repr((model.path, model.dtype, model.weight_version))
        self._forks = Forks(self._kv)
        self._planner = StepPlanner(self._config, self._kv, self._forks)
        self._requests: dict[str, Request] = {}
        self._in_flight: dict[int, list[_InFlight]] = {}  # step number -> its choices
        self._finished: list[ChoiceId] = []  # the worker has to forget these
        self._copies: list[BlockCopy] = []  # for the next step handed out
        self._num_requests_seen = 0
        self._num_choices = 0
        self._step = 0  # the last one handed out
        self._num_accounting_errors = 0
        self._num_corrupted = 0

    # -- requests in and out ------------------------------------------------------------------

    @property
    def max_request_tokens(self) -> int:
        """Prompt plus output tokens that the pool can hold for one choice."""
        return self._limits.max_pool_tokens

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request.

        Raises InvalidRequestError, and keeps nothing, if it is malformed or can never fit.
        """
        self._limits.check(request)
        if request.request_id in self._requests:
            raise InvalidRequestError(
                f"request {request.request_id} is running already; ids must be unique", "request_id"
            )
        params = request.sampling_params
        admitted = Request(
            request_id=request.request_id,
            num_prompt_tokens=len(request.prompt_token_ids),
            sampling_params=params,
            eos_token_id=request.eos_token_id,
            stop_token_ids=frozenset(params.stop_token_ids or ()),
            priority=request.priority,
            hash_root=root_hash(
                model_identity=self._model_identity,
                weight_version=request.weight_version,
                cache_salt=request.cache_salt,
            ),
            reads_prefix_cache=params.prompt_logprobs is None,
        )
        choices = self._make_choices(request, admitted)
        self._requests[request.request_id] = admitted
        admitted.choices.update((choice.id.index, choice) for choice in choices)
        self._num_choices += len(choices)
        if any(choice.num_output_tokens for choice in choices):  # a replay: nothing to share
            for choice in choices:
                self._planner.enqueue(choice)
        else:
            self._forks.wait(choices[0], choices[1:])
            self._planner.enqueue(choices[0])

    def _make_choices(self, request: EngineCoreRequest, admitted: Request) -> list[Choice]:
        self._num_requests_seen += 1
        num_prompt = admitted.num_prompt_tokens
        max_total = self._limits.max_request_tokens
        if admitted.sampling_params.max_tokens is not None:
            max_total = min(max_total, num_prompt + admitted.sampling_params.max_tokens)
        return [
            Choice(
                id=ChoiceId(request.request_id, state.index),
                request=admitted,
                rank=make_rank(
                    self._config.policy,
                    priority=request.priority,
                    arrival_time=min(request.arrival_time, self._clock()),
                    ageing_s=self._config.ageing_s,
                    number=self._num_requests_seen,
                    index=state.index,
                ),
                # The n choices share the prompt's list until each of them runs.
                token_ids=request.prompt_token_ids + state.output_token_ids
                if state.output_token_ids
                else request.prompt_token_ids,
                max_total_tokens=max_total,
            )
            for state in request.choices
        ]

    def abort(self, request_id: str, index: int | None = None) -> list[EngineCoreOutput]:
        """End a request, or one choice of it, with reason "abort"; its blocks are free at once.

        Unknown ids are ignored: the request may just have finished.
        """
        request = self._requests.get(request_id)
        if request is None:
            return []
        live = list(reversed(request.choices.values()))  # fork children before their parent
        return [
            self._finish(choice, [], "abort")
            for choice in live
            if index is None or choice.id.index == index
        ]

    def has_unfinished_requests(self) -> bool:
        """Whether any choice has not ended."""
        return bool(self._requests)

    def has_work(self) -> bool:
        """Whether `schedule` may have something to hand out, now or later."""
        return bool(self._requests or self._finished)

    def stats(self) -> EngineStats:
        """The state now; a fresh object."""
        num_running = self._planner.num_running
        return EngineStats(
            step=self._step,
            num_running=num_running,
            num_waiting=self._num_choices - num_running,
            num_free_blocks=self._kv.num_free_blocks,
            num_blocks=self._kv.num_usable_blocks,
            num_requests=len(self._requests),
            num_preemptions=self._planner.num_preemptions,
            prefix_cache_queries=self._planner.prefix_cache_queries,
            prefix_cache_hits=self._planner.prefix_cache_hits,
            accounting_errors=self._num_accounting_errors,
            num_corrupted=self._num_corrupted,
        )

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix.

        Choices in progress keep their blocks and cache nothing from now on.

        Always possible, so always True.
        """
        self._kv.reset_prefix_cache(self._live_choices())
        return True

    def check_integrity(self, *, fatal: bool = False) -> list[str]:
        """Compare block accounting with the holders of blocks; describe, count and heal mismatches.

        `fatal`, for debugging, raises RuntimeError instead of returning them.
        """
        problems = self._kv.check(self._live_choices(), self._forks.pending_copies())
        self._num_accounting_errors += len(problems)
        if problems and fatal:
            raise RuntimeError("; ".join(problems))
        return problems

    def _live_choices(self) -> Iterator[Choice]:
        return (
            choice for request in self._requests.values() for choice in request.choices.values()
        )

    # -- making a step ------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """Make the next step; None if nothing can be done before more requests or results arrive.

        A step without tokens is handed out when there are only finished ids to deliver.
        """
        self._copies += self._forks.take_copies()
        plan = self._planner.plan()
        if not plan.counts and not self._finished:
            return None
        return self._hand_out(plan.counts)

    def _hand_out(self, counts: dict[Choice, int]) -> SchedulerOutput:
        self._step += 1
        step = SchedulerOutput(
            step=self._step,
            new_requests=[],
            cached_requests=[],
            num_scheduled_tokens={choice.id: count for choice, count in counts.items()},
            finished=self._finished,
            block_copies=self._copies,
        )
        self._finished, self._copies = [], []
        records = []
        for choice, count in counts.items():
            self._describe(choice, step)
            choice.num_computed_tokens += count
            samples = choice.num_computed_tokens == len(choice.token_ids) + choice.num_pending
            records.append(_InFlight(choice, choice.num_computed_tokens, samples))
            choice.num_in_flight += 1
            if samples:
                choice.num_pending += 1
                if choice.request.fork_children:
                    for child in self._forks.fork_children(choice):
                        self._planner.enqueue(child)
        if records:
            self._in_flight[step.step] = records
        step.blocks_to_zero = self._kv.take_blocks_to_zero()
        return step

    def _describe(self, choice: Choice, step: SchedulerOutput) -> None:
        """Tell the worker what it does not know of a choice, before the step advances it."""
        if choice.known_to_worker:
            resumed = choice.blocks is not None and choice.blocks.num_sent == 0
            step.cached_requests.append(
                CachedRequestData(
                    choice.id, self._kv.take_unsent(choice), choice.num_computed_tokens, resumed
                )
            )
            return
        choice.known_to_worker = True
        choice.token_ids = list(choice.token_ids)  # from here on it grows
        step.new_requests.append(
            NewRequestData(
                choice_id=choice.id,
                token_ids=list(choice.token_ids),
                num_prompt_tokens=choice.request.num_prompt_tokens,
                sampling_params=choice.request.sampling_params,
                block_ids=self._kv.take_unsent(choice),
                num_computed_tokens=choice.num_computed_tokens,
            )
        )

    # -- results ------------------------------------------------------------------------------

    def update_from_output(
        self, step: SchedulerOutput, output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Account for the result of a step; results come in the order of their steps.

        Whatever belongs to a choice that has ended meanwhile is dropped.
        """
        outputs = []
        if output.failed:
            self._distrust(step)
        for record in self._in_flight.pop(step.step, ()):
            choice = record.choice
            choice.num_in_flight -= 1
            if choice.status is Status.FINISHED:
                continue
            num_known = len(choice.token_ids)
            try:
                result = self._take_result(record, output)
            except Exception as error:  # the fence: one choice's fault ends that choice alone
                if choice.request.choices.get(choice.id.index) is not choice:
                    raise  # it broke while it ended: the books may be wrong
                logger.exception("the result of %s could not be accounted for", choice.id)
                del choice.token_ids[num_known:]  # the front end was not told of these
                message = f"internal error: {type(error).__name__}"
                result = self._fail(choice, RequestFault("request_failed", message))
            if result is not None:
                outputs.append(result)
        return outputs

    def _take_result(self, record: _InFlight, output: ModelRunnerOutput) -> EngineCoreOutput | None:
        choice = record.choice
        fault = output.failed.get(choice.id)
        sampled = output.sampled.get(choice.id)
        num_sampled = len(sampled.token_ids) if sampled else 0
        if fault is None and num_sampled != record.samples:
            fault = RequestFault(
                "request_failed",
                f"the worker returned {num_sampled} tokens where {int(record.samples)} were due",
            )
        if fault is not None:
            return self._fail(choice, fault)
        self._kv.commit(choice, record.num_computed_tokens)  # nothing if it was preempted
        result = self._accept(choice, sampled) if sampled is not None and record.samples else None
        if choice.waits_for is WaitsFor.RESULTS and not choice.num_in_flight:
            self._resume(choice)
        return result

    def _accept(self, choice: Choice, sampled: SampledTokens) -> EngineCoreOutput:
        choice.num_pending -= 1
        choice.token_ids += sampled.token_ids
        stop = choice.check_stop()
        if stop is None:
            return self._output(choice, sampled.token_ids, sampled.logprobs)
        return self._finish(choice, sampled.token_ids, *stop, logprobs=sampled.logprobs)

    def _resume(self, choice: Choice) -> None:
        choice.waits_for = WaitsFor.NOTHING
        if choice.status is Status.WAITING:
            self._planner.enqueue(choice)

    def _distrust(self, step: SchedulerOutput) -> None:
        """Part of a step failed, perhaps all of it: give its other orders again.

        Waiting fork children, whose copies it may have held, start afresh.
        """
        self._kv.zero_again(step.blocks_to_zero)
        self._finished += step.finished
        self._forks.release_all()

    def _fail(self, choice: Choice, fault: RequestFault) -> EngineCoreOutput:
        self._forks.release_all(choice.request)
        self._num_corrupted += fault.code == NonFiniteLogitsError.code
        return self._finish(choice, [], "error", fault=fault)

    def _finish(
        self,
        choice: Choice,
        new_token_ids: list[int],
        reason: FinishReason,
        stop_reason: int | None = None,
        *,
        logprobs: list[TokenLogprobs] | None = None,
        fault: RequestFault | None = None,
    ) -> EngineCoreOutput:
        output = self._output(choice, new_token_ids, logprobs)
        output.finish_reason = reason
        output.stop_reason = stop_reason
        output.fault = fault
        self._end(choice, taint=fault is not None)
        return output

    def _output(
        self, choice: Choice, new_token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> EngineCoreOutput:
        return EngineCoreOutput(
            request_id=choice.id.request_id,
            index=choice.id.index,
            start=choice.num_output_tokens - len(new_token_ids),
            new_token_ids=new_token_ids,
            logprobs=logprobs,
            num_cached_tokens=choice.num_cached_tokens,
        )

    def _end(self, choice: Choice, *, taint: bool) -> None:
        """The one place where a choice ends: everything it has is given back."""
        self._planner.remove(choice)
        choice.status = Status.FINISHED
        request = choice.request
        for child in self._forks.end(choice):
            self._planner.enqueue(child)
        self._kv.free(choice, taint=taint)
        if choice.known_to_worker:
            self._finished.append(choice.id)
        del request.choices[choice.id.index]
        self._num_choices -= 1
        if not request.choices:
            del self._requests[request.request_id]
