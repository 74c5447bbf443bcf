"""What serving over HTTP costs: the same load on `LLM.generate` and on a server, alternating.

Both engines run the same model with the same limits, each in processes of its own; those whose turn
it is not are stopped, so that they cannot take a core. The load is a closed loop: `--concurrency`
requests at a time, until all `--requests` are answered; offline, that is `max_num_seqs`. Prompts
are random words, new in each round; greedy, of fixed length. The client is a process of its own,
too, and runs on the same cores, as do those of other benchmarks.

For each round: output tokens/s of both, the median time to the first token and between tokens as
the client sees them, and the CPU time of front end, engine core and client in microseconds per
output token. The share is the median over the rounds.

usage: python scripts/bench/http_vs_offline.py [MODEL] [--concurrency 32] [--requests 64]
           [--input-len 64] [--output-len 64] [--rounds 3] [--json FILE] [-- SERVE_OPTION ...]
"""

import argparse
import contextlib
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, TypeVar

import psutil

WORDS = [
    "river",
    "stone",
    "cloud",
    "lamp",
    "green",
    "paper",
    "train",
    "seven",
    "winter",
    "garden",
    "music",
    "road",
    "glass",
    "salt",
]
START_TIMEOUT_S = 120.0
TIMEOUT_S = 600.0
KV_CACHE_BYTES = 1 << 30


class Stoppable:
    """A process, with those it starts, that runs only inside `with`."""

    def __init__(self, command: list[str], **options: Any) -> None:
        self.process = subprocess.Popen(command, **options)

    def park(self) -> None:
        self._signal(signal.SIGSTOP)

    def __enter__(self) -> None:
        self._signal(signal.SIGCONT)

    def __exit__(self, *exception: object) -> None:
        self.park()

    def tree(self) -> list[psutil.Process]:
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def cpu_seconds(self) -> list[float]:
        """Of each process of the tree, the first one first."""
        times = [process.cpu_times() for process in self.tree()]
        return [entry.user + entry.system for entry in times]

    def end(self) -> None:
        if self.process.poll() is not None:
            return
        self._signal(signal.SIGCONT)
        self.process.terminate()
        self.process.wait(60)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.tree():
            process.send_signal(number)


class Worker(Stoppable):
    """This script in another role: a line of JSON in, a line out."""

    def __init__(self, role: str, args: argparse.Namespace) -> None:
        command = [
            sys.executable, __file__, args.model, "--worker", role, "--dtype", args.dtype,
            "--concurrency", str(args.concurrency), "--port", str(args.port),
        ]  # fmt: skip
        super().__init__(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wait_ready(self) -> None:
        self._read()

    def ask(self, prompts: list[str], output_len: int) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([prompts, output_len]) + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with code {self.process.wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer


Started = TypeVar("Started", bound=Stoppable)


def main() -> None:
    args = parse_arguments()
    if args.worker is not None:
        {"offline": answer_offline, "client": answer_as_client}[args.worker](args)
        return
    args.port = free_port()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left behind
    with contextlib.ExitStack() as running:
        offline = started(Worker("offline", args), running)
        offline.wait_ready()
        offline.park()
        server = started(start_server(args), running)
        wait_ready(server, args.port)
        client = started(Worker("client", args), running)
        client.wait_ready()
        server.park()
        rounds = [
            run_round(number, args, offline, server, client) for number in range(args.rounds + 1)
        ]
    report(rounds[1:], args)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=64, help="words of a prompt")
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="that count; one more warms up")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--worker", choices=("offline", "client"), help=argparse.SUPPRESS)
    own, serve = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, serve = own[:at], own[at + 1 :]
    args = parser.parse_args(own)
    args.serve_options = serve
    return args


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_server(args: argparse.Namespace) -> Stoppable:
    command = [
        sys.executable, "-m", "headrace", "serve", args.model, "--port", str(args.port),
        "--dtype", args.dtype, "--max-model-len", "2048", "--served-model-name", "m",
        "--kv-cache-memory-bytes", str(KV_CACHE_BYTES), *args.serve_options,
    ]  # fmt: skip
    return Stoppable(command, stderr=subprocess.DEVNULL)


