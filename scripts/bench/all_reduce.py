"""How long shards take to sum their parts: in shared memory, as steps do, and over Gloo.

    python scripts/bench/all_reduce.py MODEL --tensor-parallel-size 2 --rows 1 32 512

Rows are of the model's hidden size, parts float32. Each figure is the median of several rounds, in
microseconds for one sum, on the slowest shard.
"""

import argparse
import statistics
from typing import Any

from headrace import LLM

NUM_SUMS = 64  # in a round: about as many as a step has
NUM_ROUNDS = 9


def time_sums(worker: Any, num_rows: int) -> tuple[float, float]:
    """Seconds of a sum in shared memory and over Gloo, on this shard."""
    import time

    import torch

    from headrace.kernels.native import FORMATS, Epilogue, Op, Step
    from headrace.workers.distributed.torch_communicator import TorchCommunicator

    model, shards = worker.get_model(), worker._groups.shards
    total = torch.empty(num_rows, model.config.hidden_size, dtype=model.dtype)
    ops = (Op * NUM_SUMS)(*(shards.sum_op(i % 2, 0, Epilogue.STORE) for i in range(NUM_SUMS)))
    step = Step(num_tokens=num_rows, format=FORMATS[model.dtype])
    step.buffers[0], step.strides[0] = total.data_ptr(), total.stride(0)
    part = torch.ones(total.shape)
    in_memory, over_gloo = [], []
    for _ in range(NUM_ROUNDS):
        shards.barrier()
        began = time.perf_counter()
        model.kernels.run(ops, step)
        in_memory.append((time.perf_counter() - began) / NUM_SUMS)
        shards.barrier()
        began = time.perf_counter()
        for _ in range(NUM_SUMS):
            TorchCommunicator.all_reduce(shards, part)
        over_gloo.append((time.perf_counter() - began) / NUM_SUMS)
    return statistics.median(in_memory), statistics.median(over_gloo)


def main() -> None:
    """Print a line for each number of rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tensor-parallel-size", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 512])
    args = parser.parse_args()
    llm = LLM(args.model, tensor_parallel_size=args.tensor_parallel_size, max_model_len=1024)
    print("  rows   shared memory    Gloo (us)")
    for num_rows in args.rows:
        found = llm.collective_rpc(time_sums, args=(num_rows,))
        in_memory, over_gloo = (1e6 * max(times) for times in zip(*found, strict=True))
        print(f"{num_rows:6} {in_memory:15.1f} {over_gloo:12.1f}")
    llm.close()


if __name__ == "__main__":
    main()
