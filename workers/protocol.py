"""The step contract between scheduler, executor and workers.

Torch-free, so that executors and engine core are too.

One step: `Scheduler.schedule()` makes a `SchedulerOutput`, which says only what changed; the worker
applies it to its persistent request table, runs the model once over a flat token batch and answers
with a `ModelRunnerOutput`.

The worker owns the tokens of every request it has been told about: the scheduler sends the known
tokens once, in `NewRequestData`, and never sends back tokens that the worker sampled. Steps are
executed in the order they were scheduled; a scheduler may hand out step k+1 before it has seen the
output of step k.
"""

from typing import Literal

import msgspec

from headrace.configs.sampling_params import SamplingParams


class ChoiceId(msgspec.Struct, frozen=True, array_like=True, cache_hash=True):
    """One choice (sequence) of a request: the unit of scheduling. `index` is 0 … n-1."""

    request_id: str
    index: int = 0

    def __str__(self) -> str:
        return f"{self.request_id}#{self.index}"


class KVCacheGroupSpec(msgspec.Struct, frozen=True):
    """Layers that share one block table. Layer i of the group keeps its pages in pool buffer i."""

    kind: Literal["full", "sliding"]
    layer_indices: tuple[int, ...]
    window: int | None = None  # tokens a query sees, itself included; only for "sliding"


