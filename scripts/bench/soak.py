"""Load a server with requests that are often abandoned, and check that nothing is kept.

Two parts, both against a fresh `headrace serve` on loopback:
  mixed    REQUESTS requests of many shapes; the client drops 30 % of them at a random moment
  aborts   REPEATS times 40 requests that are all dropped: queued, in the second prefill chunk,
           after three tokens
Prints one JSON line per part with free blocks, table sizes and the resident memory of every process
before and after.

usage: python scripts/bench/soak.py [MODEL] [--requests 2000] [--repeats 500]
"""

import argparse
import asyncio
import json
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable
from contextlib import suppress

import psutil

CONCURRENCY = 32
DROPPED_SHARE = 0.3
NUM_ABORTED = 40
ERROR = b'{"error":{"message"'  # how an error begins, in a body and in a stream
SETTLE_S = 5.0  # how long counters may take to come back to the base line


class Server:
    """A server under test."""

    def __init__(self, model: str, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        command = [
            sys.executable, "-m", "headrace", "serve", model, "--served-model-name", "m",
            "--port", str(self.port), "--kv-cache-memory", "1G", *options,
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while not self._is_ready():
            if self.process.poll() is not None:
                raise SystemExit(f"the server ended with code {self.process.returncode}")
            time.sleep(0.1)
        own = psutil.Process(self.process.pid)
        self.processes = {"server": own}
        for child in own.children(recursive=True):
            self.processes["engine core"] = child

    def _is_ready(self) -> bool:
        with suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health/ready", timeout=1).close()
            return True
        return False

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as response:
            return str(response.read().decode())

    def gauges(self) -> dict[str, float]:
        """Free blocks and table sizes: what has to come back to the base line."""
        wanted = (
            "num_free_blocks",
            "num_frontend_requests",
            "num_engine_requests",
            "num_requests_running",
            "num_requests_waiting",
        )
        found = {}
        for line in self.get("/metrics").splitlines():
            name = line.split("{")[0].removeprefix("headrace:")
            if name in wanted:
                found[name] = float(line.rsplit(" ", 1)[1])
        return found

    def resident(self) -> dict[str, float]:
        """Resident memory of each process, in MiB."""
        return {name: p.memory_info().rss / 2**20 for name, p in self.processes.items()}

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)

    async def send(
        self, body: dict[str, object]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        data = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + data)
        await writer.drain()
        return reader, writer


def random_body(rng: random.Random) -> dict[str, object]:
    body: dict[str, object] = {
        "model": "m",
        "prompt": [rng.randint(1000, 40000) for _ in range(rng.choice([3, 20, 60, 150, 300]))],
        "max_tokens": rng.choice([1, 4, 8, 16, 32]),
        "temperature": rng.choice([0.0, 0.7, 1.0]),
        "stream": rng.random() < 0.5,
        "ignore_eos": rng.random() < 0.5,
    }
    if body["temperature"]:
        body["n"] = rng.choice([1, 1, 2])
    if rng.random() < 0.3:
        body["stop"] = ["\n", "the end"]
    if rng.random() < 0.2:
        body["logprobs"] = 3
    return body


async def mixed(server: Server, count: int) -> dict[str, object]:
    rng = random.Random(1)
    base = server.gauges()
    slots = asyncio.Semaphore(CONCURRENCY)
    memory: list[dict[str, float]] = []
    outcomes = {"finished": 0, "dropped": 0, "failed": 0}

    async def one(number: int) -> None:
        async with slots:
            body = random_body(rng)
            drop_after = rng.uniform(0, 0.6) if rng.random() < DROPPED_SHARE else None
            reader, writer = await server.send(body)
            try:
                answer = await asyncio.wait_for(reader.read(), drop_after)
                good = answer.startswith(b"HTTP/1.1 200") and ERROR not in answer
                if not good:
                    print(answer[-500:], file=sys.stderr)
                outcomes["finished" if good else "failed"] += 1
            except TimeoutError:
                outcomes["dropped"] += 1
            finally:
                writer.close()
            if number % 10 == 0:
                memory.append(server.resident())
                print(f"\r{number}/{count}", end="", file=sys.stderr)

    began = time.monotonic()
    await asyncio.gather(*(one(number) for number in range(count)))
    await settle(server, base)
    quarter = count // 4
    return {
        "part": "mixed", "requests": count, **outcomes,
        "seconds": round(time.monotonic() - began, 1),
        "gauges_before": base, "gauges_after": server.gauges(),
        "resident_mib": growth(memory, quarter // 10, 2 * quarter // 10),
    }  # fmt: skip


def growth(memory: list[dict[str, float]], start: int, end: int) -> dict[str, dict[str, float]]:
    """Per process: median of samples [start, end), of the last as many, and their ratio."""
    result = {}
    for name in memory[0]:
        early = statistics.median(sample[name] for sample in memory[start:end])
        late = statistics.median(sample[name] for sample in memory[-(end - start) :])
        result[name] = {
            "early": round(early, 1),
            "late": round(late, 1),
            "ratio": round(late / early, 4),
        }
    return result


async def settle(server: Server, base: dict[str, float]) -> float:
    """Seconds until the gauges are back at the base line; an error if they never are."""
    began = time.monotonic()
    while server.gauges() != base:
        if time.monotonic() - began > SETTLE_S:
            raise SystemExit(f"not back at the base line: {server.gauges()}, before {base}")
        await asyncio.sleep(0.01)
    return time.monotonic() - began


async def step_of(server: Server) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET /health/progress HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return int(json.loads(answer.split(b"\r\n\r\n", 1)[1])["step"])


async def wait_steps(server: Server, count: int) -> None:
    start = await step_of(server)
    for _ in range(200):
        if await step_of(server) >= start + count:
            return
        await asyncio.sleep(0.005)


async def abandoned(
    server: Server, rng: random.Random, leave: Callable[..., Awaitable[None]]
) -> None:
    """One request that is dropped when `leave` returns."""
    body = {
        "model": "m", "prompt": [rng.randint(1000, 40000) for _ in range(40)], "max_tokens": 4000,
        "ignore_eos": True, "stream": rng.random() < 0.5,
    }  # fmt: skip
    reader, writer = await server.send(body)
    await leave(server, reader, bool(body["stream"]))
    writer.close()


async def while_queued(server: Server, reader: asyncio.StreamReader, streams: bool) -> None:
    await asyncio.sleep(0)


async def in_second_chunk(server: Server, reader: asyncio.StreamReader, streams: bool) -> None:
    await wait_steps(server, 2)


async def after_three_tokens(server: Server, reader: asyncio.StreamReader, streams: bool) -> None:
    if not streams:
        return await wait_steps(server, 6)
    for _ in range(3):
        await reader.readuntil(b"data: ")


async def aborts(server: Server, repeats: int) -> dict[str, object]:
    rng = random.Random(2)
    base = server.gauges()
    ways = (after_three_tokens, in_second_chunk, while_queued, while_queued)
    memory = []
    settled = []
    began = time.monotonic()
    for number in range(repeats):
        await asyncio.gather(
            *(abandoned(server, rng, ways[i % len(ways)]) for i in range(NUM_ABORTED))
        )
        settled.append(await settle(server, base))
        memory.append(server.resident())
        print(f"\r{number}/{repeats}", end="", file=sys.stderr)
    reader, writer = await server.send(
        {"model": "m", "prompt": "The capital of France is", "max_tokens": 4}
    )
    assert ERROR not in await reader.read()
    writer.close()
    quarter = max(1, repeats // 4)
    return {
        "part": "aborts", "repeats": repeats, "seconds": round(time.monotonic() - began, 1),
        "settled_s_median": round(statistics.median(settled), 3),
        "settled_s_max": round(max(settled), 3),
        "gauges_before": base, "gauges_after": server.gauges(),
        "resident_mib": growth(memory, quarter, 2 * quarter),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=500)
    args = parser.parse_args()
    parts = (
        (mixed, args.requests, ()),
        (aborts, args.repeats, ("--max-num-batched-tokens", "64", "--max-num-seqs", "8")),
    )
    for part, count, options in parts:
        if not count:
            continue
        server = Server(args.model, *options)
        try:
            print(json.dumps(asyncio.run(part(server, count))), flush=True)
        finally:
            server.stop()


if __name__ == "__main__":
    main()
