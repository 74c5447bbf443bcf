"""Small schedulers and requests, and a fake worker with a simulated KV memory.

`FakeWorker` keeps the worker's side of the step contract without a model. Its memory records, for
each slot of each block, which token it was written for; each step asserts that every slot a real
model would read holds exactly that. Its "model" is `next_token`, a pure function of the tokens so
far and the choice index, so that the whole output of a request can be computed beside it.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.configs.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from headrace.configs.sampling_params import SamplingParams
from headrace.engine_core.messages import ChoiceState, EngineCoreOutput, EngineCoreRequest
from headrace.engine_core.scheduler import Scheduler
from headrace.workers.protocol import (
    ChoiceId,
    KVCacheGroupSpec,
    KVCacheSpec,
    ModelRunnerOutput,
    NewRequestData,
    RequestFault,
    SampledTokens,
    SchedulerOutput,
    TokenLogprobs,
)

VOCAB_SIZE = 32
EOS = 31
NAN = RequestFault("non_finite_logits", "injected")


def make_config(
    *,
    max_model_len: int = 64,
    block_size: int = 4,
    prefix_caching: bool = True,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_shared_prefill_tokens: int | None = None,
    policy: str = "fcfs",
    max_bypasses: int = 64,
    ageing_s: float = 10.0,
    weight_version: str = "default",
    vocab_size: int = VOCAB_SIZE,
    num_replicas: int = 1,
) -> EngineConfig:
    return EngineConfig(
        model_config=ModelConfig(
            model="tiny",
            path="tiny",
            tokenizer_path="tiny",
            served_model_names=("tiny",),
            architecture="Fake",
            hf_config={},
            dtype="float32",
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            eos_token_id=EOS,
            weight_version=weight_version,
        ),
        cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=prefix_caching),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_shared_prefill_tokens=max_shared_prefill_tokens,
            policy=policy,  # type: ignore[arg-type]
            max_bypasses=max_bypasses,
            ageing_s=ageing_s,
        ),
        parallel_config=ParallelConfig(
            data_parallel_size=num_replicas, data_parallel_size_local=num_replicas
        ),
    )


def make_spec(windows: Sequence[int | None] = (None,), block_size: int = 4) -> KVCacheSpec:
    """One KV group for each entry: None is full attention, a number a sliding window of as many
    tokens.
    """
    groups = tuple(
        KVCacheGroupSpec("full" if window is None else "sliding", (index,), window)
        for index, window in enumerate(windows)
    )
    return KVCacheSpec(groups, 1, block_size, num_kv_heads=1, head_dim=1, dtype_bytes=4)


def make_scheduler(
    num_blocks: int = 12,
    windows: Sequence[int | None] = (None,),
    clock: Callable[[], float] = lambda: 1e9,
    **config: object,
) -> Scheduler:
    """A scheduler over `num_blocks` usable blocks; `config` as for `make_config`."""
    engine_config = make_config(**config)  # type: ignore[arg-type]
    spec = make_spec(windows, engine_config.cache_config.block_size)
    return Scheduler(engine_config, spec, num_blocks + 1, clock)


def make_request(
    request_id: str,
    prompt: Sequence[int],
    *,
    n: int = 1,
    max_tokens: int | None = 4,
    outputs: Sequence[Sequence[int]] | None = None,
    arrival_time: float = 0.0,
    priority: int = 0,
    cache_salt: str | None = None,
    weight_version: str = "default",
    num_prompt_logprobs_received: int = 0,
    **params: object,
) -> EngineCoreRequest:
    """A request as the front end sends it; `outputs` are the accepted tokens of each choice of a
    replay.
    """
    states = [ChoiceState(index, list(ids)) for index, ids in enumerate(outputs or [()] * n)]
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(n=n, seed=0, max_tokens=max_tokens, **params),  # type: ignore[arg-type]
        eos_token_id=EOS,
        arrival_time=arrival_time,
        choices=states,
        priority=priority,
        cache_salt=cache_salt,
        weight_version=weight_version,
        num_prompt_logprobs_received=num_prompt_logprobs_received,
    )


def next_token(token_ids: Sequence[int], index: int) -> int:
    """The fake model: a pure function of all tokens so far and the choice index; may be EOS."""
    digest = hashlib.blake2b(bytes(token_ids) + bytes([255, index]), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB_SIZE


def expected_output(
    request: EngineCoreRequest, index: int, max_total: int
) -> tuple[list[int], str, int | None]:
    """(output tokens, finish reason, stop reason) of a choice, straight from the stop rules."""
    params = request.sampling_params
    outputs: list[int] = []
    while True:
        token = next_token(request.prompt_token_ids + outputs, index)
        outputs.append(token)
        if len(outputs) >= params.min_tokens:
            if token == request.eos_token_id and not params.ignore_eos:
                return outputs, "stop", None
            if token in (params.stop_token_ids or ()):
                return outputs, "stop", token
        length = len(request.prompt_token_ids) + len(outputs)
        if len(outputs) == params.max_tokens or length >= max_total:
            return outputs, "length", None


POISON = ("poison",)  # what a choice with an injected fault writes


class _Row:
    def __init__(self, new: NewRequestData) -> None:
        self.token_ids = list(new.token_ids)
        self.tables = [list(table) for table in new.block_ids]
        self.num_prompt_tokens = new.num_prompt_tokens
        wants_scores = new.sampling_params.prompt_logprobs is not None and not new.choice_id.index
        self.num_scored = (
            new.num_prompt_logprobs_received if wants_scores else new.num_prompt_tokens
        )


def prompt_score(token_ids: Sequence[int], position: int) -> TokenLogprobs:
    """What the fake worker says of the prompt token at `position`."""
    return TokenLogprobs([token_ids[position]], [-float(position)], 1)


class FakeWorker:
    """Executes steps at once; the caller decides when their results reach the scheduler."""

    def __init__(self, windows: Sequence[int | None], block_size: int, num_blocks: int) -> None:
        self.windows = windows
        self.block_size = block_size
        self.num_blocks = num_blocks  # usable ones
        self.rows: dict[ChoiceId, _Row] = {}
        self.domains: dict[
            str, str
        ] = {}  # request id -> what else its KV must not be shared across
        self.memory: dict[tuple[int, int], object] = {}  # (block, slot) -> what was written there
        self.fail_next: set[ChoiceId] = set()
        self.forwards = 0  # tokens computed
        self.ever_poisoned: set[str] = set()  # request ids with an injected fault

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for choice_id in step.finished:
            self.rows.pop(choice_id, None)
        for block in step.blocks_to_zero:
            for slot in range(self.block_size):
                self.memory.pop((block, slot), None)
        contents = [
            [self.memory.get((copy.source, slot)) for slot in range(self.block_size)]
            for copy in step.block_copies
        ]
        for copy, content in zip(step.block_copies, contents, strict=True):
            assert 0 < copy.source <= self.num_blocks and 0 < copy.target <= self.num_blocks
            for slot, value in enumerate(content):
                self.memory[copy.target, slot] = value
        starts = self._apply(step)
        assert list(starts) == list(dict.fromkeys(starts))
        assert starts.keys() == step.num_scheduled_tokens.keys()
        for choice_id, start in starts.items():
            self._write(choice_id, start, step.num_scheduled_tokens[choice_id])
        output = ModelRunnerOutput(step.step, {}, {}, {})
        for choice_id, start in starts.items():
            self._read(choice_id, start, step.num_scheduled_tokens[choice_id], output)
        return output

    def _apply(self, step: SchedulerOutput) -> dict[ChoiceId, int]:
        starts = {}
        for new in step.new_requests:
            assert new.choice_id not in self.rows
            self.rows[new.choice_id] = _Row(new)
            starts[new.choice_id] = new.num_computed_tokens
        for cached in step.cached_requests:
            row = self.rows[cached.choice_id]
            if cached.resumed:
                row.tables = [list(table) for table in cached.new_block_ids]
            else:
                for table, more in zip(row.tables, cached.new_block_ids, strict=True):
                    table.extend(more)
            assert cached.choice_id not in starts
            starts[cached.choice_id] = cached.num_computed_tokens
        return starts

    def _content(self, choice_id: ChoiceId, group: int, position: int) -> object:
        tokens = self.rows[choice_id].token_ids[: position + 1]
        return (group, self.domains.get(choice_id.request_id, ""), tuple(tokens))

    def _write(self, choice_id: ChoiceId, start: int, count: int) -> None:
        row = self.rows[choice_id]
        end = start + count
        assert 0 <= start < end <= len(row.token_ids)
        self.forwards += count
        failing = choice_id in self.fail_next
        for group, table in enumerate(row.tables):
            assert len(table) == -(-end // self.block_size), "tables reach exactly the last token"
            for position in range(start, end):
                block, slot = table[position // self.block_size], position % self.block_size
                assert 0 < block <= self.num_blocks, f"{choice_id} writes to block {block}"
                content = POISON if failing else self._content(choice_id, group, position)
                self.memory[block, slot] = content

    def _read(self, choice_id: ChoiceId, start: int, count: int, output: ModelRunnerOutput) -> None:
        row = self.rows[choice_id]
        end = start + count
        failed = choice_id in self.fail_next
        for group, (table, window) in enumerate(zip(row.tables, self.windows, strict=True)):
            first = 0 if window is None else max(0, start - window + 1)
            for position in range(first, end):
                block, slot = table[position // self.block_size], position % self.block_size
                found = self.memory.get((block, slot))
                if found == POISON:
                    failed = True
                    continue
                expected = self._content(choice_id, group, position)
                assert found == expected, (
                    f"{choice_id} group {group} position {position} block {block}:"
                    f" expected {expected}, found {found}"
                )
        if failed:
            if choice_id in self.fail_next:
                self.fail_next.discard(choice_id)
                self.ever_poisoned.add(choice_id.request_id)
            assert choice_id.request_id in self.ever_poisoned, f"{choice_id} read bad values"
            output.failed[choice_id] = NAN
            if end == len(row.token_ids):
                row.token_ids.append(0)  # keeps later steps in flight well-formed
            return
        last = min(end + 1, row.num_prompt_tokens)
        if max(start + 1, row.num_scored) < last:
            scored = range(max(start + 1, row.num_scored), last)
            scores = [prompt_score(row.token_ids, position) for position in scored]
            output.prompt_logprobs[choice_id] = scores
            row.num_scored = last
        if end == len(row.token_ids):
            token = next_token(row.token_ids, choice_id.index)
            row.token_ids.append(token)
            output.sampled[choice_id] = SampledTokens([token])


class StepWorker(Protocol):
    """Whatever executes steps: the fake worker, or a real one."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput: ...


