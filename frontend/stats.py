"""What happened in one step, for the loggers of an engine: the log line, Prometheus, or a user's.

`OutputProcessor` fills an `IterationStats` from what it sees of this front end's requests;
`make_stats` joins it with the engine core's `EngineStats` to the public record, `Stats`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from headrace.engine_core.messages import EngineStats


@dataclass
class FinishedRequest:
    """A request that has ended; times are wall clock, in seconds, None if never reached."""

    n: int
    max_tokens: int | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generation_tokens: list[int]  # per sequence
    finish_reasons: list[str]  # per sequence
    num_preemptions: int
    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    last_token_time: float
    finished_time: float


@dataclass
class IterationStats:
    """What one message of the engine core meant for the requests of this front end."""

    now: float = 0.0
    num_prompt_tokens: int = 0  # of requests whose first token arrived, cached ones included
    num_cached_tokens: int = 0  # those of them that the prefix cache had
    num_generation_tokens: int = 0
    time_to_first_tokens: list[float] = field(default_factory=list)  # s
    inter_token_latencies: list[float] = field(default_factory=list)  # s
    finished: list[FinishedRequest] = field(default_factory=list)


@dataclass
class Stats:
    """The record that every stat logger gets; names of the public API."""

    now: float
    num_running_sys: int = 0
    num_waiting_sys: int = 0
    num_swapped_sys: int = 0
    gpu_cache_usage_sys: float = 0.0  # share of KV-cache blocks in use, 0 to 1
    cpu_cache_usage_sys: float = 0.0
    gpu_prefix_cache_hit_rate: float = 0.0
    cpu_prefix_cache_hit_rate: float = 0.0
    num_prompt_tokens_iter: int = 0  # computed in this step
    num_generation_tokens_iter: int = 0
    num_tokens_iter: int = 0
    time_to_first_tokens_iter: list[float] = field(default_factory=list)
    time_per_output_tokens_iter: list[float] = field(default_factory=list)
    num_preemption_iter: int = 0
    time_e2e_requests: list[float] = field(default_factory=list)
    time_queue_requests: list[float] = field(default_factory=list)
    time_prefill_requests: list[float] = field(default_factory=list)
    time_decode_requests: list[float] = field(default_factory=list)
    time_inference_requests: list[float] = field(default_factory=list)
    num_prompt_tokens_requests: list[int] = field(default_factory=list)
    num_generation_tokens_requests: list[int] = field(default_factory=list)
    max_num_generation_tokens_requests: list[int] = field(default_factory=list)
    n_requests: list[int] = field(default_factory=list)
    max_tokens_requests: list[int] = field(default_factory=list)
    finished_reason_requests: list[str] = field(default_factory=list)
    running_lora_adapters: list[str] = field(default_factory=list)
    waiting_lora_adapters: list[str] = field(default_factory=list)
    max_lora: str = "0"
    engine_rank: int = 0  # of the data-parallel replica that all this is about
    engine: EngineStats = field(default_factory=EngineStats)
    iteration: IterationStats = field(default_factory=IterationStats)


class StatLoggerBase(ABC):
    """A receiver of `Stats`. It is called once per step, on the thread that drives the engine."""

    @abstractmethod
    def log(self, stats: Stats) -> None:
        """Take one record. What it raises is logged once and never ends a request."""


def make_stats(
    engine: EngineStats, iteration: IterationStats, num_new_preemptions: int, rank: int = 0
) -> Stats:
    """The public record of one step of a replica."""
    used = 1.0 - engine.num_free_blocks / engine.num_blocks if engine.num_blocks else 0.0
    stats = Stats(
        now=iteration.now,
        num_running_sys=engine.num_running,
        num_waiting_sys=engine.num_waiting,
        gpu_cache_usage_sys=used,
        gpu_prefix_cache_hit_rate=engine.prefix_cache_hits / max(1, engine.prefix_cache_queries),
        num_prompt_tokens_iter=engine.num_step_prompt_tokens,
        num_generation_tokens_iter=engine.num_step_generation_tokens,
        num_tokens_iter=engine.num_step_prompt_tokens + engine.num_step_generation_tokens,
        time_to_first_tokens_iter=iteration.time_to_first_tokens,
        time_per_output_tokens_iter=iteration.inter_token_latencies,
        num_preemption_iter=num_new_preemptions,
        engine_rank=rank,
        engine=engine,
        iteration=iteration,
    )
    for request in iteration.finished:
        _add_finished(stats, request)
    return stats


def _add_finished(stats: Stats, request: FinishedRequest) -> None:
    scheduled, first = request.first_scheduled_time, request.first_token_time
    stats.time_e2e_requests.append(request.finished_time - request.arrival_time)
    if scheduled is not None and first is not None:
        stats.time_queue_requests.append(scheduled - request.arrival_time)
        stats.time_prefill_requests.append(first - scheduled)
        stats.time_decode_requests.append(request.last_token_time - first)
        stats.time_inference_requests.append(request.last_token_time - scheduled)
    stats.num_prompt_tokens_requests.append(request.num_prompt_tokens)
    stats.num_generation_tokens_requests += request.num_generation_tokens
    stats.max_num_generation_tokens_requests.append(max(request.num_generation_tokens, default=0))
    stats.n_requests.append(request.n)
    if request.max_tokens is not None:
        stats.max_tokens_requests.append(request.max_tokens)
    stats.finished_reason_requests += request.finish_reasons
