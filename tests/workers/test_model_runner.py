"""Steps by hand: the outputs do not depend on how a request was cut, batched, placed or
interrupted.
"""

import random

import pytest
import torch

from headrace.configs.sampling_params import SamplingParams
from headrace.workers.model_runner import ModelRunner
from headrace.workers.protocol import (
    CachedRequestData,
    ChoiceId,
    NewRequestData,
    SchedulerOutput,
)
from headrace.workers.sampler import SampledRow, Sampler, SamplingRow
from tests.workers.tiny_models import (
    VOCAB_SIZE,
    StepDriver,
    assert_greedy,
    make_decoder,
    make_kv_cache,
    make_reference,
)

FAMILIES = ["llama-tied", "mistral", "qwen2-windows", "qwen3", "gemma3"]
NUM_OUTPUTS = 32
PROMPT = [random.Random(3).randrange(VOCAB_SIZE) for _ in range(45)]


def make_runner(name: str, num_blocks: int = 400) -> ModelRunner:
    model = make_decoder(make_reference(name))
    return ModelRunner(model, make_kv_cache(model, num_blocks))


def make_driver(runner: ModelRunner) -> StepDriver:
    return StepDriver(runner.execute, runner.kv_cache)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("chunk", [10**9, 16, 3, 1])
def test_greedy_equals_transformers_for_every_chunk_size(name: str, chunk: int) -> None:
    driver = make_driver(make_runner(name))
    choice = driver.add("a", PROMPT)
    driver.run({choice: len(PROMPT) + NUM_OUTPUTS}, chunk)
    assert_greedy(make_reference(name), driver.tokens[choice], len(PROMPT))


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_in_a_changing_batch(name: str) -> None:
    """Prompts of awkward lengths in mixed chunks, some finishing while others start."""
    driver = make_driver(make_runner(name))
    rng = random.Random(5)
    lengths, done = {}, []
    for i, length in enumerate((1, 15, 16, 17, 45, 70)):
        choice = driver.add(f"r{i}", [rng.randrange(VOCAB_SIZE) for _ in range(length)])
        lengths[choice] = length + NUM_OUTPUTS
    waiting = list(lengths)
    running = [waiting.pop(), waiting.pop()]
    while running:
        counts = {}
        for choice in running:
            left = len(driver.tokens[choice]) - driver.computed[choice]
            counts[choice] = min(left, rng.choice((1, 7, 30)))
        assert not driver.step(counts).failed
        for choice in [c for c in running if len(driver.tokens[c]) >= lengths[c]]:
            running.remove(choice)
            done.append((driver.tokens[choice], lengths[choice] - NUM_OUTPUTS))
            driver.finish(choice)
        if waiting and (not running or rng.random() < 0.3):
            running.append(waiting.pop())
    assert len(done) == 6
    for tokens, num_prompt_tokens in done:
        assert_greedy(make_reference(name), tokens, num_prompt_tokens)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_resume_after_preemption(name: str) -> None:
    driver = make_driver(make_runner(name))
    choice, other = driver.add("a", PROMPT), driver.add("b", PROMPT[:20])
    driver.run({choice: len(PROMPT) + 10, other: 30})
    driver.preempt(choice)
    driver.run({other: 34})
    driver.run({choice: len(PROMPT) + NUM_OUTPUTS, other: 40}, chunk=20)
    assert_greedy(make_reference(name), driver.tokens[choice], len(PROMPT))
    assert_greedy(make_reference(name), driver.tokens[other], 20)


@pytest.mark.parametrize("num_prompt_tokens", [1, 16, 17, 33, 45])
@pytest.mark.parametrize("name", ["llama-tied", "gemma3"])
def test_fork_shares_full_blocks_and_copies_the_last(name: str, num_prompt_tokens: int) -> None:
    prompt = PROMPT[:num_prompt_tokens]
    driver = make_driver(make_runner(name))
    parent = driver.add("a", prompt)
    driver.run({parent: num_prompt_tokens + 1})
    child = driver.fork(parent, 1)
    driver.step({parent: 1, child: 1})
    driver.finish(parent)
    driver.run({child: num_prompt_tokens + NUM_OUTPUTS})
    assert_greedy(make_reference(name), driver.tokens[child], num_prompt_tokens)