class Engine:
    """A scheduler and a worker, with up to `depth` steps whose results have not arrived."""

    def __init__(
        self,
        config: EngineConfig,
        spec: KVCacheSpec,
        num_blocks: int,
        worker: StepWorker,
        depth: int = 1,
        clock: Callable[[], float] = lambda: 1e9,
    ) -> None:
        """`num_blocks` are usable ones: without the null block."""
        self.scheduler = Scheduler(config, spec, num_blocks + 1, clock)
        self.config = config
        self.step_worker = worker
        self.depth = depth
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.tokens: dict[ChoiceId, list[int]] = {}  # output of every choice ever added
        self.finished: dict[ChoiceId, EngineCoreOutput] = {}  # the last message of each
        self.scores: dict[
            ChoiceId, list[TokenLogprobs]
        ] = {}  # of prompt tokens, from the second on
        self.first_scheduled: dict[ChoiceId, float] = {}
        self.num_steps = 0
        self.alone_until: dict[ChoiceId, int] = {}  # of suspects
        self.num_alone_steps = 0

    @property
    def max_total(self) -> int:
        """Prompt plus output tokens at which a choice ends by length."""
        return min(self.config.model_config.max_model_len, self.scheduler.max_request_tokens)

    def add(self, request: EngineCoreRequest) -> None:
        self.scheduler.add_request(request)
        for choice in request.choices:
            choice_id = ChoiceId(request.request_id, choice.index)
            self.tokens[choice_id] = list(choice.output_token_ids)
            self.alone_until[choice_id] = choice.runs_alone_until
            self.scores[choice_id] = [
                prompt_score(request.prompt_token_ids, position)
                for position in range(1, request.num_prompt_logprobs_received)
            ]

    def schedule(self) -> SchedulerOutput | None:
        """Hand out a step and execute it; its result waits in `in_flight`."""
        step = self.scheduler.schedule()
        if step is None:
            return None
        self.num_steps += 1
        limits = self.config.scheduler_config
        assert sum(step.num_scheduled_tokens.values()) <= limits.max_num_batched_tokens
        assert len(step.num_scheduled_tokens) <= limits.max_num_seqs
        assert self.scheduler.stats().num_running <= limits.max_num_seqs
        self._check_alone(step)
        self.in_flight.append((step, self.step_worker.execute(step)))
        return step

    def _check_alone(self, step: SchedulerOutput) -> None:
        """A suspect has the step, and the workers, for itself until it is past its point."""
        for data in (*step.new_requests, *step.cached_requests):
            before, point = data.num_computed_tokens, self.alone_until.get(data.choice_id, 0)
            if before < point:
                assert len(step.num_scheduled_tokens) == 1
                assert not any(other.num_scheduled_tokens for other, _ in self.in_flight)
                self.num_alone_steps += 1
            if before + step.num_scheduled_tokens[data.choice_id] >= point:
                self.alone_until.pop(data.choice_id, None)  # preempted, it may start again

    def deliver(self) -> list[EngineCoreOutput]:
        """The oldest result reaches the scheduler."""
        outputs = self.scheduler.update_from_output(*self.in_flight.popleft())
        for output in outputs:
            self.record(output)
        return outputs

    def record(self, output: EngineCoreOutput) -> None:
        choice_id = ChoiceId(output.request_id, output.index)
        assert choice_id not in self.finished, "a choice ends once, and is silent afterwards"
        assert output.start == len(self.tokens[choice_id]), "no token is lost or sent twice"
        self.tokens[choice_id] += output.new_token_ids
        if output.prompt_logprobs is not None:
            assert output.prompt_logprobs and choice_id.index == 0
            assert output.prompt_logprobs_start == len(self.scores[choice_id]) + 1
            self.scores[choice_id] += output.prompt_logprobs
        if output.first_scheduled_time is not None:
            assert choice_id not in self.first_scheduled, "sent once, with the first output"
            self.first_scheduled[choice_id] = output.first_scheduled_time
        assert output.new_token_ids == [] or choice_id in self.first_scheduled
        if output.finish_reason is not None:
            self.finished[choice_id] = output

    def abort(self, request_id: str, index: int | None = None) -> None:
        for output in self.scheduler.abort(request_id, index):
            assert output.finish_reason == "abort"
            self.record(output)

    def step(self) -> list[EngineCoreOutput]:
        """Hand out steps up to `depth`, then deliver one result."""
        while len(self.in_flight) < self.depth:
            if self.schedule() is None:
                break
        if self.in_flight:
            return self.deliver()
        assert not self.scheduler.stats().num_requests, "stuck with nothing in flight"
        return []

    def drain(self, max_steps: int = 2000) -> None:
        """Step until everything has ended and the worker has forgotten it."""
        for _ in range(max_steps):
            if not self.in_flight and not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps: {self.scheduler.stats()}")

    def assert_idle(self) -> None:
        """Everything is back to the base line."""
        stats = self.scheduler.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert (stats.num_requests, stats.num_running, stats.num_waiting) == (0, 0, 0)
        assert self.scheduler.check_integrity() == []


