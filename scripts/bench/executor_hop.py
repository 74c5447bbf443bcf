"""What an executor adds to a step: the time of steps in which the workers do nothing.

    python scripts/bench/executor_hop.py uni mp ray --workers 2

Each figure is the median of several runs of many steps, in microseconds per step. The steps are of
32 sequences that decode, so the messages are as large as a server's.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from headrace.configs.config import EngineConfig, ModelConfig, ParallelConfig
from headrace.executors.executor import make_executor
from headrace.workers.protocol import (
    CachedRequestData,
    ChoiceId,
    KVCacheSpec,
    ModelRunnerOutput,
    SampledTokens,
    SchedulerOutput,
    WorkerInfo,
    WorkerSetup,
)

NUM_SEQUENCES = 32
NUM_STEPS = 1000
NUM_RUNS = 5


class EchoWorker:
    """Gives each sequence a token."""

    def __init__(self, config: EngineConfig, setup: WorkerSetup) -> None:
        pass

    def init_device(self) -> None:
        pass

    def load_model(self, progress: Callable[[str], None]) -> None:
        pass

    def init_kv_cache(self) -> WorkerInfo:
        return WorkerInfo(KVCacheSpec((), 0, 1, 1, 1, 1), 0, "", {}, {})

    def warm_up(self) -> None:
        pass

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return ModelRunnerOutput(
            step.step, {choice: SampledTokens([7]) for choice in step.num_scheduled_tokens}
        )

    def shutdown(self) -> None:
        pass


def make_step(number: int) -> SchedulerOutput:
    choices = [ChoiceId(f"1234abcd-{index}") for index in range(NUM_SEQUENCES)]
    cached = [CachedRequestData(choice, [[]], 100 + number) for choice in choices]
    return SchedulerOutput(number, [], cached, dict.fromkeys(choices, 1), [])


def time_backend(backend: str, num_workers: int) -> list[float]:
    """Microseconds per step, of each run."""
    parallel = ParallelConfig(
        tensor_parallel_size=1 if backend == "uni" else num_workers,
        distributed_executor_backend=backend,
        worker_cls="executor_hop.EchoWorker",
    )
    model = ModelConfig("", "", "", ("",), "", {}, "float32", 1, 1, None)
    executor = make_executor(EngineConfig(model, parallel_config=parallel), False, lambda: None)
    executor.start(lambda phase: None)
    times = []
    try:
        step = make_step(1)
        for run in range(NUM_RUNS + 1):
            began = time.perf_counter()
            for _ in range(NUM_STEPS):
                executor.submit(step)
                executor.collect()
            if run > 0:  # the first one warms up
                times.append((time.perf_counter() - began) / NUM_STEPS * 1e6)
    finally:
        executor.shutdown()
    return times


def main() -> None:
    """Print a line for each backend."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backends", nargs="+", choices=["uni", "mp", "ray"])
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))  # where workers find this file
    for backend in args.backends:
        times = time_backend(backend, args.workers)
        print(
            f"{backend:>4}: {statistics.median(times):.0f} us per step "
            f"({min(times):.0f} to {max(times):.0f})"
        )


if __name__ == "__main__":
    main()
