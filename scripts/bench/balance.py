"""How well the router spreads requests over data-parallel replicas: the router alone, simulated.

Replicas here are books: they compute a fixed number of tokens in each step, first come, first
served, keep a prefix cache of limited size, and tell their outstanding tokens some steps late.

    python scripts/bench/balance.py [--requests 10000] [--replicas 8] [--seed 0]
"""

import argparse
import random
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from headrace.configs.sampling_params import SamplingParams
from headrace.engine_core.messages import ChoiceState, EngineCoreRequest
from headrace.engine_core.output_lengths import OutputLengths
from headrace.engine_core.router import Router, prefix_hashes, spread

BLOCK_SIZE = 16
MAX_SEQS = 256
STEP_TOKENS = 512
REPORT_EVERY = 4  # steps
UNBOUNDED = 1 << 30


@dataclass
class Result:
    """`spreads`: largest / mean outstanding tokens over replicas, at each arrival once all work."""

    spreads: list[float] = field(default_factory=list)
    mean_load: float = 0.0
    load_spread: float = 1.0  # of the loads' means over time
    hit_rate: float = 0.0
    best_hit_rate: float = 0.0  # of one cache as large as all together
    decisions: dict[str, int] = field(default_factory=dict)

    def percentile(self, share: float) -> float:
        return sorted(self.spreads)[min(len(self.spreads) - 1, int(share * len(self.spreads)))]


@dataclass
class _Running:
    request: EngineCoreRequest
    prompt_left: int
    output_left: int
    expected: int