class FakeEngine(Engine):
    """An engine over the fake worker; `config` as for `make_config`."""

    def __init__(
        self,
        num_blocks: int = 12,
        windows: Sequence[int | None] = (None,),
        depth: int = 1,
        clock: Callable[[], float] = lambda: 1e9,
        **config: object,
    ) -> None:
        engine_config = make_config(**config)  # type: ignore[arg-type]
        block_size = engine_config.cache_config.block_size
        self.worker = FakeWorker(windows, block_size, num_blocks)
        spec = make_spec(windows, block_size)
        super().__init__(engine_config, spec, num_blocks, self.worker, depth, clock)

    def add(self, request: EngineCoreRequest) -> None:
        super().add(request)
        domain = (request.cache_salt, request.weight_version)
        self.worker.domains[request.request_id] = repr(domain)

    def assert_idle(self) -> None:
        super().assert_idle()
        assert not self.worker.rows

    def expected(self, request: EngineCoreRequest, index: int) -> tuple[list[int], str, int | None]:
        """(output tokens, finish reason, stop reason) that the pure function gives."""
        return expected_output(request, index, self.max_total)

    def assert_output(self, request: EngineCoreRequest, index: int = 0) -> None:
        """A finished choice has exactly the output that the pure function gives."""
        choice_id = ChoiceId(request.request_id, index)
        end = self.finished[choice_id]
        got = (self.tokens[choice_id], end.finish_reason, end.stop_reason)
        assert got == self.expected(request, index)
        prompt = request.prompt_token_ids
        is_scored = request.sampling_params.prompt_logprobs is not None and index == 0
        wanted = [prompt_score(prompt, i) for i in range(1, len(prompt))] if is_scored else []
        assert self.scores[choice_id] == wanted