def test_random_choices_depend_on_seed_and_index_alone() -> None:
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=None)
    alone = make_driver(make_runner("llama"))
    first, second = alone.add("a", PROMPT, params), alone.add("a", PROMPT, params, index=1)
    alone.run({first: 60})
    alone.run({second: 60}, chunk=7)
    together = make_driver(make_runner("llama"))
    parent = together.add("x", PROMPT, params)
    together.run({parent: len(PROMPT) + 1})
    child = together.fork(parent, 1, params)
    greedy = together.add("g", PROMPT[:9])
    together.run({parent: 60, child: 60, greedy: 30})
    together.preempt(child)
    together.run({child: 65})
    alone.run({second: 65})
    assert together.tokens[parent] == alone.tokens[first]
    assert together.tokens[child] == alone.tokens[second]
    assert together.tokens[parent] != together.tokens[child][:60]
    assert_greedy(make_reference("llama"), together.tokens[greedy], 9)


def test_replayed_outputs_keep_their_place_in_the_random_stream() -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=None)
    driver = make_driver(make_runner("llama"))
    whole = driver.add("a", PROMPT, params)
    driver.run({whole: len(PROMPT) + 12})
    known = driver.tokens[whole][: len(PROMPT) + 5]
    runner = make_runner("llama")
    choice = ChoiceId("replay")
    new = NewRequestData(choice, known, len(PROMPT), params, [[1, 2, 3, 4]], 0)
    output = runner.execute(SchedulerOutput(1, [new], [], {choice: len(known)}, []))
    assert output.sampled[choice].token_ids == [driver.tokens[whole][len(known)]]


def test_steps_may_run_ahead_of_their_results() -> None:
    """The steps are made before any result is read: counts alone say what happens."""
    runner = make_runner("llama")
    choice, blocks = ChoiceId("a"), [[1, 2, 3, 4]]
    params = SamplingParams(temperature=0.0, max_tokens=None)
    new = NewRequestData(choice, PROMPT, len(PROMPT), params, blocks, 0)
    steps = [SchedulerOutput(0, [new], [], {choice: len(PROMPT)}, [])]
    for i in range(6):
        cached = CachedRequestData(choice, [[]], len(PROMPT) + i)
        steps.append(SchedulerOutput(i + 1, [], [cached], {choice: 1}, []))
    outputs = [runner.execute(step) for step in steps]
    assert [output.step for output in outputs] == list(range(7))
    tokens = [output.sampled[choice].token_ids[0] for output in outputs]
    assert_greedy(make_reference("llama"), PROMPT + tokens, len(PROMPT))


def test_prefill_chunks_get_no_token_and_logprobs_come_if_asked() -> None:
    driver = make_driver(make_runner("llama"))
    asked = SamplingParams(temperature=0.0, max_tokens=None, logprobs=3)
    choice = driver.add("a", PROMPT, asked)
    plain = driver.add("b", PROMPT)
    output = driver.step({choice: 20, plain: 45})
    assert set(output.sampled) == {plain}
    assert output.sampled[plain].logprobs is None
    output = driver.step({choice: 25, plain: 1})
    (logprobs,) = output.sampled[choice].logprobs or []
    assert logprobs.token_ids[0] == output.sampled[choice].token_ids[0]
    assert len(logprobs.token_ids) == 4
    assert logprobs.rank == 1


def test_finished_choices_are_forgotten() -> None:
    runner = make_runner("llama")
    driver = make_driver(runner)
    choices = [driver.add(f"r{i}", PROMPT[: i + 1]) for i in range(5)]
    driver.run(dict.fromkeys(choices, 10))
    assert len(runner.table) == 5
    for choice in choices:
        driver.finish(choice)
    output = driver.step({})
    assert len(runner.table) == 0
    assert (output.sampled, output.failed) == ({}, {})


