"""Where the time of a decoding step goes that is not spent in the model.

Two parts for each batch size:
  engine   an `LLMEngine` in this process streams deltas; scheduler, model runner, output processor
           and detokenizer are timed call by call, and the messages of every step are encoded and
           decoded once more, as they are between processes
  server   a `headrace serve` process streams to as many clients over HTTP; the CPU time of its
           front end, divided by the steps of the engine core, less output processing and message
           decoding, is what HTTP and the event loop cost

Medians over the steps of the engine part; the server part is one mean. All figures are in
microseconds per step.

usage: python scripts/bench/step_overhead.py [MODEL] [--batch-sizes 1 64 256] [--output-len 128]
"""

import argparse
import asyncio
import functools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

PROMPT_LEN = 32
NUM_WARMUP_STEPS = 8  # of a run: prompts, and the first decoding steps
KV_CACHE_BYTES = 1 << 30
START_TIMEOUT_S = 120.0
TIMEOUT_S = 600.0
Timings = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    os.environ["HEADRACE_MULTIPROCESSING"] = "0"
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # what an engine-core process gets
    timings: Timings = {}
    instrument(timings)
    columns: dict[int, dict[str, float]] = {}
    engine = open_engine(args)
    for batch_size in args.batch_sizes:
        timings.clear()
        run_engine(engine, batch_size, args.output_len, timings)
        columns[batch_size] = medians(timings)
    del os.environ["HEADRACE_MULTIPROCESSING"]
    engine.close()
    server, port = start_server(args)
    try:
        for batch_size in args.batch_sizes:
            columns[batch_size] |= run_server(
                server, port, batch_size, args.output_len, columns[batch_size]
            )
    finally:
        server.terminate()
        server.wait()
    print_rows(columns)
    if args.json is not None:
        rows = {f"batch {batch_size}": column for batch_size, column in columns.items()}
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


def instrument(timings: Timings) -> None:
    """Time these calls wherever they are made; and keep the messages that steps make."""
    from headrace.engine_core.client import InprocClient
    from headrace.engine_core.scheduler import Scheduler
    from headrace.executors.uniproc import UniprocExecutor
    from headrace.frontend.detokenizer import IncrementalDetokenizer
    from headrace.frontend.llm_engine import LLMEngine
    from headrace.frontend.output_processor import OutputProcessor

    def timed(owner: type, method: str, name: str) -> None:
        original = getattr(owner, method)

        @functools.wraps(original)
        def call(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*args, **options)
            finally:
                timings.setdefault(name, []).append(time.perf_counter() - began)

        setattr(owner, method, call)

    timed(LLMEngine, "step", "whole step")
    timed(Scheduler, "schedule", "schedule")
    timed(UniprocExecutor, "execute_model", "model and sampler")
    timed(Scheduler, "update_from_output", "take results")
    timed(OutputProcessor, "process", "process outputs")
    timed(IncrementalDetokenizer, "push", "detokenize a token")
    time_codec(InprocClient, timings)


def time_codec(client: type, timings: Timings) -> None:
    """Encode and decode each message of a step, as it is sent between processes."""
    from headrace.engine_core.wire import Codec

    codec = Codec(0)
    original: Callable[[Any], Any] = getattr(client, "get_outputs")  # noqa: B009

    def get_outputs(self: Any) -> Any:
        message = original(self)
        began = time.perf_counter()
        frames = codec.encode(message)
        encoded = time.perf_counter()
        codec.decode_from_core(frames)
        timings.setdefault("encode message", []).append(encoded - began)
        timings.setdefault("decode message", []).append(time.perf_counter() - encoded)
        return message

    setattr(client, "get_outputs", get_outputs)  # noqa: B010


def open_engine(args: argparse.Namespace) -> Any:
    from headrace.configs.engine_args import EngineArgs
    from headrace.frontend.llm_engine import LLMEngine

    return LLMEngine.from_engine_args(
        EngineArgs(
            model=args.model,
            dtype=args.dtype,
            max_model_len=2048,
            kv_cache_memory_bytes=KV_CACHE_BYTES,
        )
    )


