"""A real scheduler on a real (tiny) model: whatever happens around a request, its output is the
same.

Hypothesis drives starts, steps (with results delayed by one step or not), aborts, cache resets and
forks in a pool of a dozen blocks; every finished choice must equal the same request run alone, in
one chunk, without prefix cache, and log-probabilities must agree within 1e-3.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headrace.configs.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from headrace.configs.model_files.model_info import read_model_info
from headrace.configs.sampling_params import SamplingParams
from headrace.engine_core.messages import ChoiceState, EngineCoreOutput, EngineCoreRequest
from headrace.engine_core.scheduler import Scheduler
from headrace.workers.protocol import ModelRunnerOutput, SchedulerOutput
from headrace.workers.worker import Worker

pytestmark = pytest.mark.slow

BLOCK_SIZE = 4
VOCAB = 32
WINDOW = 10
MAX_MODEL_LEN = 64
NUM_EXAMPLES = 200


def save_tiny_model(kind: str, directory: Path) -> Path:
    """A random model in transformers' format, small enough for thousands of steps."""
    import transformers

    common = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": MAX_MODEL_LEN,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.5,
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(num_hidden_layers=2, **common)
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.Gemma3TextConfig(
            num_hidden_layers=2, sliding_window=WINDOW, query_pre_attn_scalar=8,
            layer_types=["sliding_attention", "full_attention"], **common,
        )  # fmt: skip
        model = transformers.Gemma3ForCausalLM(config)
    model.save_pretrained(directory)
    return directory


def make_config(path: Path) -> EngineConfig:
    """A pool of a dozen blocks and the null block; half as many again for two groups of layers."""
    info = read_model_info(path)
    num_blocks = 19 if "layer_types" in info.hf_config else 13
    model = ModelConfig(
        str(path), str(path), str(path), ("tiny",), info.architecture, info.hf_config, "float32",
        MAX_MODEL_LEN, VOCAB, 1,
    )  # fmt: skip
    return EngineConfig(
        model,
        CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks),
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=12),
    )


@dataclass
class Engine:
    """Scheduler and worker, with results that may arrive late."""

    config: EngineConfig
    worker: Worker
    scheduler: Scheduler
    pending: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = field(default_factory=deque)

    def schedule(self) -> bool:
        step = self.scheduler.schedule()
        if step is None:
            return False
        assert (
            step.total_num_scheduled_tokens <= self.config.scheduler_config.max_num_batched_tokens
        )
        assert len(step.num_scheduled_tokens) <= self.config.scheduler_config.max_num_seqs
        self.pending.append((step, self.worker.execute_model(step)))
        return True

    def deliver(self) -> list[EngineCoreOutput]:
        return self.scheduler.update_from_output(*self.pending.popleft())


class Machines:
    """One loaded worker; fresh cache, table and scheduler for each engine."""

    def __init__(self, path: Path) -> None:
        self.config = make_config(path)
        self.worker = Worker(self.config)
        self.worker.init_device()
        torch.set_num_threads(1)
        self.worker.load_model(lambda phase: None)
        self._alone: dict[tuple[tuple[int, ...], int, int, int], tuple[list[int], list[float]]] = {}

    def engine(self, prefix_caching: bool, budget: int = 12) -> Engine:
        cache = replace(self.config.cache_config, enable_prefix_caching=prefix_caching)
        limits = replace(self.config.scheduler_config, max_num_batched_tokens=budget)
        config = replace(self.config, cache_config=cache, scheduler_config=limits)
        info = self.worker.init_kv_cache()
        return Engine(config, self.worker, Scheduler(config, info.kv_cache_spec, info.num_blocks))

    def alone(
        self, prompt: tuple[int, ...], seed: int, index: int, max_tokens: int
    ) -> tuple[list[int], list[float]]:
        """Tokens and log-probabilities of a choice run by itself in one chunk."""
        key = (prompt, seed, index, max_tokens)
        if key not in self._alone:
            engine = self.engine(prefix_caching=False, budget=MAX_MODEL_LEN)
            request = make_request("alone", prompt, seed, max_tokens, [index])
            engine.scheduler.add_request(request)
            tokens: list[int] = []
            logprobs: list[float] = []
            while engine.schedule():
                for output in engine.deliver():
                    tokens += output.new_token_ids
                    logprobs += [entry.logprobs[0] for entry in output.logprobs or []]
            self._alone[key] = tokens, logprobs
        return self._alone[key]


def make_request(
    name: str, prompt: tuple[int, ...], seed: int, max_tokens: int, indexes: list[int]
) -> EngineCoreRequest:
    temperature = 0.0 if seed == 0 else 1.0
    params = SamplingParams(
        temperature=temperature, seed=seed, max_tokens=max_tokens, logprobs=1, stop_token_ids=[3]
    )
    params.n = max(indexes) + 1
    params.add_eos_token_ids(1, ())
    choices = [ChoiceState(index) for index in indexes]
    return EngineCoreRequest(name, list(prompt), params, 1, 0.0, choices)


