"""Which weights each worker has: names, shapes, bytes and norms, rank by rank.

    python scripts/workers/inspect_weights.py --model smollm2-135m --tensor-parallel-size 3

A callable sent with `collective_rpc` runs inside every worker, which it gets as its first argument.
"""

import argparse
import re
from typing import Any

from headrace import LLM


def weights_of(worker: Any, pattern: str) -> dict[str, Any]:
    """This worker's place, and its parameters whose name has `pattern`."""
    model = worker.get_model()
    first = model.part.layers.start  # a stage counts its own layers from 0
    rows = []
    for own_name, parameter in model.named_parameters():
        name = re.sub(r"(?<=layers\.)\d+", lambda found: str(first + int(found[0])), own_name)
        if pattern in name:
            # Packed matrices are bytes; their norm would say nothing.
            has_norm = parameter.is_floating_point()
            norm = float(parameter.float().norm()) if has_norm else None
            rows.append([name, list(parameter.shape), parameter.nbytes, norm])
    part = model.part
    return {
        "place": part.place.describe(),
        "layers": [part.layers.start, part.layers.stop],
        "vocab": [part.vocab.start, part.vocab.stop],
        "num_bytes": model.num_weight_bytes,
        "weights": rows,
    }


def main() -> None:
    """Print a table for each rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", type=int, default=1)
    parser.add_argument("--pattern", default="layers.0.", help="part of the names to show")
    args = parser.parse_args()
    llm = LLM(
        args.model,
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
    )
    for found in llm.collective_rpc(weights_of, args=(args.pattern,)):
        first, last = found["layers"]
        print(
            f"{found['place']}: layers {first} to {last - 1}, token ids {found['vocab'][0]} to "
            f"{found['vocab'][1] - 1}, {found['num_bytes'] / 2**20:.1f} MiB"
        )
        for name, shape, num_bytes, norm in found["weights"]:
            shown = "packed" if norm is None else f"norm {norm:.3f}"
            print(f"  {name:50} {shape!s:18} {num_bytes / 2**10:10.1f} KiB  {shown}")
    llm.close()


if __name__ == "__main__":
    main()
