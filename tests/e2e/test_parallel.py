"""Several workers give what one gives: shards and stages, with preemption, chunks and cache."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.configs.config import EngineConfig, ParallelConfig
from headrace.engine_core.core import EngineCore
from headrace.engine_core.messages import EngineCoreRequest, UtilityCall, UtilityResult
from tests.e2e.tiny_engine import ChoiceOutput, make_config, make_request, save_tiny_model
from tests.kernels.native_ops import available_isas

pytestmark = pytest.mark.slow

Results = dict[tuple[str, int], ChoiceOutput]


def with_workers(config: EngineConfig, tensor: int, pipeline: int) -> EngineConfig:
    parallel = ParallelConfig(
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        distributed_executor_backend="uni" if tensor * pipeline == 1 else "mp",
    )
    return replace(config, parallel_config=parallel)


def requests() -> list[EngineCoreRequest]:
    """More than the pool holds at once, with common prefixes; every variant of sampling."""
    prefix = tuple(range(5, 14))
    made = []
    for number in range(10):
        prompt = (*prefix[: 3 + number % 7], *(20 + number % 8 for _ in range(number)))
        indexes = [0, 1] if number % 4 == 3 else [0]
        made.append(make_request(f"r{number}", prompt, (number + 1) % 3, 18, indexes, number % 5))
    return made


def run(config: EngineConfig) -> tuple[Results, int]:
    """What each choice gets, and how often one was preempted."""
    core = EngineCore(config, 0)
    try:
        results: Results = {}
        waiting = requests()
        while waiting or core.has_work():
            if waiting:  # they come while others run
                core.add_request(waiting.pop(0))
            for output in core.step():
                results.setdefault((output.request_id, output.index), ChoiceOutput()).add(output)
        replies: list[UtilityResult] = []
        core.call(UtilityCall(0, "check_integrity"), replies.append)
        assert [reply.value for reply in replies] == [[]]
        return results, core.stats().num_preemptions
    finally:
        core.close()


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def alone(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EngineConfig, Results]]:
    path = save_tiny_model(request.param, tmp_path_factory.mktemp(request.param))
    config = make_config(path, None)
    results, num_preemptions = run(config)
    assert num_preemptions > 0
    yield config, results


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
def test_as_one_worker(alone: tuple[EngineConfig, Results], tensor: int, pipeline: int) -> None:
    config, want = alone
    got, _ = run(with_workers(config, tensor, pipeline))
    assert got.keys() == want.keys()
    for key, output in got.items():
        assert output.tokens == want[key].tokens, key
        if tensor == 1 and available_isas():  # a cut between layers changes nothing
            assert (output.logprobs, output.scores) == (want[key].logprobs, want[key].scores)
        else:
            assert output.logprobs == pytest.approx(want[key].logprobs, abs=1e-3)
            assert output.scores == pytest.approx(want[key].scores, abs=1e-3)


PROMPTS = ["The capital of France is", "Once upon a time", "def fibonacci(n):", "Water boils at"]


def generate(model: Path, **options: Any) -> list[Any]:
    llm = LLM(
        str(model), max_model_len=256, kv_cache_memory_bytes=64 << 20, max_num_seqs=8,
        max_num_batched_tokens=64, **options,
    )  # fmt: skip
    params = [
        SamplingParams(temperature=0, max_tokens=24, logprobs=0),
        SamplingParams(temperature=1, seed=3, max_tokens=24, logprobs=0),
    ]
    outputs = [out for p in params for out in llm.generate(PROMPTS, p, use_tqdm=False)]
    del llm
    return [
        (list(c.token_ids), [next(iter(entry.values())).logprob for entry in c.logprobs or []])
        for out in outputs
        for c in out.outputs
    ]


def test_smollm2_in_shards_of_its_key_heads(smollm2_gguf: Path) -> None:
    want = generate(smollm2_gguf, dtype="float32")
    got = generate(smollm2_gguf, dtype="float32", tensor_parallel_size=3)
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in want]


@pytest.mark.skipif(not available_isas(), reason="no native kernels on this machine")
def test_smollm2_in_stages_bit_for_bit(smollm2_gguf: Path) -> None:
    """In bfloat16: the residual stream goes over as it is."""
    want = generate(smollm2_gguf, dtype="bfloat16")
    assert generate(smollm2_gguf, dtype="bfloat16", pipeline_parallel_size=2) == want


@pytest.mark.skipif(not available_isas(), reason="no native kernels on this machine")
def test_quantized_weights_are_cut_in_whole_blocks(smollm2_gguf: Path) -> None:
    """As stored, and each request the same beside others and alone."""
    options: dict[str, Any] = {"quantization": "gguf", "tensor_parallel_size": 3}
    llm = LLM(str(smollm2_gguf), max_model_len=256, kv_cache_memory_bytes=64 << 20, **options)
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=0)
    together = llm.generate(PROMPTS, params, use_tqdm=False)
    for prompt, out in zip(PROMPTS, together, strict=True):
        (alone,) = llm.generate(prompt, params, use_tqdm=False)
        assert alone.outputs[0].token_ids == out.outputs[0].token_ids
        assert alone.outputs[0].cumulative_logprob == out.outputs[0].cumulative_logprob
    assert "Paris" in together[0].outputs[0].text
