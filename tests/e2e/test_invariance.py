"""One request, many circumstances: replay from every position, batch mates, chunks, cache,
preemption.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.configs.config import QuantizationMethod
from headrace.configs.quantization import INT8
from headrace.engine_core.messages import ChoiceState
from headrace.workers.models.native_decoder import NativeDecoder
from tests.e2e.tiny_engine import (
    VARIANTS,
    ChoiceOutput,
    Engine,
    Machines,
    make_request,
    save_tiny_gguf,
    save_tiny_model,
)
from tests.kernels.native_ops import available_isas

pytestmark = pytest.mark.slow

PROMPT = (5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17)
MAX_TOKENS = 20
SEEDS = (0, 1)  # 0: greedy
# (seed, variant): every variant, greedy and random ones.
CASES = [(0, 0), (1, 0), (1, 1), (0, 2), (1, 3), (0, 4)]


# Model -> method of quantization. Quantized ones run on the native kernels, the others on torch.
KINDS: dict[str, QuantizationMethod] = {
    "llama": "none",
    "gemma3": "none",
    "gemma3-int8": INT8,
    "llama-gguf": "gguf",
}


def make_machines(kind: str, directory: Path, num_blocks: int) -> Machines:
    method = KINDS[kind]
    if method == "none":
        return Machines(save_tiny_model(kind, directory), num_blocks)
    if not available_isas():
        pytest.skip("no native kernels on this machine")
    if method == "gguf":
        path = save_tiny_gguf(directory / "tiny.gguf")
    else:
        path = save_tiny_model(kind.removesuffix("-int8"), directory)
    machines = Machines(path, num_blocks, method)
    assert isinstance(machines.worker.get_model(), NativeDecoder)
    return machines


@pytest.fixture(scope="module", params=KINDS)
def machines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Machines]:
    """A pool that holds 64 requests; the tests of preemption make their own."""
    directory = tmp_path_factory.mktemp(request.param)
    yield make_machines(request.param, directory, num_blocks=64 * 2 * 9 + 1)


def drain(engine: Engine) -> dict[tuple[str, int], ChoiceOutput]:
    """Run until nothing is left: what each choice got, by request and index."""
    results: dict[tuple[str, int], ChoiceOutput] = {}
    while engine.schedule():
        for output in engine.deliver():
            results.setdefault((output.request_id, output.index), ChoiceOutput()).add(output)
    return results


def assert_same(machines: Machines, got: ChoiceOutput, want: ChoiceOutput) -> None:
    """The same tokens; scores bit by bit on the native kernels, nearly so on torch."""
    assert got.tokens == want.tokens
    if isinstance(machines.worker.get_model(), NativeDecoder):
        assert (got.logprobs, got.scores) == (want.logprobs, want.scores)
    assert got.logprobs == pytest.approx(want.logprobs, abs=1e-3)
    assert got.scores == pytest.approx(want.scores, abs=1e-3)


@pytest.mark.parametrize(("seed", "variant"), CASES)
def test_rebuilt_at_every_position(machines: Machines, seed: int, variant: int) -> None:
    """Master invariant: message plus outputs so far is all the state that a request has."""
    whole = machines.alone(PROMPT, seed, 0, MAX_TOKENS, variant).tokens
    assert len(whole) > 5
    for position in range(len(whole)):
        engine = machines.engine(prefix_caching=position % 2 == 0)
        request = make_request("r", PROMPT, seed, MAX_TOKENS, [0], variant)
        request.choices = [ChoiceState(0, whole[:position])]
        request.num_prompt_logprobs_received = len(PROMPT)
        engine.scheduler.add_request(request)
        starts = []
        rest: list[int] = []
        while engine.schedule():
            for output in engine.deliver():
                starts.append(output.start)
                rest += output.new_token_ids
                assert output.prompt_logprobs is None
        assert rest == whole[position:]
        assert starts[0] == position


@pytest.mark.parametrize(("seed", "variant"), CASES[::2])
@pytest.mark.parametrize("num_mates", [0, 1, 2, 3, 7, 15, 16, 31, 63])
def test_batch_mates(machines: Machines, seed: int, variant: int, num_mates: int) -> None:
    want = machines.alone(PROMPT, seed, 0, MAX_TOKENS, variant)
    engine = machines.engine(prefix_caching=False, budget=128, max_num_seqs=64)
    for i in range(num_mates):
        prompt = tuple(4 + (i + j) % 28 for j in range(1 + i % 15))
        mate = make_request(f"mate{i}", prompt, i % 3, MAX_TOKENS, [0], i % len(VARIANTS))
        engine.scheduler.add_request(mate)
    engine.scheduler.add_request(make_request("r", PROMPT, seed, MAX_TOKENS, [0], variant))
    results = drain(engine)
    assert len(results) == num_mates + 1
    assert_same(machines, results["r", 0], want)


@pytest.mark.parametrize("budget", [4, 5, 7, 12, 64])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_chunks_and_cache(machines: Machines, budget: int, prefix_caching: bool) -> None:
    """Cold, and again with what the first run left in the cache."""
    for seed, variant in CASES[1:5]:
        want = machines.alone(PROMPT, seed, 0, MAX_TOKENS, variant)
        engine = machines.engine(prefix_caching, budget)
        for name in ("cold", "warm"):
            request = make_request(name, PROMPT, seed, MAX_TOKENS, [0], variant)
            engine.scheduler.add_request(request)
            assert_same(machines, drain(engine)[name, 0], want)
        hits = engine.scheduler.stats().prefix_cache_hits
        reads_cache = prefix_caching and "prompt_logprobs" not in VARIANTS[variant]
        assert (hits > 0) == reads_cache


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("llama")])
def test_forced_preemption(kind: str, tmp_path: Path) -> None:
    machines = make_machines(kind, tmp_path, num_blocks=13)
    candidates = [
        (tuple(4 + (i + j) % 28 for j in range(8)), seed, variant)
        for i in range(12)
        for seed, variant in CASES
    ]
    # Requests that do not stop early: four of them need more blocks than there are.
    chosen = [
        (prompt, seed, variant)
        for prompt, seed, variant in candidates
        if len(machines.alone(prompt, seed, 0, MAX_TOKENS, variant).tokens) >= 14
    ][:12]
    assert len(chosen) == 12 and len({variant for _, _, variant in chosen}) > 2
    for start in range(0, len(chosen), 4):
        engine = machines.engine(prefix_caching=False)
        part = chosen[start : start + 4]
        for i, (prompt, seed, variant) in enumerate(part):
            request = make_request(f"r{i}", prompt, seed, MAX_TOKENS, [0], variant)
            engine.scheduler.add_request(request)
        results = drain(engine)
        assert engine.scheduler.stats().num_preemptions > 0
        for i, (prompt, seed, variant) in enumerate(part):
            assert_same(
                machines, results[f"r{i}", 0], machines.alone(prompt, seed, 0, MAX_TOKENS, variant)
            )


def test_choices_repeat_and_differ(machines: Machines) -> None:
    """PP26: `n` choices of one seed differ from one another, and are the same in every run."""
    for variant in range(len(VARIANTS)):
        runs = []
        for prefix_caching in (False, True):
            engine = machines.engine(prefix_caching)
            request = make_request("r", PROMPT, 7, MAX_TOKENS, [0, 1, 2, 3], variant)
            request.sampling_params.temperature = 30.0  # the tiny models are sure of themselves
            engine.scheduler.add_request(request)
            results = drain(engine)
            runs.append([results["r", index].tokens for index in range(4)])
        assert runs[0] == runs[1]
        assert len({tuple(tokens) for tokens in runs[0]}) == 4
