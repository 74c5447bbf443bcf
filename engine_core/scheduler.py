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

import msgspec

from headrace.configs.config import EngineConfig
from headrace.configs.errors import InvalidRequestError, NonFiniteLogitsError
from headrace.engine_core.admission import Admission
from headrace.engine_core.core_state import PauseMode
from headrace.engine_core.forks import Forks
from headrace.engine_core.kv_cache_manager import KVCacheManager
from headrace.engine_core.messages import EngineCoreOutput, EngineCoreRequest, EngineStats
from headrace.engine_core.output_lengths import OutputLengths
from headrace.engine_core.request import Choice, FinishReason, Request, Status, WaitsFor
from headrace.engine_core.step_orders import StepOrders
from headrace.engine_core.step_planner import StepPlan, StepPlanner
from headrace.workers.protocol import (
    KVCacheSpec,
    ModelRunnerOutput,
    RequestFault,
    SampledTokens,
    SchedulerOutput,
    TokenLogprobs,
)

logger = logging.getLogger(__name__)

_NOTHING = StepPlan(budget=0, contended=False, prefill_share=0)


class _InFlight(msgspec.Struct, gc=False):
    """What a handed-out step does to one choice."""

    choice: Choice
    num_computed_tokens: int  # after the step
    num_prompt_tokens: int  # of the prompt, computed by the step
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
        self._kv = KVCacheManager(
            kv_cache_spec,
            num_blocks,
            enable_prefix_caching=config.cache_config.enable_prefix_caching,
            max_step_tokens=config.scheduler_config.max_num_batched_tokens,
        )
        self._admission = Admission(config, self._kv, clock)
        self._forks = Forks(self._kv)
        self._orders = StepOrders(self._kv, self._forks, clock)
        self._planner = StepPlanner(
            config.scheduler_config,
            self._kv,
            self._forks,
            config.parallel_config.pipeline_parallel_size,
        )
        # Clients that choose among several replicas want to know how much there is to do.
        self._counts_work = config.parallel_config.data_parallel_size_local > 1
        self._lengths = OutputLengths()
        self._num_expected_tokens = 0
        self._requests: dict[str, Request] = {}
        self._in_flight: dict[int, list[_InFlight]] = {}  # step number -> its choices
        self._endings: list[EngineCoreOutput] = []  # of choices, told with the next result
        self._pause_mode: PauseMode | None = None
        self._held: dict[str, Request] = {}  # came while it was paused
        self._num_weights = 0  # sets of weights after the first
        self._num_choices = 0
        self._num_steps = 0
        self._num_accounting_errors = 0
        self._num_corrupted = 0
        self._num_computed_prompt_tokens = 0
        self._num_step_prompt_tokens = 0
        self._num_step_generation_tokens = 0

    # -- requests in and out ------------------------------------------------------------------

    @property
    def max_request_tokens(self) -> int:
        """Prompt plus output tokens that the pool can hold for one choice."""
        return self._admission.max_pool_tokens

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request.

        Raises InvalidRequestError, and keeps nothing, if it is malformed or can never fit.
        """
        admitted = self._admission.admit(request)
        if request.request_id in self._requests:
            raise InvalidRequestError(
                f"request {request.request_id} is running already; ids must be unique", "request_id"
            )
        self._requests[request.request_id] = admitted
        self._num_choices += len(admitted.choices)
        if self._counts_work:
            for choice in admitted.choices.values():
                self._expect(choice)
        if self._pause_mode is None:
            self._enqueue(admitted)
        else:
            self._held[request.request_id] = admitted

    def _enqueue(self, request: Request) -> None:
        choices = list(request.choices.values())
        if any(choice.num_output_tokens for choice in choices):  # a replay: nothing to share
            for choice in choices:
                self._planner.enqueue(choice)
        else:
            self._forks.wait(choices[0], choices[1:])
            self._planner.enqueue(choices[0])

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

    def _expect(self, choice: Choice) -> None:
        """Count the output tokens that a choice will probably have."""
        limit = choice.max_total_tokens - choice.request.num_prompt_tokens
        left = self._lengths.expected(limit) - choice.num_output_tokens
        choice.num_expected_tokens = max(1, left)
        self._num_expected_tokens += choice.num_expected_tokens

    def _num_outstanding_tokens(self) -> int:
        if not self._counts_work:
            return 0
        return self._num_expected_tokens + self._planner.num_wanted_tokens()

    def has_work(self) -> bool:
        """Whether `schedule` may have something to hand out, now or later, unless it is resumed."""
        num_active = 0 if self._pause_mode == "keep" else len(self._requests) - len(self._held)
        return bool(num_active or self._orders.has_finished or self._endings)

    # -- pausing ------------------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        """Whether new requests are held."""
        return self._pause_mode is not None

    def pause(self, mode: PauseMode) -> None:
        """Hold new requests from now on; once there is no work, nothing runs.

        What is in progress ends with reason "abort", is finished, or is kept where it is.
        """
        self._pause_mode = mode
        if mode == "abort":
            for request_id in [name for name in self._requests if name not in self._held]:
                self._endings += self.abort(request_id)

    def resume(self) -> None:
        """Run what was held and kept. Idempotent."""
        self._pause_mode = None
        held, self._held = self._held, {}
        for request in held.values():
            self._enqueue(request)

    def forget_kv(self) -> None:
        """Nothing of the cache is used any more; choices in progress start again from their tokens.

        No step is in flight.
        """
        self._release_blocks()
        self._kv.reset_prefix_cache(())

    def use_weights(self, version: str) -> None:
        """Other weights compute from now on: what there is of KV is of no use to anybody.

        No step is in flight. Cached prefixes stay, and nobody finds them: the weights are in the
        keys, with a number, since names may come again.
        """
        self._release_blocks()
        self._num_weights += 1
        self._admission.use_weights(f"{version}\0{self._num_weights}", self._requests.values())

    def _release_blocks(self) -> None:
        self._planner.preempt_all()
        self._forks.release_all()

    def stats(self) -> EngineStats:
        """The state now; a fresh object."""
        num_running = self._planner.num_running
        return EngineStats(
            step=self._num_steps,
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
            num_computed_prompt_tokens=self._num_computed_prompt_tokens,
            num_step_prompt_tokens=self._num_step_prompt_tokens,
            num_step_generation_tokens=self._num_step_generation_tokens,
            num_outstanding_tokens=self._num_outstanding_tokens(),
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

        A choice whose preparation raises fails alone; it is reported with the next result. A step
        without tokens is handed out when there are only finished ids or such failures to deliver.
        """
        plan = _NOTHING
        if self._pause_mode != "keep":
            self._orders.take_copies()
            plan = self._plan()
        if not (plan.counts or self._orders.has_finished or self._endings):
            return None
        return self._hand_out(plan.counts)

    def _plan(self) -> StepPlan:
        """A plan without the choices that break it."""
        while True:
            try:
                return self._planner.plan(len(self._in_flight))
            except Exception as error:
                subject = self._planner.subject
                if subject is None or subject.status is Status.FINISHED:
                    raise
                self._fail_unprepared(subject, error)

    def _hand_out(self, counts: dict[Choice, int]) -> SchedulerOutput:
        step = self._orders.begin()
        records = []
        for choice, count in counts.items():
            try:
                self._orders.add(step, choice, count)
            except Exception as error:
                self._fail_unprepared(choice, error)
            else:
                records.append(self._advance(choice, count))
        if records:
            self._num_steps += 1
            self._in_flight[step.step] = records
        self._orders.end(step)
        return step

    def _advance(self, choice: Choice, count: int) -> _InFlight:
        """Account for tokens handed out, as if they were computed."""
        request, num_before = choice.request, choice.num_computed_tokens
        num_after = choice.num_computed_tokens = num_before + count
        num_prompt_left = request.num_prompt_tokens - num_before
        choice.num_in_flight += 1
        samples = num_after == len(choice.token_ids) + choice.num_pending
        if samples:
            choice.num_pending += 1
            if request.fork_children:
                self._fork(choice)
        num_prompt = min(count, num_prompt_left) if num_prompt_left > 0 else 0
        return _InFlight(choice, num_after, num_prompt, samples)

    def _fork(self, parent: Choice) -> None:
        """The parent's prompt is complete in this step: its children can run, too."""
        for child in self._forks.orphan(parent):
            try:
                self._forks.share(parent, child)
            except Exception as error:
                self._fail_unprepared(child, error)
            else:
                self._planner.enqueue(child)

    def _fail_unprepared(self, choice: Choice, error: Exception) -> None:
        """The fence of `schedule`: one choice's fault ends that choice alone."""
        logger.error("%s could not be prepared", choice.id, exc_info=error)
        fault = RequestFault("request_failed", f"internal error: {type(error).__name__}")
        self._endings.append(self._fail(choice, fault))
        for problem in self.check_integrity():
            logger.error("block accounting: %s (healed)", problem)

    # -- results ------------------------------------------------------------------------------

    def update_from_output(
        self, step: SchedulerOutput, output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Account for the result of a step; results come in the order of their steps.

        Whatever belongs to a choice that has ended meanwhile is dropped.
        """
        self._orders.last_result = step.step
        outputs, self._endings = self._endings, []
        self._num_step_prompt_tokens = self._num_step_generation_tokens = 0
        for record in self._in_flight.pop(step.step, ()):
            choice = record.choice
            choice.num_in_flight -= 1
            self._num_step_prompt_tokens += record.num_prompt_tokens
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
                self._num_step_generation_tokens += len(result.new_token_ids)
                outputs.append(result)
        self._num_computed_prompt_tokens += self._num_step_prompt_tokens
        return outputs

    def fail_step(self, step: SchedulerOutput, fault: RequestFault) -> list[EngineCoreOutput]:
        """A step that raised, wherever it got to: its choices end, its orders are given again."""
        self._orders.repeat(step)
        failed = dict.fromkeys(step.num_scheduled_tokens, fault)
        return self.update_from_output(step, ModelRunnerOutput(step.step, {}, failed))

    def _take_result(self, record: _InFlight, output: ModelRunnerOutput) -> EngineCoreOutput | None:
        choice = record.choice
        fault = output.failed.get(choice.id) if output.failed else None
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
        if output.prompt_logprobs:
            result = self._add_scores(choice, output.prompt_logprobs.get(choice.id), result)
        if choice.waits_for is WaitsFor.RESULTS and not choice.num_in_flight:
            self._resume(choice)
        return result

    def _accept(self, choice: Choice, sampled: SampledTokens) -> EngineCoreOutput:
        choice.num_pending -= 1
        choice.token_ids += sampled.token_ids
        if choice.num_expected_tokens:
            num_fulfilled = min(choice.num_expected_tokens, len(sampled.token_ids))
            choice.num_expected_tokens -= num_fulfilled
            self._num_expected_tokens -= num_fulfilled
        stop = choice.check_stop()
        if stop is None:
            return self._output(choice, sampled.token_ids, sampled.logprobs)
        return self._finish(choice, sampled.token_ids, *stop, logprobs=sampled.logprobs)

    def _add_scores(
        self,
        choice: Choice,
        scores: list[TokenLogprobs] | None,
        result: EngineCoreOutput | None,
    ) -> EngineCoreOutput | None:
        """Put scores of prompt tokens into the choice's output; they may be all that is in it."""
        if not scores:
            return result
        result = result or self._output(choice, [], None)
        result.prompt_logprobs = scores
        result.prompt_logprobs_start = choice.num_scored
        choice.num_scored += len(scores)
        return result

    def _resume(self, choice: Choice) -> None:
        choice.waits_for = WaitsFor.NOTHING
        if choice.status is Status.WAITING:
            self._planner.enqueue(choice)

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
        output.num_preemptions = choice.num_preemptions
        if self._counts_work and reason in ("stop", "length"):
            limit = choice.max_total_tokens - choice.request.num_prompt_tokens
            self._lengths.add(limit, choice.num_output_tokens)
        self._end(choice, taint=fault is not None)
        return output

    def _output(
        self, choice: Choice, new_token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> EngineCoreOutput:
        first_scheduled_time, choice.first_scheduled_time = choice.first_scheduled_time, None
        return EngineCoreOutput(
            request_id=choice.id.request_id,
            index=choice.id.index,
            start=choice.num_output_tokens - len(new_token_ids),
            new_token_ids=new_token_ids,
            logprobs=logprobs,
            num_cached_tokens=choice.num_cached_tokens,
            first_scheduled_time=first_scheduled_time,
        )

    def _end(self, choice: Choice, *, taint: bool) -> None:
        """The one place where a choice ends: everything it has is given back."""
        self._planner.remove(choice)
        self._num_expected_tokens -= choice.num_expected_tokens
        choice.num_expected_tokens = 0
        choice.status = Status.FINISHED
        request = choice.request
        for child in self._forks.end(choice):
            self._planner.enqueue(child)
        self._kv.free(choice, taint=taint)
        self._orders.forget(choice)
        del request.choices[choice.id.index]
        self._num_choices -= 1
        if not request.choices:
            del self._requests[request.request_id]
            self._held.pop(request.request_id, None)
