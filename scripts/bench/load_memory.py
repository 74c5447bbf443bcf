"""Peak private memory while a worker loads weights, against the size of the packed weights.

usage: python scripts/bench/load_memory.py MODEL [MODEL ...] [--dtype bfloat16] [--limit 1.3]

Each model is loaded in a process of its own. Private memory is what the system calls RssAnon, less
what it was before the load: pages of mapped files, which the system may take away, do not count.
Weights include the rotary tables. The exit code is 1 where a peak is above the limit.
"""

import argparse
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

SAMPLE_S = 0.0005
DEFAULT_LIMIT = 1.3


def private_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def measure(model: str, dtype: str) -> dict[str, int]:
    """Load `model` here; what its weights take, and the peak over the base line, in bytes."""
    from headrace.configs.engine_args import EngineArgs
    from headrace.workers.worker import Worker

    worker = Worker(EngineArgs(model, dtype=dtype).create_engine_config())
    worker.init_device()
    base = peak = private_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(SAMPLE_S):
            peak = max(peak, private_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    worker.load_model(lambda phase: None)
    done.set()
    watcher.join()
    weights = worker.init_kv_cache().memory["weights"]
    return {"weights": weights, "peak": max(peak, private_bytes()) - base}


def main() -> int:
    """Print a line per model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--limit", type=float, default=DEFAULT_LIMIT)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        print(json.dumps(measure(args.models[0], args.dtype)))
        return 0
    above = 0
    for model in args.models:
        command = [sys.executable, "-P", __file__, model, "--dtype", args.dtype, "--here"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout)
        ratio = found["peak"] / found["weights"]
        above += ratio > args.limit
        print(
            f"{model}, {args.dtype}: weights {found['weights'] / 2**20:.0f} MiB, "
            f"peak {found['peak'] / 2**20:.0f} MiB, {ratio:.2f} times"
        )
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