class KVCacheSpec(msgspec.Struct, frozen=True):
    """What the KV cache of a model needs.

    All groups' pages have one byte size, so that they share one pool.

    Each buffer has a page per block, and block 0 is the null block: it stands for pages that are
    never read. How K and V of a block's tokens lie in a page is the attention kernels' business.
    """

    groups: tuple[KVCacheGroupSpec, ...]
    num_buffers: int  # the largest number of layers in a group
    block_size: int  # tokens
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    scale_bytes: int = 0  # beside a head's key, and its value, of a token

    @property
    def page_bytes(self) -> int:
        """Bytes that one block takes in one buffer."""
        head_bytes = self.head_dim * self.dtype_bytes + self.scale_bytes
        return 2 * self.block_size * self.num_kv_heads * head_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes that one block takes over all buffers."""
        return self.page_bytes * self.num_buffers

    def of_layers(self, layers: range) -> "KVCacheSpec":
        """What a stage with these layers needs: the same groups, with fewer layers."""
        groups = tuple(
            msgspec.structs.replace(
                group, layer_indices=tuple(i for i in group.layer_indices if i in layers)
            )
            for group in self.groups
        )
        num_buffers = max(len(group.layer_indices) for group in groups)
        return msgspec.structs.replace(self, groups=groups, num_buffers=num_buffers)


class WorkerSetup(msgspec.Struct, frozen=True):
    """Which of a replica's workers one is, and where it meets the others.

    `machine_rank` and `machine_size` count the workers of all replicas on this machine. `store`:
    what they meet at ("" if there is only one worker): the path of a file store,
    "tcp://HOST:PORT" of a TCP store, or "env://" as torchrun says. `store_fd`: the socket that this
    worker is to serve the TCP store on, or -1. `shared_memory`: path of a file in memory that the
    shards of its stage share; "" if they are to find out themselves whether they can have one.
    `address`: of this machine, where there are several. `answers`: whether it is the one whose
    outputs the executor takes.
    """

    rank: int = 0
    local_rank: int = 0  # among the replica's workers on this machine
    local_size: int = 1
    machine_rank: int = 0
    machine_size: int = 1
    store: str = ""
    store_fd: int = -1
    shared_memory: str = ""
    address: str = ""
    answers: bool = True


class WorkerInfo(msgspec.Struct, frozen=True):
    """What a worker reports once its weights and KV cache are in place."""

    kv_cache_spec: KVCacheSpec
    num_blocks: int  # including the null block
    contract_id: str  # numeric contract: equal ids mean bitwise equal results
    phases: dict[str, float]  # start-up phase -> seconds
    memory: dict[str, int]  # budget line -> bytes
    num_threads: int = 1


class NewRequestData(msgspec.Struct):
    """A choice the worker does not know yet."""

    choice_id: ChoiceId
    token_ids: list[int]  # prompt, then the output already accepted (replay)
    num_prompt_tokens: int
    sampling_params: SamplingParams  # seed is concrete; stop_token_ids complete
    block_ids: list[list[int]]  # per KV group: the whole block table
    num_computed_tokens: int  # tokens whose KV is in those blocks
    # Leading prompt tokens whose scores are not wanted again (replay); 0 means none, like 1: the
    # first token has no score.
    num_prompt_logprobs_received: int = 0


class CachedRequestData(msgspec.Struct, gc=False):
    """A choice the worker knows: only what changed. Nobody writes to its lists."""

    choice_id: ChoiceId
    new_block_ids: list[list[int]]  # per KV group: to append, or the whole table if `resumed`
    num_computed_tokens: int
    resumed: bool = False  # back from preemption: replace the block table, keep the tokens


class BlockCopy(msgspec.Struct, frozen=True, array_like=True):
    """Copy one block in every buffer before the forward pass (a fork's last, partial block)."""

    source: int
    target: int


class SchedulerOutput(msgspec.Struct):
    """One step.

    A choice is in `new_requests` or `cached_requests` exactly when it has scheduled tokens.

    Application order: finished, zero, copies, new, cached, forward. A row is sampled exactly when
    the scheduled tokens reach the choice's last known-or-pending token (`num_computed +
    num_scheduled == num_tokens` in the worker's table).
    """

    step: int
    new_requests: list[NewRequestData]
    cached_requests: list[CachedRequestData]
    num_scheduled_tokens: dict[ChoiceId, int]
    finished: list[ChoiceId]  # forget these
    block_copies: list[BlockCopy] = []
    blocks_to_zero: list[int] = []  # pages that a request with non-finite values may have written
    last_result: int = 0  # the newest step whose output the scheduler had when it made this one


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Scores at one position: the sampled (or prompt) token first, then the top k, descending.

    Log-probabilities or logits, as `ModelConfig.logprobs_mode` says. `rank` is the 1-based rank of
    the first token in the whole vocabulary.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class SampledTokens(msgspec.Struct, array_like=True, gc=False):
    """What one choice got in one step: 0, 1 or several tokens."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one per token, if asked


class RequestFault(msgspec.Struct, frozen=True, array_like=True):
    """Why a choice failed alone: `code` of an error in `configs.errors` and its message.

    Surrogates in the message (of undecodable file names) are escaped: msgpack cannot hold them.
    """

    code: str
    message: str

    def __post_init__(self) -> None:
        if not self.message.isascii():
            text = self.message.encode("utf-8", "backslashreplace").decode()
            msgspec.structs.force_setattr(self, "message", text)


class ModelRunnerOutput(msgspec.Struct):
    """Result of one step. A choice in neither dict got no token (a prefill chunk)."""

    step: int
    sampled: dict[ChoiceId, SampledTokens]
    failed: dict[ChoiceId, RequestFault] = {}
    # Scores of the prompt tokens that this step made known, in order: the logits of position i
    # score token i + 1, so the first prompt token has none.
    prompt_logprobs: dict[ChoiceId, list[TokenLogprobs]] = {}


class WorkerCall(msgspec.Struct, tag="worker_call", array_like=True):
    """Run something on every worker between two steps: the method called `method`, or a callable.

    `pickled` (cloudpickle) holds (method or callable, args, kwargs) when msgpack cannot; it is
    refused unless the program that started the engine core has allowed callables (rule S1).
    """

    call_id: int
    method: str | None
    args: list[object] = []
    kwargs: dict[str, object] = {}
    pickled: bytes | None = None


class WorkerResult(msgspec.Struct, array_like=True):
    """What one worker gave: a msgpack value, a pickled value or exception, or what went wrong."""

    value: object = None
    pickled: bytes | None = None
    pickled_error: bytes | None = None
    fault: RequestFault | None = None