PREFIXES = ((5, 6, 7, 8, 9, 10, 11, 12, 13), (5, 6, 7, 8, 20, 21, 22, 23, 24, 25, 26, 27, 28))


def make_machine(machines: Machines) -> type[RuleBasedStateMachine]:
    class BatchMachine(RuleBasedStateMachine):
        """Random life around requests; `expected` knows what each choice must give."""

        @initialize(prefix_caching=st.booleans(), depth=st.integers(1, 2))
        def start(self, prefix_caching: bool, depth: int) -> None:
            # The expectations of earlier examples are cached; new ones are made before this
            # engine's
            # table exists, since both share the worker.
            self.engine = machines.engine(prefix_caching)
            self.depth = depth
            self.requests: dict[str, tuple[tuple[int, ...], int, int]] = {}
            self.got: dict[tuple[str, int], tuple[list[int], list[float]]] = {}
            self.ended: set[tuple[str, int]] = set()
            self.aborted: set[tuple[str, int]] = set()

        @rule(
            prefix=st.sampled_from(PREFIXES), keep=st.integers(1, 13),
            tail=st.lists(st.integers(4, VOCAB - 1), max_size=6), seed=st.integers(0, 2),
            n=st.integers(1, 3), max_tokens=st.integers(1, 12),
        )  # fmt: skip
        def add(
            self, prefix: tuple[int, ...], keep: int, tail: list[int], seed: int, n: int,
            max_tokens: int,
        ) -> None:  # fmt: skip
            prompt = prefix[:keep] + tuple(tail)
            n = 1 if seed == 0 else n
            name = f"r{len(self.requests)}"
            self.requests[name] = (prompt, seed, max_tokens)
            request = make_request(name, prompt, seed, max_tokens, list(range(n)))
            self.engine.scheduler.add_request(request)
            self.got.update({(name, index): ([], []) for index in range(n)})

        @rule()
        def step(self) -> None:
            if not self.engine.schedule() or len(self.engine.pending) >= self.depth:
                self.deliver()

        @precondition(lambda self: len(self.engine.pending) > 0)
        @rule()
        def deliver(self) -> None:
            if not self.engine.pending:
                return
            for output in self.engine.deliver():
                assert output.fault is None
                tokens, logprobs = self.got[output.request_id, output.index]
                assert output.start == len(tokens)
                tokens += output.new_token_ids
                logprobs += [entry.logprobs[0] for entry in output.logprobs or []]
                if output.finish_reason is not None:
                    self.ended.add((output.request_id, output.index))

        @precondition(lambda self: len(self.requests) > 0)
        @rule(data=st.data(), whole=st.booleans())
        def abort(self, data: st.DataObject, whole: bool) -> None:
            name = data.draw(st.sampled_from(sorted(self.requests)))
            index = None if whole else data.draw(st.integers(0, 2))
            for output in self.engine.scheduler.abort(name, index):
                assert output.finish_reason == "abort"
                self.ended.add((name, output.index))
                self.aborted.add((name, output.index))

        @rule()
        def reset_prefix_cache(self) -> None:
            self.engine.scheduler.reset_prefix_cache()

        @invariant()
        def accounting_holds(self) -> None:
            if hasattr(self, "engine"):
                assert self.engine.scheduler.check_integrity() == []

        def teardown(self) -> None:
            if not hasattr(self, "engine"):
                return
            for _ in range(2000):
                if not self.engine.schedule() and not self.engine.pending:
                    break
                self.deliver()
                self.accounting_holds()
            assert not self.engine.scheduler.has_unfinished_requests()
            stats = self.engine.scheduler.stats()
            assert (stats.num_requests, stats.num_free_blocks) == (0, stats.num_blocks)
            assert self.ended == set(self.got)
            for (name, index), (tokens, logprobs) in self.got.items():
                want, want_logprobs = machines.alone(
                    self.requests[name][0], self.requests[name][1], index, self.requests[name][2]
                )
                count = len(tokens) if (name, index) in self.aborted else None
                assert tokens == want[:count], (name, index)
                assert logprobs == pytest.approx(want_logprobs[:count], abs=1e-3)

    return BatchMachine


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def machines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Machines]:
    directory = tmp_path_factory.mktemp(request.param)
    yield Machines(save_tiny_model(request.param, directory))


def test_output_does_not_depend_on_what_else_runs(machines: Machines) -> None:
    run_state_machine_as_test(
        make_machine(machines),
        settings=settings(
            max_examples=NUM_EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
