"""How long the workers take for an all-reduce, by size: in microseconds, the median of each rank.

    python scripts/workers/time_collective.py --tensor-parallel-size 3 --sizes 576 36864

The workers are an engine's own, with its groups, threads and memory; it serves nothing meanwhile.
"""

import argparse
import statistics
import time
from typing import Any

from headrace import LLM


def time_all_reduce(worker: Any, size: int, num_rounds: int) -> float:
    """Median seconds of an all-reduce of `size` float32 values among the shards of a stage."""
    import torch

    shards = worker._groups.shards
    tensor = torch.ones(size)
    seconds = []
    for _ in range(num_rounds):
        shards.barrier()
        began = time.perf_counter()
        shards.all_reduce(tensor)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def main() -> None:
    """Print a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tensor-parallel-size", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 16384, 262144])
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()
    llm = LLM(args.model, tensor_parallel_size=args.tensor_parallel_size)
    for size in args.sizes:
        medians = llm.collective_rpc(time_all_reduce, args=(size, args.rounds))
        shown = ", ".join(f"{1e6 * median:8.1f}" for median in medians)
        print(f"{size:9} values: {shown} us")
    llm.close()


if __name__ == "__main__":
    main()
