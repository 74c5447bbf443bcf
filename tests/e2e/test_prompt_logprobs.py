"""Scores of prompts: equal to transformers', whatever the cache, the chunks and the batch (PP15,
PP24, A14).
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from headrace.configs.config import LogprobsMode
from headrace.engine_core.messages import EngineCoreOutput, EngineCoreRequest
from headrace.workers.layers import Embedding
from headrace.workers.logprobs import SCORE_COPIES, SCORE_ROWS
from headrace.workers.model_runner import ModelRunner
from headrace.workers.models import StepPlanner
from headrace.workers.protocol import (
    CachedRequestData,
    ChoiceId,
    KVCacheSpec,
    NewRequestData,
    SchedulerOutput,
    TokenLogprobs,
)
from tests.e2e.tiny_engine import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    VOCAB,
    Engine,
    Machines,
    make_request,
    save_tiny_model,
)

PROMPT = tuple(5 + i * i % 27 for i in range(3 * BLOCK_SIZE + 2))
NUM_TOKENS, CHUNK = 8192, 2048  # of the long prompt


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def machines(directory: Path) -> Iterator[Machines]:
    yield Machines(directory, num_blocks=200)


def ask(
    name: str,
    prompt: tuple[int, ...] = PROMPT,
    num_top: int | None = 3,
    n: int = 1,
    max_tokens: int = 4,
) -> EngineCoreRequest:
    request = make_request(name, prompt, 0 if n == 1 else 1, max_tokens, list(range(n)))
    request.sampling_params.prompt_logprobs = num_top
    return request


def run(engine: Engine) -> list[EngineCoreOutput]:
    outputs = []
    while engine.schedule():
        outputs += engine.deliver()
    return outputs


def scores_of(outputs: list[EngineCoreOutput], name: str) -> list[TokenLogprobs]:
    """All entries, checked to be those of choice 0 and in order, from the second token on."""
    entries: list[TokenLogprobs] = []
    for output in outputs:
        if output.request_id == name and output.prompt_logprobs is not None:
            assert output.index == 0 and output.prompt_logprobs_start == len(entries) + 1
            entries += output.prompt_logprobs
    return entries


def tokens_of(outputs: list[EngineCoreOutput], name: str) -> list[int]:
    return [t for output in outputs if output.request_id == name for t in output.new_token_ids]


def assert_equal(got: list[TokenLogprobs], want: list[TokenLogprobs]) -> None:
    """To the near-tie rule: the torch references may differ in the last bits."""
    assert len(got) == len(want)
    for entry, other in zip(got, want, strict=True):
        assert entry.token_ids[0] == other.token_ids[0] and entry.rank == other.rank
        assert entry.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.fixture(scope="module")
def reference(directory: Path) -> torch.Tensor:
    """Logits of transformers for the prompt, [len(PROMPT), VOCAB] float32."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(torch.tensor([PROMPT])).logits[0]
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("budget", [3, 7, MAX_MODEL_LEN])
@pytest.mark.parametrize("num_top", [0, 1, 5, VOCAB])
def test_scores_equal_those_of_transformers(
    machines: Machines, reference: torch.Tensor, num_top: int, budget: int
) -> None:
    engine = machines.engine(prefix_caching=True, budget=budget)
    engine.scheduler.add_request(ask("r", num_top=num_top))
    entries = scores_of(run(engine), "r")
    logprobs = reference.double().log_softmax(dim=-1)
    assert len(entries) == len(PROMPT) - 1
    for position, entry in enumerate(entries):
        row, token = logprobs[position], PROMPT[position + 1]
        assert entry.token_ids[0] == token
        assert entry.logprobs == pytest.approx(row[entry.token_ids].tolist(), abs=1e-3)
        assert entry.rank == 1 + int((row > row[token]).sum())
        best = row.sort(descending=True).values[:num_top]
        assert entry.logprobs[1:] == pytest.approx(best.tolist(), abs=1e-3)
        assert len(set(entry.token_ids[1:])) == num_top


@pytest.mark.slow
def test_a14(machines: Machines) -> None:
    """Plain; again; again with scores; and with the cache off in chunks of five."""
    engine = machines.engine(prefix_caching=True)
    outputs = {}
    for name, num_top in (("plain", None), ("again", None), ("scored", 1)):
        engine.scheduler.add_request(ask(name, num_top=num_top))
        outputs[name] = run(engine)
    cold = machines.engine(prefix_caching=False, budget=5)
    cold.scheduler.add_request(ask("cold", num_top=1))
    outputs["cold"] = run(cold)
    texts = [tokens_of(outputs[name], name) for name in outputs]
    assert texts[0] and all(text == texts[0] for text in texts)
    cached = {name: output[-1].num_cached_tokens for name, output in outputs.items()}
    assert cached == {"plain": 0, "again": 3 * BLOCK_SIZE, "scored": 0, "cold": 0}
    scored, unscored = scores_of(outputs["scored"], "scored"), scores_of(outputs["cold"], "cold")
    assert len(scored) == len(PROMPT) - 1  # the front end puts null before them
    assert_equal(scored, unscored)
    assert not scores_of(outputs["plain"], "plain")


@pytest.mark.slow
def test_batch_mates_and_choices_do_not_matter(machines: Machines) -> None:
    alone = machines.engine(prefix_caching=False, budget=MAX_MODEL_LEN)
    alone.scheduler.add_request(ask("r"))
    want = scores_of(run(alone), "r")
    engine = machines.engine(prefix_caching=True, budget=11)
    for i in range(3):
        engine.scheduler.add_request(ask(f"mate{i}", PROMPT[i:] + PROMPT[:i], num_top=i))
    engine.scheduler.add_request(ask("r", n=3))
    outputs = run(engine)
    assert_equal(scores_of(outputs, "r"), want)
    assert {output.index for output in outputs if output.request_id == "r"} == {0, 1, 2}
    for i in range(3):
        assert len(scores_of(outputs, f"mate{i}")) == len(PROMPT) - 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits", "processed_logprobs"])
