"""Whole models on the native kernels: near transformers, bitwise the same in any circumstances."""

import ctypes
from collections.abc import Callable

import pytest
import torch

from headrace.configs.quantization import INT8
from headrace.configs.sampling_params import SamplingParams
from headrace.kernels.native import NativeKernels, Op, Step, load_kernels
from headrace.workers.model_runner import ModelRunner
from headrace.workers.models import Decoder, build_model, load_weights
from headrace.workers.models.native_decoder import NativeDecoder, obstacle
from headrace.workers.protocol import ChoiceId, TokenLogprobs
from headrace.workers.weight_formats import UNQUANTIZED, WeightFormats
from tests.kernels.native_ops import available_isas
from tests.workers.test_models import prompt_logits
from tests.workers.tiny_models import (
    MAX_MODEL_LEN,
    MODEL_NAMES,
    VOCAB_SIZE,
    StepDriver,
    make_kv_cache,
    make_reference,
    reference_logits,
)

pytestmark = pytest.mark.skipif(not available_isas(), reason="no native kernels on this machine")


@pytest.fixture(scope="module", params=available_isas())
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    loaded = load_kernels(request.param, 2)
    assert loaded is not None
    return loaded


def make_model(
    name: str, kernels: NativeKernels | None, formats: WeightFormats = UNQUANTIZED
) -> Decoder:
    reference = make_reference(name)
    model = build_model(
        type(reference).__name__, reference.config.to_dict(), torch.bfloat16, "test", kernels,
        formats,
    )  # fmt: skip
    model.allocate(MAX_MODEL_LEN)
    weights = {k: v.bfloat16() for k, v in reference.state_dict().items()}
    if reference.config.tie_word_embeddings:
        weights.pop("lm_head.weight")
    with torch.inference_mode():
        load_weights(model, weights.items(), "test")
    return model


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_prompt_logits(name: str, kernels: NativeKernels) -> None:
    """Not further from float32 than torch in bfloat16, and the same for any chunks, bit for bit."""
    model, torch_model = make_model(name, kernels), make_model(name, None)
    assert isinstance(model, NativeDecoder)
    generator = torch.Generator().manual_seed(3)
    token_ids = torch.randint(0, VOCAB_SIZE, (100,), generator=generator).tolist()
    expected = reference_logits(make_reference(name), token_ids)
    whole = prompt_logits(model, token_ids, 100)
    error = (whole - expected).abs().mean()
    assert error < 1.1 * (prompt_logits(torch_model, token_ids, 100) - expected).abs().mean()
    for chunk in (1, 3, 16, 17, 64):
        assert torch.equal(prompt_logits(model, token_ids, chunk), whole)


@pytest.mark.parametrize("name", ("llama-tied", "gemma3"))
def test_prompt_logits_with_an_int8_cache(name: str, kernels: NativeKernels) -> None:
    """Keys and values in 8 bits cost little beside what bfloat16 costs: here, less than as much."""
    model = make_model(name, kernels)
    generator = torch.Generator().manual_seed(3)
    token_ids = torch.randint(0, VOCAB_SIZE, (100,), generator=generator).tolist()
    expected = reference_logits(make_reference(name), token_ids)
    wide = prompt_logits(model, token_ids, 100)
    whole = prompt_logits(model, token_ids, 100, torch.int8)
    assert not torch.equal(whole, wide)
    assert (whole - expected).abs().mean() < 2 * (wide - expected).abs().mean()
    for chunk in (1, 17):
        assert torch.equal(prompt_logits(model, token_ids, chunk, torch.int8), whole)


Result = tuple[list[int], list[TokenLogprobs]]


def run(
    model: Decoder,
    prompts: dict[str, list[int]],
    chunk: int,
    length: int,
    cache_dtype: torch.dtype | None = None,
) -> list[Result]:
    """Tokens and log-probabilities of these prompts, run together."""
    cache = make_kv_cache(model, 800, dtype=cache_dtype)
    runner = ModelRunner(model, cache)
    scores: dict[ChoiceId, list[TokenLogprobs]] = {}

    def execute(step):  # type: ignore[no-untyped-def]
        output = runner.execute(step)
        for choice, sampled in output.sampled.items():
            scores.setdefault(choice, []).extend(sampled.logprobs or [])
        return output

    driver = StepDriver(execute, cache)
    choices = [
        driver.add(
            name, prompt, SamplingParams(temperature=1.0, seed=5, max_tokens=None, logprobs=3)
        )
        for name, prompt in prompts.items()
    ]
    driver.run({c: len(driver.tokens[c]) + length for c in choices}, chunk)
    return [(driver.tokens[c], scores[c]) for c in choices]