def run_engine(engine: Any, batch_size: int, output_len: int, timings: Timings) -> None:
    """One batch from start to end; only steps in which every sequence decodes are kept."""
    from headrace import SamplingParams
    from headrace.configs.sampling_params import RequestOutputKind

    rng = random.Random(batch_size)
    for number in range(batch_size):
        ids = [rng.randint(1000, 40000) for _ in range(PROMPT_LEN)]
        params = SamplingParams(
            temperature=0.0, max_tokens=output_len, ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        engine.add_request(f"{batch_size}-{number}", {"prompt_token_ids": ids}, params)
    num_steps = 0
    while engine.has_unfinished_requests():
        engine.step()
        num_steps += 1
        if num_steps == NUM_WARMUP_STEPS:
            timings.clear()
    timings["detokenize"] = per_step(timings.pop("detokenize a token", []), batch_size)


def per_step(calls: list[float], batch_size: int) -> list[float]:
    """Sums of `batch_size` calls in a row: the steps, since each sequence has one token in each."""
    return [sum(calls[i : i + batch_size]) for i in range(0, len(calls), batch_size)]


def medians(timings: Timings) -> dict[str, float]:
    """Median of each part in microseconds, and what they leave of the step."""
    column = {name: 1e6 * statistics.median(values) for name, values in timings.items() if values}
    inside = ("schedule", "model and sampler", "take results", "process outputs",
              "encode message", "decode message")  # fmt: skip
    rests = [
        whole - sum(parts)
        for whole, *parts in zip(timings["whole step"], *(timings[n] for n in inside), strict=True)
    ]
    column["rest of the step loop"] = 1e6 * statistics.median(rests)
    return column


def start_server(args: argparse.Namespace) -> tuple["subprocess.Popen[bytes]", int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [
        sys.executable, "-m", "headrace", "serve", args.model, "--port", str(port),
        "--dtype", args.dtype, "--max-model-len", "2048",
        "--kv-cache-memory-bytes", str(KV_CACHE_BYTES), "--served-model-name", "m",
    ]  # fmt: skip
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None:
        with suppress(OSError, urllib.error.URLError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=5).close()
            return server, port
        time.sleep(0.1)
    server.kill()
    raise SystemExit("the server did not become ready")


def run_server(
    server: "subprocess.Popen[bytes]",
    port: int,
    batch_size: int,
    output_len: int,
    column: dict[str, float],
) -> dict[str, float]:
    """CPU time of the front end per step of the engine core, in microseconds."""
    from headrace.frontend.cli.bench.http_target import Target
    from headrace.frontend.cli.bench.load import run_load
    from headrace.frontend.cli.bench.load_client import LoadRequest

    rng = random.Random(batch_size)
    requests = []
    for number in range(batch_size):
        body = {
            "model": "m", "prompt": [rng.randint(1000, 40000) for _ in range(PROMPT_LEN)],
            "max_tokens": output_len, "temperature": 0, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        data = json.dumps(body).encode()
        requests.append(LoadRequest("/v1/completions", data, PROMPT_LEN, output_len, str(number)))
    target = Target.from_url(f"http://127.0.0.1:{port}", {})
    process = psutil.Process(server.pid)
    steps, cpu = step_of(port), process.cpu_times()
    run = asyncio.run(run_load(target, requests, [0.0] * batch_size, timeout_s=TIMEOUT_S))
    used = process.cpu_times()
    failed = [record.error for record in run.records if not record.is_success]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
    num_steps = step_of(port) - steps
    total = 1e6 * (used.user + used.system - cpu.user - cpu.system) / num_steps
    http = total - column["process outputs"] - column["decode message"]
    return {"front end of a server, CPU time": total, "HTTP and event loop, CPU time": http}


def step_of(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/progress", timeout=10) as response:
        return int(json.load(response)["step"])


def print_rows(columns: dict[int, dict[str, float]]) -> None:
    order = (
        "model and sampler", "schedule", "take results", "encode message", "decode message",
        "process outputs", "detokenize", "rest of the step loop", "HTTP and event loop, CPU time",
        "front end of a server, CPU time",
    )  # fmt: skip
    print(f"{'microseconds per step':<36}" + "".join(f"{f'batch {b}':>12}" for b in columns))
    for name in order:
        label = f"  of it: {name}" if name == "detokenize" else name
        print(f"{label:<36}" + "".join(f"{c.get(name, 0.0):>12.0f}" for c in columns.values()))
    outside = {
        b: sum(c[name] for name in order if name not in ("model and sampler", "detokenize",
                                                         "front end of a server, CPU time"))
        for b, c in columns.items()
    }  # fmt: skip
    print(f"{'outside the model, together':<36}" + "".join(f"{v:>12.0f}" for v in outside.values()))
    shares = (
        100 * value / (value + columns[batch]["model and sampler"])
        for batch, value in outside.items()
    )
    print(f"{'  share of all, %':<36}" + "".join(f"{share:>12.2f}" for share in shares))


if __name__ == "__main__":
    main()
