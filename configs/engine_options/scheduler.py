"""Options of the scheduler."""

# ruff: noqa: RUF009 (every default here is made by option(), a dataclass field)

import dataclasses
from functools import partial

from headrace.configs.options import option, parse_size

DEFAULT_MAX_NUM_SEQS = 256

_option = partial(option, group="SchedulerConfig")
_later = partial(_option, status="later")
_legacy = partial(_option, status="legacy")


@dataclasses.dataclass
class SchedulerOptions:
    """Limits of one step and order of the queue."""

    max_num_batched_tokens: int | None = _option(
        None, "token budget of one step (default: 4096 offline; in a server 2048, of which 512 for "
        "prompts while several sequences want tokens)", parse=parse_size, minimum=1,
    )  # fmt: skip
    max_num_seqs: int | None = _option(
        None, f"most sequences in one step (default: {DEFAULT_MAX_NUM_SEQS})", minimum=1
    )
    max_num_partial_prefills: int = _legacy(1, "any number of prompts can be in progress")
    max_long_partial_prefills: int = _legacy(1, "any number of prompts can be in progress")
    long_prefill_token_threshold: int = _later(
        0, "length from which a prompt counts as long", minimum=0
    )
    cuda_graph_sizes: list[int] = _later([], "batch sizes to capture graphs for")
    num_lookahead_slots: int = _legacy(0, "speculation reserves what it needs")
    scheduler_delay_factor: float = _legacy(0.0, "prompts are never delayed")
    preemption_mode: str | None = _legacy(None, "preempted sequences are always recomputed")
    num_scheduler_steps: int = _legacy(1, "every step is scheduled")
    multi_step_stream_outputs: bool = _legacy(True, "every step is streamed")
    scheduling_policy: str = _option(
        "fcfs", "order of the queue; with priority, lower numbers run first",
        choices=["fcfs", "priority"],
    )  # fmt: skip
    enable_chunked_prefill: bool | None = _option(
        None, "split long prompts over steps; cannot be switched off"
    )
    disable_chunked_mm_input: bool = _later(False, "never split one media item over two steps")
    scheduler_cls: str | type | None = _later(None, "a scheduler class of your own")
    disable_hybrid_kv_cache_manager: bool = _later(
        False, "give all kinds of attention the same KV-cache blocks"
    )
    async_scheduling: bool | None = _later(
        None, "schedule a step while the one before it runs", flags=["-asc"], holds=[False]
    )
    stream_interval: int = _later(1, "tokens between two pieces of a stream", minimum=1)
    max_num_queued_reqs: int | None = _option(
        None, "waiting requests above which new ones are refused with 503 (default: no limit)",
        parse=parse_size, minimum=1,
    )  # fmt: skip
    max_num_queued_tokens: int | None = _option(
        None, "waiting prompt tokens above which new requests are refused with 503 (default: no "
        "limit)", parse=parse_size, minimum=1,
    )  # fmt: skip