def started(process: Started, running: contextlib.ExitStack) -> Started:
    running.callback(process.end)
    return process


def wait_ready(server: Stoppable, port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and server.process.poll() is None:
        with contextlib.suppress(OSError, urllib.error.URLError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=5).close()
            return
        time.sleep(0.1)
    raise SystemExit("the server did not become ready")


def run_round(
    number: int, args: argparse.Namespace, offline: Worker, server: Stoppable, client: Worker
) -> dict[str, float]:
    """One load on both; who goes first changes from round to round."""
    rng = random.Random(number)
    prompts = [
        " ".join(rng.choice(WORDS) for _ in range(args.input_len)) for _ in range(args.requests)
    ]
    num_tokens = args.requests * args.output_len
    result: dict[str, float] = {}
    for is_http in (True, False) if number % 2 else (False, True):
        if is_http:
            with server:
                before = [*server.cpu_seconds(), *client.cpu_seconds()]
                answer = client.ask(prompts, args.output_len)
                after = [*server.cpu_seconds(), *client.cpu_seconds()]
            names = ("front_end_us", "engine_core_us", "client_us")
            for name, new, old in zip(names, after, before, strict=True):
                result[name] = 1e6 * (new - old) / num_tokens
            result["http_tok_s"] = num_tokens / answer.pop("seconds")
            result |= answer
        else:
            with offline:
                result["offline_tok_s"] = (
                    num_tokens / offline.ask(prompts, args.output_len)["seconds"]
                )
    result["share"] = result["http_tok_s"] / result["offline_tok_s"]
    kind = f"round {number}" if number else "warm-up"
    print(json.dumps({"round": kind, **{k: round(v, 3) for k, v in result.items()}}), flush=True)
    return result


def report(rounds: list[dict[str, float]], args: argparse.Namespace) -> None:
    medians = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    print(json.dumps({"medians": {name: round(value, 3) for name, value in medians.items()}}))
    if args.json is not None:
        args.json.write_text(json.dumps({"rounds": rounds, "medians": medians}, indent=2) + "\n")


def answer_offline(args: argparse.Namespace) -> None:
    """`LLM.generate`, with as many sequences at once as the client has streams."""
    import headrace

    llm = headrace.LLM(
        args.model, dtype=args.dtype, max_model_len=2048, max_num_seqs=args.concurrency,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
    )  # fmt: skip
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        prompts, output_len = json.loads(line)
        params = headrace.SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        assert all(len(output.outputs[0].token_ids) == output_len for output in outputs)
        print(json.dumps({"seconds": seconds}), flush=True)


def answer_as_client(args: argparse.Namespace) -> None:
    """Stream all prompts of a line from the server."""
    import uvloop

    from headrace.frontend.cli.bench.http_target import Target
    from headrace.frontend.cli.bench.load import run_load
    from headrace.frontend.cli.bench.load_client import LoadRequest

    target = Target.from_url(f"http://127.0.0.1:{args.port}", {})
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        prompts, output_len = json.loads(line)
        requests = []
        for number, prompt in enumerate(prompts):
            body = {
                "model": "m", "prompt": prompt, "max_tokens": output_len, "temperature": 0,
                "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
            }  # fmt: skip
            data = json.dumps(body).encode()
            requests.append(LoadRequest("/v1/completions", data, None, output_len, str(number)))
        load = run_load(
            target, requests, [0.0] * len(requests), max_concurrency=args.concurrency,
            timeout_s=TIMEOUT_S,
        )  # fmt: skip
        run = uvloop.run(load)
        failed = [record.error for record in run.records if not record.is_success]
        if failed:
            raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
        assert all(record.num_tokens == output_len for record in run.records)
        ttfts = [1e3 * record.ttft for record in run.records]
        gaps = [1e3 * gap for record in run.records for gap in record.itls]
        figures = {
            "seconds": run.duration,
            "ttft_p50_ms": statistics.median(ttfts),
            "ttft_max_ms": max(ttfts),
            "gap_p50_ms": statistics.median(gaps),
        }
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