def test_scores_of_prompts_are_raw_in_every_mode(
    machines: Machines, reference: torch.Tensor, mode: LogprobsMode
) -> None:
    """Although the sampled tokens are biased out of all proportion."""
    engine = machines.engine(prefix_caching=False)
    worker = engine.worker
    assert worker._model is not None
    worker._runner = ModelRunner(worker._model, worker.kv_cache, mode)
    request = ask("r", num_top=2)
    request.sampling_params.logit_bias = {7: 100.0}
    engine.scheduler.add_request(request)
    outputs = run(engine)
    assert tokens_of(outputs, "r") == [7] * 4
    wanted = reference if mode.endswith("logits") else reference.log_softmax(dim=-1)
    for position, entry in enumerate(scores_of(outputs, "r")):
        row = wanted[position]
        assert entry.logprobs == pytest.approx(row[entry.token_ids].tolist(), abs=1e-3)
        assert entry.logprobs[1:] == pytest.approx(row.topk(2).values.tolist(), abs=1e-3)


@pytest.mark.slow
def set_row(embedding: Embedding, row: torch.Tensor) -> None:
    """The embedding of token 31, [1, hidden_size]."""
    if embedding.packed:
        embedding.packed[0].fill(row, 31)
    else:
        embedding.weight[31] = row[0]


def test_bad_values_in_a_prompt_fail_that_request(machines: Machines) -> None:
    """Before the last chunk, too: no token was sampled there."""
    engine = machines.engine(prefix_caching=True, budget=8)
    model = engine.worker._model
    assert model is not None
    embedding = model.embedding
    own = embedding(torch.tensor([31])) / embedding.scale
    with torch.inference_mode():
        set_row(embedding, torch.full_like(own, torch.nan))
        engine.scheduler.add_request(ask("bad", (*PROMPT[:3], 31, *PROMPT[3:])))
        engine.scheduler.add_request(ask("good"))
        outputs = run(engine)
        set_row(embedding, own)
    end = [output for output in outputs if output.request_id == "bad"][-1]
    assert len(scores_of(outputs, "bad")) < 3
    assert end.fault is not None and end.fault.code == "non_finite_logits"
    tied = model.head is None  # then the head has the bad row, too, and nothing is good
    assert tied or len(scores_of(outputs, "good")) == len(PROMPT) - 1
    stats = engine.scheduler.stats()
    assert stats.num_free_blocks == stats.num_blocks and engine.scheduler.check_integrity() == []


def peak_bytes(record: profile) -> int:
    """The most memory that tensors took at once beyond what was there when the record began."""
    profiler = record.profiler
    assert profiler is not None and profiler.kineto_results is not None
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


class WideDecoder:
    """No layers, a wide vocabulary: all that costs memory is the scores."""

    vocab = 32_000
    hidden_size = 16
    kernels = None

    def __init__(self, machines: Machines) -> None:
        model = machines.worker._model
        assert model is not None
        self.config = replace(model.config, vocab_size=self.vocab)
        self.dtype = torch.float32
        self.max_model_len = 9000
        generator = torch.Generator().manual_seed(0)
        self.head = torch.randn(self.vocab, self.hidden_size, generator=generator)
        self.most_rows = 0

    def planners(self, spec: KVCacheSpec) -> list[StepPlanner]:
        return []  # without layers there is nothing to attend to

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.head[token_ids % self.vocab]

    def __call__(self, embedded: torch.Tensor, *_: object) -> torch.Tensor:
        return embedded

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.most_rows = max(self.most_rows, len(hidden))
        return hidden @ self.head.T


def run_long_prompt(model: WideDecoder, machines: Machines, num_top: int | None) -> int:
    """Run the prompt in chunks, drop what comes back; the peak of the tensors' memory."""
    runner = ModelRunner(model, machines.worker.kv_cache)  # type: ignore[arg-type]
    runner.table.num_groups, runner.table.num_blocks = 1, 1 << 20
    params = ask("r", num_top=num_top).sampling_params
    choice, table = ChoiceId("r"), list(range(1, NUM_TOKENS // BLOCK_SIZE + 2))
    token_ids = [token * 7 % model.vocab for token in range(NUM_TOKENS)]
    new = NewRequestData(choice, token_ids, NUM_TOKENS, params, [table], 0)
    num_entries = 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        for start in range(0, NUM_TOKENS, CHUNK):
            cached = [CachedRequestData(choice, [[]], start)] if start else []
            step = SchedulerOutput(0, [] if start else [new], cached, {choice: CHUNK}, [])
            output = runner.execute(step)
            assert not output.failed, output.failed
            num_entries += len(output.prompt_logprobs.get(choice, []))
    assert num_entries == (0 if num_top is None else NUM_TOKENS - 1)
    return peak_bytes(record)


@pytest.mark.slow
def test_pp15_a_long_prompt_stays_inside_the_reserve(machines: Machines) -> None:
    """8k tokens with 20 scores, in four chunks: the peak rises by what `memory_budget` reserves."""
    model = WideDecoder(machines)
    machines.engine(prefix_caching=False)
    plain, scored = (run_long_prompt(model, machines, num_top) for num_top in (None, 20))
    assert model.most_rows == SCORE_ROWS
    reserve = SCORE_ROWS * model.vocab * SCORE_COPIES * 4
    assert CHUNK * model.vocab * 4 > 10 * reserve  # all rows of a chunk at once would not fit
    assert reserve / SCORE_COPIES < scored - plain < reserve
