"""Compare headrace with other engines on the same model, alternating.

The peers are transformers' `generate` (with KV cache and sdpa attention), vLLM in a Python that has
it, and llama.cpp's `llama-batched-bench` on GGUF files of the same model. All use as many threads;
all generate greedily to fixed lengths; prompts are random, of equal length, and new in each round.
headrace, transformers and vLLM load the same transformers directory in the same dtype (a GGUF model
is converted once, beside its file; vLLM needs a directory with a tokenizer); what --headrace-args
say goes before that, another model included:
'{"model": "FILE.gguf", "quantization": "gguf"}'. Each engine has a process of its own, and those
whose turn it is not are stopped, so that they cannot take a core. Every round is printed; the ratio
of a workload is the median of the ratios of its rounds.

At batch 1 memory is the limit: before each such round the rate is measured at which the machine
reads a buffer of 1 GiB, and headrace's speed is also a share of rate / (bytes read per token):
packed weights with the head, and the keys and values of a context of medium length.

usage: python scripts/bench/offline.py [MODEL] [--workloads 1x32+128 ...] [--rounds 3]
           [--dtype bfloat16] [--threads N] [--headrace-args JSON] [--no-transformers]
           [--vllm-python PATH ...] [--vllm-args JSON]
           [--llama-batched-bench PATH --gguf FILE ...] [--json FILE]
"""

import argparse
import json
import os
import random
import runpy
import statistics
import sys
from pathlib import Path
from typing import Any

from offline_engines import Engine, LlamaEngine, WorkerEngine, Workload

OURS = "headrace"
WORKLOADS = ("1x32+128", "8x32+128", "32x32+128", "64x128+128", "1x1024+1")
VOCABULARY = (1000, 40000)  # prompts are made of these ids


def main() -> None:
    args = parse_arguments()
    path = resolved(args.model)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    engines: list[Engine] = []
    try:
        for engine in start_engines(args, path):
            engines.append(engine)
            print(json.dumps({"engine": engine.name, **engine.facts}), flush=True)
        results = [compare(engines, workload, args) for workload in args.workloads]
    finally:
        for engine in engines:
            engine.close()
    print_table(results, [engine.name for engine in engines])
    if args.json is not None:
        facts = {engine.name: engine.facts for engine in engines}
        options = {"dtype": args.dtype, "threads": args.threads, "rounds": args.rounds,
                   "headrace_args": args.headrace_args}  # fmt: skip
        report = {"options": options, "engines": facts, "workloads": results}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument(
        "--workloads", type=Workload.parse, nargs="+", metavar="BATCHxPROMPT+OUTPUT",
        default=[Workload.parse(text) for text in WORKLOADS],
        help=f"in tokens; one output token makes a prefill (default: {' '.join(WORKLOADS)})",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, help="that count; one more warms up")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--headrace-args", type=json.loads, default={}, help="of LLM, as JSON")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument(
        "--vllm-python", nargs="+", default=[], metavar="PATH",
        help="a Python that has vLLM, or a script that sets its variables and starts one; each is "
        "a peer of its own",
    )  # fmt: skip
    parser.add_argument("--vllm-args", type=json.loads, default={}, help="of its LLM, as JSON")
    parser.add_argument("--llama-batched-bench", type=Path, default=None, metavar="PATH")
    parser.add_argument("--gguf", type=Path, nargs="+", default=[], help="each is a peer")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    if (args.llama_batched_bench is None) != (not args.gguf):
        parser.error("--llama-batched-bench and --gguf need each other")
    if args.rounds < 1:
        parser.error("--rounds: at least 1")
    return args


def start_engines(args: argparse.Namespace, path: Path) -> Any:
    """headrace first, and then the peers."""
    directory = transformers_directory(path)
    options = {"dtype": args.dtype, "threads": args.threads}
    ours = {"tokenizer": str(path)} if "model" not in args.headrace_args else {}
    ours_options = {**options, "engine_args": {**ours, **args.headrace_args}}
    yield WorkerEngine(OURS, OURS, sys.executable, directory, ours_options)
    if not args.no_transformers:
        kind = "transformers"
        yield WorkerEngine(kind, kind, sys.executable, directory, options)
    for python in args.vllm_python:
        name = "vllm" if len(args.vllm_python) == 1 else f"vllm {Path(python).name}"
        vllm_options = {**options, "engine_args": args.vllm_args}
        yield WorkerEngine(name, "vllm", python, directory, vllm_options)
    for file in args.gguf:
        yield LlamaEngine(args.llama_batched_bench, file, args.threads)