@pytest.mark.parametrize(
    ("token_ids", "num_prompt_tokens", "blocks", "count", "message"),
    [
        ([1, VOCAB_SIZE], 2, [[9]], 2, "token id"),
        ([1, -1], 2, [[9]], 2, "token id"),
        ([], 0, [[9]], 1, "0 tokens"),
        ([1, 2], 3, [[9]], 2, "prompt of 3"),
        ([1, 2], 2, [[9]], 3, "tokens 0 to 3 of 2"),
        ([1, 2], 2, [[0]], 2, "no block"),
        ([1, 2], 2, [[400]], 2, "block id"),
        ([1, 2], 2, [[-1]], 2, "block id"),
        ([1, 2], 2, [[]], 2, "holds 0 of 2 tokens"),
        ([1, 2], 2, [[9], [10]], 2, "2 of 1 KV groups"),
    ],
)
def test_a_choice_that_cannot_be_prepared_fails_alone(
    token_ids: list[int], num_prompt_tokens: int, blocks: list[list[int]], count: int, message: str
) -> None:
    runner = make_runner("llama")
    bad, good, unknown = ChoiceId("bad"), ChoiceId("good"), ChoiceId("unknown")
    params = SamplingParams(temperature=0.0, max_tokens=None)
    step = SchedulerOutput(
        1,
        [
            NewRequestData(bad, token_ids, num_prompt_tokens, params, blocks, 0),
            NewRequestData(good, PROMPT, len(PROMPT), params, [[1, 2, 3]], 0),
        ],
        [CachedRequestData(unknown, [[]], 3)],
        {bad: count, good: len(PROMPT), unknown: 1},
        [],
    )
    output = runner.execute(step)
    assert set(output.failed) == {bad, unknown}
    assert output.failed[bad].code == "request_failed"
    assert message in output.failed[bad].message
    assert_greedy(make_reference("llama"), PROMPT + output.sampled[good].token_ids, len(PROMPT))


def test_more_tokens_than_max_model_len_fail_alone() -> None:
    runner = make_runner("llama")
    choice = ChoiceId("long")
    params = SamplingParams(temperature=0.0, max_tokens=None)
    new = NewRequestData(choice, [1] * 257, 257, params, [list(range(1, 18))], 0)
    output = runner.execute(SchedulerOutput(1, [new], [], {choice: 257}, []))
    assert "max_model_len 256" in output.failed[choice].message


def test_non_finite_values_stay_with_their_choice_and_its_blocks() -> None:
    runner = make_runner("llama")
    poison = VOCAB_SIZE - 1
    with torch.inference_mode():
        runner.model.embedding.weight[poison] = torch.nan
    driver = make_driver(runner)
    prompt = [token % poison for token in PROMPT]
    good, bad = driver.add("good", prompt), driver.add("bad", [*prompt, poison, 3])
    output = driver.step({good: 45, bad: 47})
    assert set(output.sampled) == {good}
    assert output.failed[bad].code == "non_finite_logits"
    assert "token" not in output.sampled
    dirty = [block for table in driver.tables[bad] for block in table]
    driver.finish(bad)
    runner.execute(SchedulerOutput(9, [], [], {}, [bad], blocks_to_zero=dirty))
    assert torch.isfinite(runner.kv_cache.pool).all()
    driver.run({good: 60})
    assert_greedy(make_reference("llama"), driver.tokens[good], len(prompt))


def test_one_row_that_breaks_the_sampler_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Sampler.sample

    def breaks(self: Sampler, logits: torch.Tensor, rows: list[SamplingRow]) -> list[SampledRow]:
        if any(row.params.seed == 666 for row in rows):
            raise ZeroDivisionError("inside the sampler")
        return original(self, logits, rows)

    monkeypatch.setattr(Sampler, "sample", breaks)
    driver = make_driver(make_runner("llama"))
    good = driver.add("good", PROMPT)
    bad = driver.add("bad", PROMPT, SamplingParams(seed=666, max_tokens=None))
    output = driver.step({good: 45, bad: 45})
    assert set(output.sampled) == {good}
    assert output.failed[bad].message == "ZeroDivisionError: inside the sampler"


def test_a_failing_forward_pass_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner("llama")
    driver = make_driver(runner)
    choice = driver.add("a", PROMPT)

    def breaks(*_: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(runner.model, "forward", breaks)
    with pytest.raises(RuntimeError, match="out of memory"):
        driver.step({choice: 45})