class Cache:
    """Whole prefixes by their last hash, the longest unused first; `size` in blocks."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def find_and_add(self, hashes: list[int]) -> int:
        """Leading blocks that were there."""
        found = 0
        while found < len(hashes) and hashes[found] in self._blocks:
            found += 1
        for value in reversed(hashes):
            self._blocks[value] = None
            self._blocks.move_to_end(value)
        while len(self._blocks) > self._size:
            self._blocks.popitem(last=False)
        return found


class Replica:
    """A replica with perfect knowledge of its own work but not of how long outputs become."""

    def __init__(self, cache_blocks: int) -> None:
        self.cache = Cache(cache_blocks)
        self.lengths = OutputLengths()
        self.queue: deque[_Running] = deque()
        self.running: list[_Running] = []
        self.num_received = 0
        self.true_load = 0  # tokens that are really left
        self.told_load = 0  # tokens that it expects to be left

    def add(self, request: EngineCoreRequest, num_output: int, hashes: list[int]) -> int:
        """Queue it; prompt tokens found in the cache."""
        found = self.cache.find_and_add(hashes) * BLOCK_SIZE
        prompt = len(request.prompt_token_ids) - found
        expected = self.lengths.expected(request.sampling_params.max_tokens or 1)
        self.queue.append(_Running(request, prompt, num_output, expected))
        self.num_received += 1
        self.true_load += prompt + num_output
        self.told_load += prompt + expected
        return found

    def step(self) -> list[str]:
        """Compute one step; the requests that have ended."""
        while self.queue and len(self.running) < MAX_SEQS:
            self.running.append(self.queue.popleft())
        budget, ended = STEP_TOKENS, []
        for item in self.running:
            if item.prompt_left:
                taken = min(item.prompt_left, budget)
                item.prompt_left -= taken
                budget -= taken
                self.true_load -= taken
                self.told_load -= taken
            else:
                item.output_left -= 1
                self.true_load -= 1
                self.told_load -= item.expected > 0
                item.expected -= item.expected > 0
                if not item.output_left:
                    self.told_load -= item.expected
                    ended.append(item)
        if ended:
            self.running = [item for item in self.running if item.output_left]
            for item in ended:
                self.lengths.add(item.request.sampling_params.max_tokens or 1, _length_of(item))
        return [item.request.request_id for item in ended]


def _length_of(item: _Running) -> int:
    return int(item.request.request_id.partition("/")[2])


def simulate(
    seed: int = 0,
    *,
    num_requests: int = 10_000,
    num_replicas: int = 8,
    num_prefixes: int = 0,
    tells_length: bool = True,
    num_clients: int = 1,
    load_per_replica: float = 128,
) -> Result:
    """`num_prefixes`: of 512 to 1024 tokens, one before each prompt, each with its popularity.

    `tells_length`: whether limits are what outputs become. `num_clients`: routers, as in several
    API servers, which share nothing. `load_per_replica`: sequences that run there on average.
    """
    rng = random.Random(seed)
    prefixes = [_tokens(rng, rng.randrange(512, 1025)) for _ in range(num_prefixes)]
    weights = [1 / (1 + i) ** 0.6 for i in range(num_prefixes)]
    # A replica can keep twice its share of the prefixes, not all of them.
    blocks = 2 * sum(map(len, prefixes)) // BLOCK_SIZE // num_replicas
    cache_blocks = blocks + 1024 if prefixes else 4096
    replicas = [Replica(cache_blocks) for _ in range(num_replicas)]
    best = Cache(UNBOUNDED)
    routers = [
        Router(first_turn=3 * client, has_others=num_clients > 1) for client in range(num_clients)
    ]
    received = [[0] * num_replicas for _ in routers]
    for router in routers:
        for rank in range(num_replicas):
            router.add_replica(rank, BLOCK_SIZE, cache_blocks)
    result, clock, loads = Result(), 0, [0.0] * num_replicas
    found_tokens = best_tokens = prompt_tokens = 0
    mean_life = 250.0  # steps
    arrival = 0.0
    for number in range(num_requests):
        arrival += rng.expovariate(num_replicas * load_per_replica / mean_life)
        while clock < arrival:
            clock += 1
            for rank, replica in enumerate(replicas):
                for ended in replica.step():
                    for router in routers:
                        router.forget(ended)
                loads[rank] += replica.true_load
                if (clock + rank) % REPORT_EVERY == 0:
                    for router, counts in zip(routers, received, strict=True):
                        router.report(rank, replica.told_load, counts[rank])
        request, num_output = _request(rng, number, prefixes, weights, tells_length)
        client = number % num_clients
        hashes = prefix_hashes(request, BLOCK_SIZE) if prefixes else []
        rank = routers[client].place(request)
        received[client][rank] += 1
        found_tokens += replicas[rank].add(request, num_output, hashes)
        best_tokens += best.find_and_add(hashes) * BLOCK_SIZE
        prompt_tokens += len(request.prompt_token_ids)
        routers[client].lengths.add(request.sampling_params.max_tokens or 1, num_output)
        if number > num_requests // 10:
            result.spreads.append(spread(replica.true_load for replica in replicas))
    result.load_spread = spread(loads)
    result.mean_load = sum(loads) / max(1, clock) / num_replicas
    result.hit_rate = found_tokens / prompt_tokens
    result.best_hit_rate = best_tokens / prompt_tokens
    for router in routers:
        for counts in router.decisions.values():
            for reason, count in counts.items():
                result.decisions[reason] = result.decisions.get(reason, 0) + count
    return result


def _request(
    rng: random.Random,
    number: int,
    prefixes: list[list[int]],
    weights: list[float],
    tells_length: bool,
) -> tuple[EngineCoreRequest, int]:
    """Prompts and outputs of log-normal length: most short, some ten times as long."""
    num_prompt = min(4000, max(4, int(rng.lognormvariate(4.5, 1.0))))
    num_output = min(2000, max(1, int(rng.lognormvariate(5.0, 0.8))))
    prompt = [rng.getrandbits(17)] * num_prompt
    if prefixes:
        prompt = rng.choices(prefixes, weights)[0] + prompt
    params = SamplingParams(max_tokens=num_output if tells_length else 4096)
    name = f"{number}/{num_output}"
    return EngineCoreRequest(name, prompt, params, None, 0.0, [ChoiceState(0)]), num_output


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.getrandbits(17) for _ in range(count)]


SCENES: dict[str, dict[str, object]] = {
    "mixed lengths, known limits": {},
    "mixed lengths, unknown": {"tells_length": False},
    "mixed lengths, 4 API servers": {"num_clients": 4},
    "200 shared prefixes": {"num_prefixes": 200},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"{'':34}outstanding tokens, max/mean          prefix hits")
    print(f"{'':34}  over time     p50     p95           rate    best   seconds")
    for name, scene in SCENES.items():
        began = time.perf_counter()
        result = simulate(
            args.seed, num_requests=args.requests, num_replicas=args.replicas, **scene
        )
        print(
            f"{name:34}{result.load_spread:11.3f}{result.percentile(0.5):8.3f}"
            f"{result.percentile(0.95):8.3f}{result.hit_rate:15.3f}{result.best_hit_rate:8.3f}"
            f"{time.perf_counter() - began:10.2f}   {result.decisions}"
        )


if __name__ == "__main__":
    main()
