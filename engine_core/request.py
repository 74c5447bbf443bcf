"""Request state in the engine core: a `Request` as admitted, a `Choice` per sequence.

A choice is the unit of scheduling. `num_computed_tokens` chases `num_tokens`; chunked prefill,
prefix hits, decoding, replay and resumption after preemption are all that one pursuit.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from headrace.configs.sampling_params import SamplingParams
from headrace.workers.protocol import ChoiceId

FinishReason = Literal["stop", "length", "abort", "error"]
# Score, arrival, submission number, choice index; lower runs first.
Rank = tuple[float, float, int, int]


class Status(Enum):
    """Where a choice is; `Choice.waits_for` says why a waiting one is not in the queue."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


class WaitsFor(Enum):
    """What keeps a waiting choice out of the queue."""

    NOTHING = 0
    FORK_PARENT = 1  # the first choice of the request, whose prompt blocks it will share
    RESULTS = 2  # steps handed out before it was preempted


@dataclass(eq=False, slots=True)
class ChoiceBlocks:
    """KV blocks of one choice; only the KV-cache manager looks inside.

    All groups' tables have the same length; entry i covers `block_size` tokens from i * block_size.
    """

    tables: list[list[int]]  # per KV group; block 0 where a window has moved past
    first_live: list[int]  # per KV group: entries before this one are block 0
    num_sent: int = 0  # entries the worker knows
    num_committed: int = 0  # entries offered to the prefix cache
    may_commit: bool = True  # False after a cache reset: what follows builds on older values


@dataclass(eq=False, slots=True)
class Choice:
    """One sequence of a request. Compared and hashed by identity."""

    id: ChoiceId
    request: "Request"
    rank: Rank
    token_ids: list[int]  # prompt, then the output tokens that are known
    max_total_tokens: int  # prompt and output, clamped to what window and pool hold
    runs_alone_until: int = 0  # tokens computed; below that it has steps of its own
    num_expected_tokens: int = 0  # output tokens that are expected still
    num_pending: int = 0  # tokens that handed-out steps will sample; values not known yet
    num_computed_tokens: int = 0  # KV written by the steps handed out so far
    num_in_flight: int = 0  # steps handed out and not answered
    num_preemptions: int = 0
    num_bypasses: int = 0  # later choices admitted while this one did not fit
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first scheduling
    num_scored: int = 1  # leading prompt tokens whose scores were sent; the first has none
    first_scheduled_time: float | None = None  # wall clock, s; None again once it was sent
    known_to_worker: bool = False
    status: Status = Status.WAITING
    waits_for: WaitsFor = WaitsFor.NOTHING
    blocks: ChoiceBlocks | None = None
    block_hashes: list[bytes] = field(default_factory=list)  # of leading full, known blocks

    @property
    def num_tokens(self) -> int:
        """Tokens known or pending."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that are known."""
        return len(self.token_ids) - self.request.num_prompt_tokens

    def check_stop(self) -> tuple[FinishReason, int | None] | None:
        """Whether the newest token ends this choice: (finish reason, stop reason), or None.

        Order: nothing but the hard length limit below `min_tokens`; EOS; stop ids; length.
        """
        request, token = self.request, self.token_ids[-1]
        if token == request.eos_token_id or token in request.stop_token_ids:
            params = request.sampling_params
            if self.num_output_tokens >= params.min_tokens:
                if token == request.eos_token_id and not params.ignore_eos:
                    return "stop", None
                if token in request.stop_token_ids:
                    return "stop", token
        if len(self.token_ids) >= self.max_total_tokens:
            return "length", None
        return None


@dataclass(eq=False, slots=True)
class Request:
    """What all choices of a request share."""

    request_id: str
    num_prompt_tokens: int
    sampling_params: SamplingParams
    eos_token_id: int | None
    stop_token_ids: frozenset[int]
    priority: int
    hash_root: bytes  # parent of the first block's hash: all that KV depends on but the tokens
    reads_prefix_cache: bool
    cache_salt: str | None = None
    choices: dict[int, Choice] = field(default_factory=dict)  # the live ones, by index
    fork_children: dict[int, Choice] = field(default_factory=dict)  # waiting for the prefill
