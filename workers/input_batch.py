"""The worker's persistent request table, and the flat token batch that a step makes of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
import torch

from headrace.configs.sampling_params import SamplingParams
from headrace.kernels.attention import (
    SequenceSlots,
    block_slots,
)
from headrace.workers.growing_array import GrowingArray
from headrace.workers.logit_edits import LogitEdits, LogitRules
from headrace.workers.models import StepAttention, StepPlanner
from headrace.workers.protocol import CachedRequestData, ChoiceId, NewRequestData
from headrace.workers.sampler import SamplingRow

_NOTHING = range(0)


@dataclass(slots=True)
class KnownChoice:
    """What the worker knows of one choice until it is finished.

    `slots`: per KV group, where in the cache each position of its block table lies. `edits`: what
    its parameters do to logits, if anything. `num_scored`: the leading prompt tokens whose scores
    are not wanted, or have been made (the first never has any). `num_scheduled` is what the current
    step computes, from `num_computed_tokens` on.
    """

    choice_id: ChoiceId
    params: SamplingParams
    num_prompt_tokens: int
    tokens: GrowingArray
    slots: list[GrowingArray]
    num_computed_tokens: int
    num_scored: int
    edits: LogitEdits | None = None
    num_scheduled: int = 0

    @property
    def context_end(self) -> int:
        """Tokens in the cache after the current step."""
        return self.num_computed_tokens + self.num_scheduled

    @property
    def is_sampled(self) -> bool:
        """Whether the current step reaches the last token, so that the next one is sampled."""
        return self.context_end == len(self.tokens)

    @property
    def scored_positions(self) -> range:
        """Positions of the current step whose logits score the prompt token after them."""
        if self.num_scored >= self.num_prompt_tokens:
            return _NOTHING
        first = max(self.num_computed_tokens, self.num_scored - 1)
        return range(first, max(first, min(self.context_end, self.num_prompt_tokens - 1)))

    def append(self, token_id: int) -> None:
        """Take a sampled token."""
        self.tokens.append(token_id)
        if self.edits is not None:
            self.edits.extend((token_id,))


class RequestTable:
    """Every choice the worker was told about and that is not finished, preempted ones included."""

    def __init__(
        self,
        block_size: int,
        num_groups: int,
        num_blocks: int,
        vocab_size: int,
        max_model_len: int,
    ) -> None:
        self.block_size = block_size
        self.num_groups = num_groups
        self.num_blocks = num_blocks
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._choices: dict[ChoiceId, KnownChoice] = {}
        # By request id; its choices hold them.
        self._rules: WeakValueDictionary[str, LogitRules] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._choices)

    def forget(self, choice_ids: Iterable[ChoiceId]) -> None:
        for choice_id in choice_ids:
            self._choices.pop(choice_id, None)

    def apply(self, change: NewRequestData | CachedRequestData) -> KnownChoice:
        """Take in a new choice, or what changed of a known one.

        Raises ValueError for token ids, counts or blocks that cannot be, and for an unknown choice.
        """
        return self._add(change) if isinstance(change, NewRequestData) else self._update(change)

    def schedule(self, state: KnownChoice, num_tokens: int) -> None:
        """Let the next step compute `num_tokens`.

        Raises ValueError if tokens or blocks do not reach that far.
        """
        state.num_scheduled = num_tokens
        start, end = state.num_computed_tokens, state.context_end
        if not 0 <= start < end <= len(state.tokens):
            raise ValueError(f"tokens {start} to {end} of {len(state.tokens)} cannot be computed")
        if end > self.max_model_len:
            raise ValueError(f"{end} tokens exceed max_model_len {self.max_model_len}")
        for group, slots in enumerate(state.slots):
            if len(slots) < end:
                raise ValueError(
                    f"the block table of KV group {group} holds {len(slots)} of {end} tokens"
                )
            # A slot below 2 * block_size lies in the null block, which must stay zero.
            least = slots[start] if num_tokens == 1 else slots.view()[start:end].min()
            if least < 2 * self.block_size:
                raise ValueError(f"KV group {group} has no block for a token to be computed")

    def _add(self, new: NewRequestData) -> KnownChoice:
        tokens = np.asarray(new.token_ids, dtype=np.int64)
        if len(tokens) == 0 or not 0 < new.num_prompt_tokens <= len(tokens):
            raise ValueError(
                f"{len(tokens)} tokens with a prompt of {new.num_prompt_tokens} cannot be run"
            )
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise ValueError(f"a token id is not in 0 ... {self.vocab_size - 1}")
        state = KnownChoice(
            choice_id=new.choice_id,
            params=new.sampling_params,
            num_prompt_tokens=new.num_prompt_tokens,
            tokens=GrowingArray(tokens),
            slots=[GrowingArray(slots) for slots in self._slots(new.block_ids)],
            num_computed_tokens=new.num_computed_tokens,
            num_scored=_num_scored(new),
            edits=self._make_edits(new, tokens),
        )
        self._choices[new.choice_id] = state
        return state

    def _make_edits(self, new: NewRequestData, tokens: np.ndarray) -> LogitEdits | None:
        rules = self._rules.get(new.choice_id.request_id)
        if rules is None:
            rules = LogitRules(new.sampling_params, self.vocab_size)
            self._rules[new.choice_id.request_id] = rules
        num_prompt = new.num_prompt_tokens
        if not rules.is_active(len(tokens) - num_prompt):
            return None
        return LogitEdits(rules, tokens[:num_prompt], new.token_ids[num_prompt:])

    def _update(self, cached: CachedRequestData) -> KnownChoice:
        state = self._choices.get(cached.choice_id)
        if state is None:
            raise ValueError("the worker does not know this choice")
        if cached.resumed:
            state.slots = [GrowingArray(slots) for slots in self._slots(cached.new_block_ids)]
        elif any(cached.new_block_ids):
            for slots, more in zip(state.slots, self._slots(cached.new_block_ids), strict=True):
                slots.extend(more)
        state.num_computed_tokens = cached.num_computed_tokens
        return state

    def _slots(self, block_ids: list[list[int]]) -> list[np.ndarray]:
        if len(block_ids) != self.num_groups:
            raise ValueError(f"block ids for {len(block_ids)} of {self.num_groups} KV groups")
        for ids in block_ids:
            if ids and (min(ids) < 0 or max(ids) >= self.num_blocks):
                raise ValueError(f"a block id is not in 0 ... {self.num_blocks - 1}")
        return [block_slots(ids, self.block_size) for ids in block_ids]


def _num_scored(new: NewRequestData) -> int:
    if new.sampling_params.prompt_logprobs is None or new.choice_id.index != 0:
        return new.num_prompt_tokens
    return max(1, new.num_prompt_logprobs_received)


@dataclass(frozen=True)
class ScoredRows:
    """Rows of a batch whose logits score prompt tokens: of one choice, one after the other."""

    state: KnownChoice
    first_row: int
    positions: range  # in the choice; the logits of each score the token after it

    @property
    def rows(self) -> slice:
        """The rows of the batch."""
        return slice(self.first_row, self.first_row + len(self.positions))

    @property
    def token_ids(self) -> torch.Tensor:
        """The prompt tokens to score, [len(positions)] int64."""
        tokens = self.state.tokens.view()
        return torch.from_numpy(tokens[self.positions.start + 1 : self.positions.stop + 1].copy())


@dataclass(frozen=True)
class InputBatch:
    """One step's flat token batch.

    Decode rows come first, by falling context length, then longer chunks.

    `sampled` are the choices that get a token, `sampled_rows` their last rows in the batch;
    `scored` are those whose prompt tokens get scores.
    """

    token_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64, for the rotary embedding
    attention: tuple[StepAttention, ...]  # one per KV group
    sampled: list[KnownChoice]
    sampled_rows: torch.Tensor  # [len(sampled)] int64
    scored: list[ScoredRows]


def make_input_batch(states: Sequence[KnownChoice], planners: Sequence[StepPlanner]) -> InputBatch:
    """The batch of the scheduled `states`, at least one; `planners`: one per KV group."""
    ordered = sorted(states, key=lambda s: (s.num_scheduled > 1, -s.context_end))
    positions = np.array([s.num_computed_tokens for s in ordered], dtype=np.int64)
    if ordered[-1].num_scheduled == 1:
        token_ids = np.array([s.tokens[s.num_computed_tokens] for s in ordered], dtype=np.int64)
        ends = np.arange(1, len(ordered) + 1)
    else:
        token_ids = np.concatenate(
            [s.tokens.view()[s.num_computed_tokens : s.context_end] for s in ordered]
        )
        counts = np.array([s.num_scheduled for s in ordered], dtype=np.int64)
        ends = np.cumsum(counts)
        positions = np.arange(ends[-1]) + np.repeat(positions - (ends - counts), counts)
    attention = tuple(
        planner.plan([_sequence_slots(state, group) for state in ordered])
        for group, planner in enumerate(planners)
    )
    is_sampled = [i for i, s in enumerate(ordered) if s.is_sampled]
    return InputBatch(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        attention=attention,
        sampled=[ordered[i] for i in is_sampled],
        sampled_rows=torch.from_numpy(ends[is_sampled] - 1),
        scored=[
            ScoredRows(state, int(end) - state.context_end + scored.start, scored)
            for state, end in zip(ordered, ends, strict=True)
            if (scored := state.scored_positions)
        ],
    )


def _sequence_slots(state: KnownChoice, group: int) -> SequenceSlots:
    slots = state.slots[group]
    return SequenceSlots(
        slots.view()[: state.context_end], state.num_scheduled, address=slots.address
    )


def sampling_row(state: KnownChoice) -> SamplingRow:
    """What the sampler needs to know of the row that samples this choice's next token."""
    return SamplingRow(
        params=state.params,
        choice_index=state.choice_id.index,
        output_index=len(state.tokens) - state.num_prompt_tokens,
        num_logprobs=state.params.logprobs,
        edits=state.edits,
    )
