"""Writes steps down for the worker: orders, and of each choice only what it does not know yet."""

from collections.abc import Callable

from headrace.engine_core.forks import Forks
from headrace.engine_core.kv_cache_manager import KVCacheManager
from headrace.engine_core.request import Choice
from headrace.workers.protocol import (
    BlockCopy,
    CachedRequestData,
    ChoiceId,
    NewRequestData,
    SchedulerOutput,
)


class StepOrders:
    """Collects what is to be told to the worker until a step is handed out."""

    def __init__(self, kv: KVCacheManager, forks: Forks, clock: Callable[[], float]) -> None:
        self._kv = kv
        self._forks = forks
        self._clock = clock
        self._finished: list[ChoiceId] = []  # the worker has to forget these
        self._copies: list[BlockCopy] = []  # for the next step
        self.last_step = 0  # the number of the last one begun
        self.last_result = 0  # the number of the last one whose output is known

    @property
    def has_finished(self) -> bool:
        """Whether the worker has to be told of ended choices."""
        return bool(self._finished)

    def take_copies(self) -> None:
        """Note the copies that waiting children need, for the next step; their sources are let go.

        Before planning, since the copies run before anything is written.
        """
        self._copies += self._forks.take_copies()

    def begin(self) -> SchedulerOutput:
        """The next step, without any choices."""
        self.last_step += 1
        finished, self._finished = self._finished, []
        copies, self._copies = self._copies, []
        return SchedulerOutput(
            self.last_step, [], [], {}, finished, copies, last_result=self.last_result
        )

    def add(self, step: SchedulerOutput, choice: Choice, num_tokens: int) -> None:
        """Have the worker compute the choice's next tokens."""
        if choice.known_to_worker:
            resumed = choice.blocks is not None and choice.blocks.num_sent == 0
            step.cached_requests.append(
                CachedRequestData(
                    choice.id, self._kv.take_unsent(choice), choice.num_computed_tokens, resumed
                )
            )
        else:
            step.new_requests.append(self._introduce(choice))
        step.num_scheduled_tokens[choice.id] = num_tokens

    def _introduce(self, choice: Choice) -> NewRequestData:
        choice.known_to_worker = True
        choice.first_scheduled_time = self._clock()
        choice.token_ids = list(choice.token_ids)  # from here on it grows
        return NewRequestData(
            choice_id=choice.id,
            token_ids=list(choice.token_ids),
            num_prompt_tokens=choice.request.num_prompt_tokens,
            sampling_params=choice.request.sampling_params,
            block_ids=self._kv.take_unsent(choice),
            num_computed_tokens=choice.num_computed_tokens,
            num_prompt_logprobs_received=choice.num_scored,
        )

    def end(self, step: SchedulerOutput) -> None:
        """Complete a step, once all its choices are in it."""
        step.blocks_to_zero = self._kv.take_blocks_to_zero()

    def forget(self, choice: Choice) -> None:
        """The choice has ended."""
        if choice.known_to_worker:
            self._finished.append(choice.id)

    def repeat(self, step: SchedulerOutput) -> None:
        """A step may not have been carried out: give its orders again.

        Waiting fork children, whose copies it may have held, start afresh.
        """
        self._kv.zero_again(step.blocks_to_zero)
        self._finished += step.finished
        self._forks.release_all()
