"""One request, many circumstances: replay from every position, batch mates, chunks, cache,
preemption.
"""

from collections.abc import Iterator

import pytest

from headrace.engine_core.messages import ChoiceState
from tests.e2e.tiny_engine import Engine, Machines, make_request, save_tiny_model

pytestmark = pytest.mark.slow

PROMPT = (5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17)
MAX_TOKENS = 20
SEEDS = (0, 1)  # 0: greedy
Tokens = dict[tuple[str, int], list[int]]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def machines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Machines]:
    """A pool that holds 64 requests; the tests of preemption make their own."""
    directory = save_tiny_model(request.param, tmp_path_factory.mktemp(request.param))
    yield Machines(directory, num_blocks=64 * 2 * 9 + 1)


def drain(engine: Engine) -> tuple[Tokens, dict[tuple[str, int], list[float]]]:
    """Run until nothing is left: tokens and log-probabilities by request and choice."""
    tokens: Tokens = {}
    logprobs: dict[tuple[str, int], list[float]] = {}
    while engine.schedule():
        for output in engine.deliver():
            key = (output.request_id, output.index)
            assert output.fault is None
            tokens.setdefault(key, []).extend(output.new_token_ids)
            logprobs.setdefault(key, []).extend(e.logprobs[0] for e in output.logprobs or [])
    return tokens, logprobs


@pytest.mark.parametrize("seed", SEEDS)
def test_rebuilt_at_every_position(machines: Machines, seed: int) -> None:
    """Master invariant: message plus outputs so far is all the state that a request has."""
    whole, _ = machines.alone(PROMPT, seed, 0, MAX_TOKENS)
    assert len(whole) > 5
    for prefix_caching in (False, True):
        for position in range(len(whole)):
            engine = machines.engine(prefix_caching)
            request = make_request("r", PROMPT, seed, MAX_TOKENS, [0])
            request.choices = [ChoiceState(0, whole[:position])]
            engine.scheduler.add_request(request)
            starts = []
            rest: list[int] = []
            while engine.schedule():
                for output in engine.deliver():
                    starts.append(output.start)
                    rest += output.new_token_ids
            assert rest == whole[position:]
            assert starts[0] == position


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("num_mates", [0, 1, 2, 3, 7, 15, 16, 31, 63])
def test_batch_mates(machines: Machines, seed: int, num_mates: int) -> None:
    want, want_logprobs = machines.alone(PROMPT, seed, 0, MAX_TOKENS)
    engine = machines.engine(prefix_caching=False, budget=128, max_num_seqs=64)
    for i in range(num_mates):
        prompt = tuple(4 + (i + j) % 28 for j in range(1 + i % 15))
        engine.scheduler.add_request(make_request(f"mate{i}", prompt, i % 3, MAX_TOKENS, [0]))
    engine.scheduler.add_request(make_request("r", PROMPT, seed, MAX_TOKENS, [0]))
    tokens, logprobs = drain(engine)
    assert len(tokens) == num_mates + 1
    assert tokens["r", 0] == want
    assert logprobs["r", 0] == pytest.approx(want_logprobs, abs=1e-3)


@pytest.mark.parametrize("budget", [4, 5, 7, 12, 64])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_chunks_and_cache(machines: Machines, budget: int, prefix_caching: bool) -> None:
    """Cold, and again with what the first run left in the cache."""
    for seed in SEEDS:
        want, want_logprobs = machines.alone(PROMPT, seed, 0, MAX_TOKENS)
        engine = machines.engine(prefix_caching, budget)
        for name in ("cold", "warm"):
            engine.scheduler.add_request(make_request(name, PROMPT, seed, MAX_TOKENS, [0]))
            tokens, logprobs = drain(engine)
            assert tokens[name, 0] == want
            assert logprobs[name, 0] == pytest.approx(want_logprobs, abs=1e-3)
        hits = engine.scheduler.stats().prefix_cache_hits
        assert (hits > 0) == prefix_caching


def test_forced_preemption(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = save_tiny_model("llama", tmp_path_factory.mktemp("llama"))
    machines = Machines(directory, num_blocks=13)
    candidates = [
        (tuple(4 + (i + j) % 28 for j in range(8)), seed) for i in range(28) for seed in SEEDS
    ]
    # Requests that do not stop early: four of them need more blocks than there are.
    chosen = [c for c in candidates if len(machines.alone(*c, 0, MAX_TOKENS)[0]) >= 14][:4]
    assert len(chosen) == 4
    engine = machines.engine(prefix_caching=False)
    for i, (prompt, seed) in enumerate(chosen):
        engine.scheduler.add_request(make_request(f"r{i}", prompt, seed, MAX_TOKENS, [0]))
    tokens, logprobs = drain(engine)
    assert engine.scheduler.stats().num_preemptions > 0
    for i, (prompt, seed) in enumerate(chosen):
        want, want_logprobs = machines.alone(prompt, seed, 0, MAX_TOKENS)
        assert tokens[f"r{i}", 0] == want
        assert logprobs[f"r{i}", 0] == pytest.approx(want_logprobs, abs=1e-3)
