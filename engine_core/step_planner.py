"""Planning one step: which choices get how many of its tokens, and who gives up blocks for them.

Running choices first, in order of rank, then waiting ones by policy. The planner owns both lists;
until the scheduler hands a plan out, nothing but block tables changes.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from operator import attrgetter

from headrace.configs.config import SchedulerConfig
from headrace.engine_core.forks import Forks
from headrace.engine_core.kv_cache_manager import KVCacheManager, PrefixHit
from headrace.engine_core.request import Choice, ChoiceBlocks, Status, WaitsFor
from headrace.engine_core.request_queue import RequestQueue

PREFILL_SHARE = 4  # while others want tokens too, one prefill gets at most 1/4 of a step's budget
MAX_MISFITS = 8  # waiting choices that do not fit which one step looks at before it gives up

_rank = attrgetter("rank")


@dataclass(slots=True)
class StepPlan:
    """The step being made."""

    budget: int  # tokens left
    contended: bool  # several choices want more than one token
    prefill_share: int  # most tokens of one choice in a contended step
    counts: dict[Choice, int] = field(default_factory=dict)  # tokens per choice
    owed_blocks: int = 0  # blocks that prefills in progress will still take
    num_admitted: int = 0


class StepPlanner:
    """Decides who runs, who waits and who is preempted.

    Costs O(running + scheduled), never O(waiting).

    With several pipeline stages, a choice waits for the value of its last token, which the first
    stage must have, and each step takes a share of the running choices, so that no stage waits.
    """

    def __init__(
        self, config: SchedulerConfig, kv: KVCacheManager, forks: Forks, num_stages: int = 1
    ) -> None:
        self._num_stages = num_stages
        self.num_preemptions = 0
        self.prefix_cache_queries = 0  # tokens looked up
        self.prefix_cache_hits = 0  # tokens found
        self.subject: Choice | None = None  # whom `plan` is looking at, in case that it raises
        self._config = config
        self._kv = kv
        self._forks = forks
        self._queue = RequestQueue(config.policy)
        self._running: list[Choice] = []  # by rank, most important first
        # Suspects: choices that have steps of their own for a while, one after the other.
        self._suspects = RequestQueue(config.policy)
        self._alone: Choice | None = None  # the one whose turn it is; it holds blocks
        self._was_alone = False  # whether the last step was one of those

    @property
    def num_running(self) -> int:
        return len(self._running) + (self._alone is not None)

    def num_wanted_tokens(self) -> int:
        """Tokens that are known and not computed: prompts, mostly. O(running)."""
        alone = [] if self._alone is None else [self._alone]
        return (
            sum(
                max(0, len(choice.token_ids) - choice.num_computed_tokens)
                for choice in (*self._running, *alone)
            )
            + self._queue.num_wanted_tokens
            + self._suspects.num_wanted_tokens
        )

    def enqueue(self, choice: Choice) -> None:
        """Let a waiting choice run when its turn comes."""
        if choice.runs_alone_until:
            self._suspects.push(choice)
        else:
            self._queue.push(choice)

    def remove(self, choice: Choice) -> None:
        """Forget a choice that ends, wherever it is."""
        if choice is self._alone:
            self._alone = None
        elif choice.status is Status.RUNNING:
            self._remove_running(choice)
        else:
            self._queue.remove(choice)
            self._suspects.remove(choice)

    def plan(self, num_in_flight: int = 0) -> StepPlan:
        """Decide about the next step; its `counts` are empty if nothing can run now.

        `num_in_flight`: steps handed out that have no result yet. If it raises, the fault lies with
        `subject`: with that choice removed, it can be called again.
        """
        self.subject = None
        if self._alone is None and not len(self._suspects):
            return self._plan_together()
        plan = self._plan_alone(num_in_flight)
        if plan is None:
            plan = self._plan_together()
            if not plan.counts and not num_in_flight:  # nobody else can run now
                plan = self._plan_alone(0) or plan
        return plan

    def _plan_alone(self, num_in_flight: int) -> StepPlan | None:
        """A step of one suspect and nothing else, every other time; None: an ordinary step now.

        Nothing is in flight beside it, so that a crash can only be its own.
        """
        alone = self._alone
        if alone is not None and alone.num_in_flight:
            return StepPlan(budget=0, contended=False, prefill_share=0)
        if alone is not None and alone.num_computed_tokens >= alone.runs_alone_until:
            alone.runs_alone_until = 0
            self._alone = None
            insort(self._running, alone, key=_rank)
            alone = None
        if self._was_alone and (self._running or len(self._queue)):
            self._was_alone = False
            return None
        if alone is None and not len(self._suspects):
            return None
        plan = StepPlan(
            budget=0 if num_in_flight else self._config.max_num_batched_tokens,
            contended=False,
            prefill_share=0,
        )
        if not num_in_flight:
            self._give_all(alone or self._start_alone(plan), plan)
            self._was_alone = True
        return plan

    def _start_alone(self, plan: StepPlan) -> Choice:
        """Take the first suspect out of the queue, and make a place for it among what runs."""
        choice = self.subject = self._suspects.peek()
        assert choice is not None
        while not self._has_slot():
            self._preempt(self._running[-1], plan)
        hit = choice.blocks or self._kv.find_hit(choice)
        if isinstance(hit, PrefixHit):
            self._attach(choice, hit)
        self._forks.admitted(choice)
        self._suspects.remove(choice)
        choice.status = Status.RUNNING
        self._alone = choice
        return choice

    def _give_all(self, choice: Choice, plan: StepPlan) -> None:
        """All tokens that a suspect wants and a step can have; others make room for it."""
        self.subject = choice
        num_new = self._wanted(choice, plan, reserve=0)
        if not num_new:
            return
        while not self._kv.allocate(choice, choice.num_computed_tokens + num_new):
            if not self._forks.release_last():
                self._preempt(self._running[-1], plan)
        plan.counts[choice] = num_new

    def _plan_together(self) -> StepPlan:
        num_prefills = sum(
            1
            for choice in self._running
            if len(choice.token_ids) + choice.num_pending - choice.num_computed_tokens > 1
        )
        budget = self._budget(num_prefills)
        plan = StepPlan(
            budget=budget,
            contended=num_prefills + len(self._queue) > 1,
            prefill_share=max(1, budget // PREFILL_SHARE),
        )
        self._plan_running(plan)
        self._plan_waiting(plan)
        if plan.contended and not plan.num_admitted:
            self._plan_leftover(plan)
        return plan

    def _budget(self, num_prefills: int) -> int:
        """Tokens of a step.

        A step gives its tokens when all of it is computed, and beyond some hundred rows a larger
        one computes no faster: with others beside it, a big prefill only makes them wait.
        """
        budget, limit = self._config.max_num_batched_tokens, self._config.max_shared_prefill_tokens
        if limit is None or len(self._running) + len(self._queue) <= 1:
            return budget
        return min(budget, len(self._running) - num_prefills + limit)

    def _plan_running(self, plan: StepPlan) -> None:
        position, counts, reaches = 0, plan.counts, self._kv.reaches
        has_stages = self._num_stages > 1
        share = -(-len(self._running) // self._num_stages)
        while position < len(self._running) and plan.budget > 0 and len(counts) < share:
            choice = self.subject = self._running[position]
            position += 1
            if has_stages and choice.num_pending:
                continue
            num_tokens = len(choice.token_ids) + choice.num_pending
            # What most choices do in most steps, without the calls below.
            if (
                num_tokens - choice.num_computed_tokens == 1
                and num_tokens < choice.max_total_tokens
                and reaches(choice, num_tokens)
            ):
                counts[choice] = 1
                plan.budget -= 1
                continue
            num_new = self._wanted(choice, plan, reserve=len(self._running) - position)
            if num_new == 0:
                continue
            if not self._make_room(choice, choice.num_computed_tokens + num_new, plan):
                return
            counts[choice] = num_new
            plan.budget -= num_new
            if choice.num_computed_tokens + num_new < choice.num_tokens:
                plan.owed_blocks += self._kv.owed_blocks(choice)

    def _wanted(self, choice: Choice, plan: StepPlan, reserve: int) -> int:
        """Tokens for one choice; 0 if its last token is pending.

        `reserve`: to be left for those after it, if possible.
        """
        num_tokens = len(choice.token_ids) + choice.num_pending
        if num_tokens >= choice.max_total_tokens:
            return 0
        num_new = num_tokens - choice.num_computed_tokens
        if num_new == 1:
            return 1
        limit = max(1, plan.budget - reserve)
        if plan.contended:
            limit = min(limit, plan.prefill_share)
        return min(num_new, limit)

    def _make_room(self, choice: Choice, num_tokens: int, plan: StepPlan) -> bool:
        """Get blocks for a running choice; False if it was preempted itself.

        From the pool, else from waiting fork children, else by preempting the last ranked.
        """
        while not self._kv.allocate(choice, num_tokens):
            if self._forks.release_last():
                continue
            victim = self._running[-1]
            self._preempt(victim, plan)
            if victim is choice:
                return False
        return True

    def _plan_waiting(self, plan: StepPlan) -> None:
        """Admit waiting choices in order.

        One that does not fit may be overtaken `max_bypasses` times; then nothing behind it is
        admitted until it fits.
        """
        misfits: list[Choice] = []  # out of the queue, and to go back whatever happens
        try:
            while plan.budget > 0 and len(misfits) < MAX_MISFITS:
                choice = self.subject = self._queue.peek()
                if choice is None or not (self._has_slot() or self._victims(choice)):
                    break
                self._queue.remove(choice)
                misfits.append(choice)
                if self._admit(choice, plan):
                    misfits.pop()
                    for misfit in misfits:
                        misfit.num_bypasses += 1
                if any(misfit.num_bypasses >= self._config.max_bypasses for misfit in misfits):
                    break
        finally:
            for misfit in misfits:
                if misfit.status is Status.WAITING:
                    self._queue.push(misfit)

    def _has_slot(self) -> bool:
        return self.num_running < self._config.max_num_seqs

    def _victims(self, choice: Choice) -> list[Choice]:
        """Running choices that a waiting one may preempt, last ranked first; empty with fcfs."""
        victims: list[Choice] = []
        if self._config.policy == "priority":
            for victim in reversed(self._running):
                if victim.rank < choice.rank or victim.request.priority <= choice.request.priority:
                    break
                victims.append(victim)
        return victims

    def _admit(self, choice: Choice, plan: StepPlan) -> bool:
        """Start a waiting choice if all its known tokens fit beside what runs."""
        held = self._clear_the_way(choice, plan)
        if held is None:
            return False
        if isinstance(held, PrefixHit):
            self._attach(choice, held)
        self._forks.admitted(choice)
        num_new = self._wanted(choice, plan, reserve=0)
        if not self._kv.allocate(choice, choice.num_computed_tokens + num_new):
            self._kv.free(choice)
            choice.num_computed_tokens = 0
            return False
        choice.status = Status.RUNNING
        insort(self._running, choice, key=_rank)
        plan.counts[choice] = num_new
        plan.budget -= num_new
        plan.num_admitted += 1
        if choice.num_computed_tokens + num_new < choice.num_tokens:
            plan.owed_blocks += self._kv.owed_blocks(choice)
        return True

    def _attach(self, choice: Choice, hit: PrefixHit) -> None:
        """Give a choice the blocks that the prefix cache has for it."""
        choice.num_computed_tokens = self._kv.attach(choice, hit)
        self.prefix_cache_queries += choice.num_tokens
        self.prefix_cache_hits += choice.num_computed_tokens
        if not choice.known_to_worker:
            choice.num_cached_tokens = min(
                choice.num_computed_tokens, choice.request.num_prompt_tokens
            )

    def _clear_the_way(self, choice: Choice, plan: StepPlan) -> ChoiceBlocks | PrefixHit | None:
        """Free the blocks and the place that a waiting choice needs, as far as its rank allows.

        Returns what it starts from; None if it has to go on waiting.
        """
        victims = self._victims(choice)
        while True:
            held = choice.blocks or self._kv.find_hit(choice)
            shortage = self._shortage(choice, held, plan)
            if shortage <= 0 and self._has_slot():
                return held
            if shortage > 0 and self._forks.release_last(after=choice.rank):
                continue
            if victims and shortage <= sum(map(self._kv.num_held_blocks, victims)):
                self._preempt(victims.pop(0), plan)
                continue
            # When nothing runs, only blocks of fork children, its own included, can be in the way.
            if self._running or shortage <= 0 or not self._forks.release_last():
                return None

    def _shortage(self, choice: Choice, held: ChoiceBlocks | PrefixHit, plan: StepPlan) -> int:
        """Blocks lacking to admit a choice. While others run, some are kept for what they need."""
        need = self._kv.admission_cost(choice, held)
        if self._running:
            need += plan.owed_blocks + max(1, self._kv.num_usable_blocks // 100)
        return need - self._kv.num_free_blocks

    def _plan_leftover(self, plan: StepPlan) -> None:
        """Nobody else could use what is left of the budget: give it to prefills after all."""
        for choice, count in plan.counts.items():
            self.subject = choice
            num_more = min(choice.num_tokens - choice.num_computed_tokens - count, plan.budget)
            if num_more > 0 and self._kv.allocate(
                choice, choice.num_computed_tokens + count + num_more
            ):
                plan.counts[choice] = count + num_more
                plan.budget -= num_more

    def _preempt(self, choice: Choice, plan: StepPlan) -> None:
        """Take a running choice's blocks.

        It starts again from its tokens, once those in flight are known.
        """
        beneficiary, self.subject = self.subject, choice
        self._remove_running(choice)
        plan.budget += plan.counts.pop(choice, 0)
        self._kv.free(choice)
        choice.status = Status.WAITING
        choice.num_computed_tokens = 0
        choice.num_preemptions += 1
        self.num_preemptions += 1
        for child in self._forks.orphan(choice):
            self.enqueue(child)
        if choice.num_in_flight:
            choice.waits_for = WaitsFor.RESULTS
        else:
            self._queue.push(choice)
        self.subject = beneficiary

    def preempt_all(self) -> None:
        """Take the blocks of everything that runs; no step is in flight."""
        alone, self._alone = self._alone, None
        if alone is not None:
            self._kv.free(alone)
            alone.status = Status.WAITING
            alone.num_computed_tokens = 0
            for choice in (alone, *self._forks.orphan(alone)):
                self.enqueue(choice)
        plan = StepPlan(budget=0, contended=False, prefill_share=0)
        while self._running:
            self._preempt(self._running[-1], plan)

    def _remove_running(self, choice: Choice) -> None:
        place = bisect_left(self._running, choice.rank, key=_rank)
        if place < len(self._running) and self._running[place] is choice:
            del self._running[place]