def assert_invariant(
    make: Callable[[NativeKernels], Decoder],
    kernels: NativeKernels,
    cache_dtype: torch.dtype | None = None,
) -> None:
    """A request is bitwise the same with any batch mates, in any chunks, on one thread or two."""
    model = make(kernels)
    vocab_size = model.config.vocab_size
    prompt = [(7 * i) % vocab_size for i in range(33)]
    [want] = run(model, {"r": prompt}, 1000, 20, cache_dtype)
    for num_mates, chunk in ((1, 5), (3, 64), (16, 3), (33, 17)):
        mates = {
            f"mate{i}": [(i + 3 * j) % vocab_size for j in range(1 + i)] for i in range(num_mates)
        }
        assert run(model, {**mates, "r": prompt}, chunk, 20, cache_dtype)[-1] == want
    other = load_kernels(kernels.isa, 1)
    assert other is not None
    assert run(make(other), {"r": prompt}, 7, 20, cache_dtype) == [want]


@pytest.mark.parametrize("formats", (UNQUANTIZED, WeightFormats(INT8)), ids=lambda f: f.method)
@pytest.mark.parametrize("name", ("llama-tied", "gemma3"))
def test_a_request_is_the_same_in_any_batch(
    name: str, formats: WeightFormats, kernels: NativeKernels
) -> None:
    assert_invariant(lambda kernels: make_model(name, kernels, formats), kernels)


def test_a_request_is_the_same_in_any_batch_with_an_int8_cache(kernels: NativeKernels) -> None:
    assert_invariant(lambda kernels: make_model("llama-tied", kernels), kernels, torch.int8)


@pytest.mark.parametrize("name", ("llama", "gemma3"))
def test_a_step_in_slices(
    name: str, kernels: NativeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers may do something else between any two operations of the plan."""
    model = make_model(name, kernels)
    token_ids = [(5 * i) % VOCAB_SIZE for i in range(40)]
    whole = prompt_logits(model, token_ids, 13)
    run_all, num_slices = kernels.run, 0

    def run_slices(ops: "ctypes.Array[Op]", step: Step, first: int, last: int | None) -> None:
        nonlocal num_slices
        for index in range(first, len(ops) if last is None else last):
            run_all(ops, step, index, index + 1)
            num_slices += 1

    monkeypatch.setattr(kernels, "run", run_slices)
    assert torch.equal(prompt_logits(model, token_ids, 13), whole)
    assert num_slices > 4 * len(model.layers)


@pytest.mark.parametrize("cache_dtype", (torch.bfloat16, torch.int8))
@pytest.mark.parametrize("block_size", (16, 3))
def test_a_fork_goes_on_as_its_parent(
    block_size: int, cache_dtype: torch.dtype, kernels: NativeKernels
) -> None:
    """Its last block is a copy, of which the parent's tokens fill a part."""
    model = make_model("gemma3", kernels)
    cache = make_kv_cache(model, 400, block_size, cache_dtype)
    driver = StepDriver(ModelRunner(model, cache).execute, cache)
    parent = driver.add("r", [(7 * i) % VOCAB_SIZE for i in range(30)])
    driver.run({parent: 40})
    child = driver.fork(parent, 1)
    driver.run({child: 40})
    assert driver.tokens[child] == driver.tokens[parent]


def test_what_the_kernels_cannot_do_runs_on_torch(kernels: NativeKernels) -> None:
    config = make_model("llama", None).config
    assert obstacle(config, torch.bfloat16) is None
    assert "float64" in str(obstacle(config, torch.float64))
    reference = make_reference("llama")
    changed = {**reference.config.to_dict(), "hidden_act": "gelu"}
    model = build_model("LlamaForCausalLM", changed, torch.bfloat16, "test", kernels)
    assert not isinstance(model, NativeDecoder)
    assert "activation gelu" in str(obstacle(model.config, torch.bfloat16))
