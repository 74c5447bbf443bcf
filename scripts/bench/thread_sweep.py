"""Is the default number of threads the right one? Output tokens/s on 1, 2, ... of the allowed CPUs.

headrace takes a thread for each physical core it is allowed to use, and no more than its CPU quota;
here it is allowed fewer and fewer CPUs, in rounds, and the default (all of them) is compared with
the best. One JSON line per run, then the table.

usage: python scripts/bench/thread_sweep.py [MODEL] [--batch-size 8] [--rounds 3] [--counts 1 2]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--counts", type=int, nargs="+", default=range(1, len(allowed) + 1))
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    speeds: dict[int, list[float]] = {count: [] for count in {*args.counts, len(allowed)}}
    for number in range(args.rounds):
        for count, found in sorted(speeds.items()):
            found.append(measure(args, allowed[:count]))
            print(json.dumps({"round": number + 1, "cpus": count, "tokens_per_s": found[-1]}))
    medians = {count: statistics.median(found) for count, found in sorted(speeds.items())}
    best = max(medians.values())
    print(f"\n{'CPUs':<8}{'output tokens/s':>18}{'of the best, %':>18}")
    for count, speed in medians.items():
        note = "  (default)" if count == len(allowed) else ""
        print(f"{count:<8}{speed:>18.1f}{100 * speed / best:>18.1f}{note}")
    if args.json is not None:
        args.json.write_text(json.dumps(speeds, indent=2) + "\n")


def measure(args: argparse.Namespace, cpus: list[int]) -> float:
    """Output tokens/s of one engine that may run on `cpus`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [
            sys.executable, "-m", "headrace", "bench", "latency", args.model, "--disable-tqdm",
            "--batch-size", str(args.batch_size), "--output-len", str(args.output_len),
            "--num-iters-warmup", "1", "--num-iters", "3", "--json", str(file),
        ]  # fmt: skip
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cpus)  # a child starts with what its parent may use
        try:
            subprocess.run(command, check=True, capture_output=True)
        finally:
            os.sched_setaffinity(0, before)
        return float(json.loads(file.read_text())["output_tokens_per_second"])


if __name__ == "__main__":
    main()
