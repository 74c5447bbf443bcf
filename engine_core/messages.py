"""Messages between front end and engine core: the one contract between them.

A ZMQ message is two frames: a header (`Header`: protocol version, engine epoch) and a body (one of
`ToCore` or `FromCore`), both msgpack. A frame of another epoch is dropped; another version is
refused. All engine state of a request is a function of its `EngineCoreRequest`, which already
carries what a replay needs. Starting and ending is the supervisor's: `control_messages.py`.
"""

from typing import Literal

import msgspec

from headrace.configs.sampling_params import SamplingParams
from headrace.workers.protocol import RequestFault, TokenLogprobs, WorkerCall, WorkerResult

PROTOCOL_VERSION = 1

# Why a replica got a request. only: no other one was there, or could go on with it. pinned: the
# caller said so. moved: its own was lost. returned: its own was lost, and came back.
RoutingReason = Literal["only", "pinned", "prefix", "load", "moved", "returned"]
ROUTING_REASONS: tuple[RoutingReason, ...] = (
    "only", "pinned", "prefix", "load", "moved", "returned",
)  # fmt: skip


class Header(msgspec.Struct, frozen=True, array_like=True):
    """First frame of every message."""

    version: int
    epoch: int


class ChoiceState(msgspec.Struct, array_like=True):
    """A choice to run, and its output tokens that were accepted already (none unless replayed).

    Until `runs_alone_until` of its tokens, the prompt included, are computed, it has steps of its
    own: it was in a step when an engine core died.
    """

    index: int
    output_token_ids: list[int] = []
    runs_alone_until: int = 0


class EngineCoreRequest(msgspec.Struct, tag="request", array_like=True, omit_defaults=True):
    """A request after rendering and admission: token ids in, nothing left to resolve.

    `choices` lists the choices still to run; a first submission has all `n` of them with no output.
    `priority`: lower runs first. Times are wall clock, in seconds.
    """

    request_id: str  # ours, unique for the life of the engine
    prompt_token_ids: list[int]
    sampling_params: SamplingParams  # seed concrete, max_tokens clamped, stop_token_ids complete
    eos_token_id: int | None
    arrival_time: float
    choices: list[ChoiceState]
    priority: int = 0
    deadline: float | None = None
    cache_salt: str | None = None
    weight_version: str = "default"
    num_prompt_logprobs_received: int = 0


class AbortRequest(msgspec.Struct, tag="abort", array_like=True):
    """Stop a request, or one choice of it. Unknown ids are ignored."""

    request_id: str
    index: int | None = None  # None: all choices


class UtilityCall(msgspec.Struct, tag="call", array_like=True):
    """A control call: one of the names in `EngineCore.UTILITIES`, with arguments by name."""

    call_id: int
    method: str
    kwargs: dict[str, object] = {}


class Join(msgspec.Struct, tag="join", array_like=True):
    """First message of a client: it gets the statistics of every step from now on."""


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """New tokens of one choice. `start` is the output index of the first of them.

    `finish_reason` is None while running, else "stop", "length", "abort" or "error".
    `prompt_logprobs`: scores of prompt tokens `prompt_logprobs_start` and following, for choice 0
    of a request that asked for them; those of a long prompt come in several outputs.
    """

    request_id: str
    index: int
    start: int
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    fault: RequestFault | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs_start: int = 0
    first_scheduled_time: float | None = None  # wall clock, s; with a choice's first output
    num_preemptions: int = 0  # with a choice's last output


class EngineStats(msgspec.Struct, array_like=True):
    """State of the scheduler after a step; counters are since the start of the engine core.

    A client adds those of the engine cores before, and fills in the last four itself.
    """

    step: int = 0  # steps that had tokens
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0  # without the null block
    num_requests: int = 0  # entries in the per-request table
    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # tokens looked up
    prefix_cache_hits: int = 0  # tokens found
    accounting_errors: int = 0  # block accounting mismatches found and healed
    num_corrupted: int = 0  # choices that failed because of non-finite logits
    num_computed_prompt_tokens: int = 0  # prompt tokens computed, not found in the cache
    num_step_prompt_tokens: int = 0  # of the last step
    num_step_generation_tokens: int = 0  # of the last step
    # Prompt tokens to compute and output tokens expected, of all clients; 0 with one replica.
    num_outstanding_tokens: int = 0
    num_restarts: int = 0  # engine cores that were lost and came back
    num_replayed_requests: int = 0
    recovery_s: float = 0.0  # total time without an engine core
    routed: dict[str, int] = {}  # requests that were sent there, by the router's reason


class EngineCoreOutputs(msgspec.Struct, tag="outputs", array_like=True):
    """Everything one step has for one client; also sent without outputs, so that progress shows.

    `weight_version`: of the weights that made the tokens; "" if that is not known.
    """

    outputs: list[EngineCoreOutput]
    stats: EngineStats
    timestamp: float = 0.0  # wall clock at the end of the step, s
    num_received: int = 0  # requests of this client that `stats` knows of
    rank: int = 0  # of the replica; its client fills it in
    weight_version: str = ""  # of the weights that made the outputs


class UtilityResult(msgspec.Struct, tag="result", array_like=True):
    """Answer to a `UtilityCall`: a msgpack value, or what went wrong.

    `workers`: the answer to a `WorkerCall`, one entry per worker, by rank.
    """

    call_id: int
    value: object = None
    fault: RequestFault | None = None
    workers: list[WorkerResult] = []
    rank: int = 0  # of the replica; its client fills it in


class Ready(msgspec.Struct, array_like=True):
    """Facts of an engine core that takes requests."""

    num_blocks: int
    block_size: int
    max_request_tokens: int  # prompt + output that the pool can hold for one choice
    contract_id: str
    phases: dict[str, float]  # start-up phase -> seconds, in order
    memory: dict[str, int]  # budget line -> bytes
    num_threads: int
    pid: int
    weight_version: str = "default"


ToCore = Join | EngineCoreRequest | AbortRequest | UtilityCall | WorkerCall
FromCore = EngineCoreOutputs | UtilityResult