def compare(engines: list[Engine], workload: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens/s of every round. Who goes first changes from round to round."""
    rng = random.Random(workload.name)
    speeds: dict[str, list[float]] = {engine.name: [] for engine in engines}
    limits: list[dict[str, float]] = []
    per_token = bytes_per_token(engines[0].facts, workload)
    for number in range(args.rounds + 1):
        prompts = [
            [rng.randint(*VOCABULARY) for _ in range(workload.num_prompt)]
            for _ in range(workload.batch)
        ]
        if number and per_token is not None:
            rate = read_rate(args.threads)
            limits.append({"read_rate": rate, "tokens_per_s": rate / per_token})
        for engine in engines if number % 2 else engines[::-1]:
            answer = engine.generate(prompts, workload)
            if answer["num_tokens"] != workload.batch * workload.num_output:
                raise SystemExit(
                    f"{engine.name} made {answer['num_tokens']} tokens in {workload.name}"
                )
            speed = workload.num_counted / answer["seconds"]
            kind = "warm-up" if number == 0 else f"round {number}"
            print(
                json.dumps(
                    {"workload": workload.name, "round": kind, "engine": engine.name,
                     "seconds": round(answer["seconds"], 4), "tokens_per_s": round(speed, 1)}
                ),
                flush=True,
            )  # fmt: skip
            if number:
                speeds[engine.name].append(speed)
    result = {"workload": workload.name, **summary(speeds)}
    if per_token is not None:
        result["limit"] = limit_summary(speeds[OURS], limits, per_token)
    return result


def summary(speeds: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and of each peer the ratio of ours to theirs, round by round and its median."""
    ratios = {
        name: [ours / theirs for ours, theirs in zip(speeds[OURS], values, strict=True)]
        for name, values in speeds.items()
        if name != OURS
    }
    return {
        "tokens_per_s": speeds,
        "medians": {name: statistics.median(values) for name, values in speeds.items()},
        "ratios": ratios,
        "ratio": {name: statistics.median(values) for name, values in ratios.items()},
    }


def bytes_per_token(facts: dict[str, Any], workload: Workload) -> float | None:
    """What a decoding step of one sequence reads on average; None for any other workload."""
    if workload.batch != 1 or workload.is_prefill or "weight_bytes" not in facts:
        return None
    context = workload.num_prompt + workload.num_output / 2
    return float(facts["weight_bytes"] + facts["kv_bytes_per_token"] * context)


def limit_summary(
    speeds: list[float], limits: list[dict[str, float]], per_token: float
) -> dict[str, Any]:
    """Shares of the limit that was measured in the same round."""
    shares = [speed / limit["tokens_per_s"] for speed, limit in zip(speeds, limits, strict=True)]
    return {
        "bytes_per_token": per_token,
        "read_rates": [limit["read_rate"] for limit in limits],
        "tokens_per_s": statistics.median(limit["tokens_per_s"] for limit in limits),
        "shares": shares,
        "share": statistics.median(shares),
    }


def read_rate(threads: int) -> float:
    """Bytes a second, of a buffer of 1 GiB."""
    import torch

    from headrace.kernels.bench import read_rate as measure

    torch.set_num_threads(threads)
    return measure()


def print_table(results: list[dict[str, Any]], names: list[str]) -> None:
    """Medians, in parentheses ours over theirs; then the limits."""
    width = max(len(name) for name in names) + 4
    print(f"\n{'tokens/s, medians':<28}" + "".join(f"{name:>{max(width, 18)}}" for name in names))
    for result in results:
        cells = [f"{result['medians'][OURS]:,.1f}"]
        for name in names[1:]:
            cells.append(f"{result['medians'][name]:,.1f} ({result['ratio'][name]:.2f}x)")
        print(f"{result['workload']:<28}" + "".join(f"{cell:>{max(width, 18)}}" for cell in cells))
    for result in results:
        if "limit" not in result:
            continue
        limit = result["limit"]
        rates = ", ".join(f"{rate / 1e9:.1f}" for rate in limit["read_rates"])
        print(
            f"{result['workload']}: {limit['bytes_per_token'] / 1e6:,.1f} MB a token; reading 1 "
            f"GiB at {rates} GB/s; limit {limit['tokens_per_s']:,.1f} tokens/s; "
            f"headrace reaches {100 * limit['share']:.0f} % of it"
        )


def resolved(model: str) -> Path:
    from headrace.configs.model_files.resolve import resolve_model

    return Path(resolve_model(model))


def transformers_directory(path: Path) -> Path:
    """The directory that engines load the weights from."""
    if path.is_dir():
        return path
    script = Path(__file__).parent.parent / "gguf_to_hf.py"
    directory = path.parent / f"{path.stem}-transformers"
    runpy.run_path(str(script))["convert"](path, directory, "float32")
    return directory


if __name__ == "__main__":
    main()
