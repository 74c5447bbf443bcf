"""Does big input hold up the HTTP front end's event loop?

A server process with the real HTTP stack, tokenizer and chat template of MODEL, over an engine that
only plays a script: it gives each stream a token every 20 ms and computes nothing. So whatever
delays a token, or an answer of /health, is the front end. Three loads, one after the other:
  idle     the streams alone
  prompts  beside them, bursts of long prompts, each waiting for its first token
  chats    beside them, 4 chats of 3 MB at a time

The loads come from a process of their own, so that they do not hold up the one that measures; all
of them share the machine, though.

usage: python scripts/bench/event_loop.py [MODEL] [--streams 30] [--prompts 64] [--seconds 10]
"""

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from headrace.configs.engine_args import AsyncEngineArgs, UsageContext
from headrace.configs.errors import HeadraceError
from headrace.configs.sampling_params import SamplingParams
from headrace.engine_core.messages import EngineStats
from headrace.frontend.admission import RenderedPrompt
from headrace.frontend.http.listener import ServerOptions, bind_socket
from headrace.frontend.http.server import serve
from headrace.frontend.output_stream import OutputStream
from headrace.frontend.outputs import CompletionOutput, RequestOutput
from headrace.frontend.renderer import Renderer
from headrace.frontend.stats import StatLoggerBase

TOKEN_INTERVAL_S = 0.02
POLL_INTERVAL_S = 0.02
PROMPT_CHARS = 28_000
NUM_CHATS, CHAT_CHARS = 4, 3_000_000
SETTLE_S = 1.5  # until a sender has started
LOADS = ("idle", "prompts", "chats")


class ScriptedEngine:
    """A token of " x" at a steady pace for every request, for as long as it likes."""

    def __init__(self, model: str) -> None:
        self.config = AsyncEngineArgs(model=model).create_engine_config(UsageContext.API_SERVER)
        self.model_config = self.config.model_config
        self.renderer = Renderer.from_config(self.model_config)
        self.tokenizer = self.renderer.tokenizer
        self.state: Any = "starting"
        self.num_requests = 0
        self._running: dict[OutputStream, asyncio.Task[None]] = {}
        self.stat_loggers: dict[str, StatLoggerBase] = {}

    async def start(self) -> None:
        self.state = "ready"

    def submit(
        self, prompt: RenderedPrompt, params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> OutputStream:
        stream = OutputStream(request_id, merges_deltas=True)
        self._running[stream] = asyncio.create_task(self._generate(prompt, params, stream))
        return stream

    def release(self, stream: OutputStream) -> None:
        self._running.pop(stream).cancel()

    async def _generate(
        self, prompt: RenderedPrompt, params: SamplingParams, stream: OutputStream
    ) -> None:
        due = time.monotonic()
        for count in itertools.count(1):
            due += TOKEN_INTERVAL_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            done = count == params.max_tokens
            choice = CompletionOutput(0, " x", [1], None, None, "length" if done else None)
            stream.put(
                RequestOutput(stream.request_id, None, prompt.token_ids, None, [choice], done)
            )
            if done:
                return

    def progress(self) -> dict[str, float | int]:
        return {"step": 0, "age_s": 0.0, "running": 0, "waiting": 0}

    def stats(self) -> EngineStats | None:
        return None

    async def wait_dead(self) -> HeadraceError:
        await asyncio.Event().wait()
        raise AssertionError("a script does not die")

    async def stop(self) -> None:
        self.renderer.shutdown()


class Load:
    """What the clients of one load saw, in seconds."""

    def __init__(self) -> None:
        self.health: list[float] = []
        self.gaps: list[float] = []
        self.statuses: dict[str, int] = {}


class Client:
    """Requests over plain sockets, so that the client costs as little as it can."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.load = Load()

    async def stream(self) -> None:
        """Note the gaps between the events of an endless stream."""
        body = {"prompt": "a", "max_tokens": 8000, "stream": True, "ignore_eos": True}
        reader, writer = await self._send("/v1/completions", encode(body))
        try:
            last = 0.0
            while line := await reader.readline():
                if line.startswith(b"data: "):
                    now = time.perf_counter()
                    if last:
                        self.load.gaps.append(now - last)
                    last = now
        finally:
            writer.close()

    async def poll(self) -> None:
        """Ask for /health at a steady pace, whether or not the last answer has come."""
        asked = set()
        with suppress(asyncio.CancelledError):
            while True:
                asked.add(asyncio.create_task(self._ask_health()))
                await asyncio.sleep(POLL_INTERVAL_S)
        await asyncio.gather(*asked)

    async def _ask_health(self) -> None:
        load, began = self.load, time.perf_counter()
        await self.post("/health", None)
        load.health.append(time.perf_counter() - began)

    async def post(self, path: str, data: bytes | None) -> int:
        """The status of the answer; a GET without `data`."""
        reader, writer = await self._send(path, data)
        try:
            status = int((await reader.readline()).split()[1])
            await reader.read()
            return status
        finally:
            writer.close()

    async def _send(
        self, path: str, data: bytes | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = f"{'GET' if data is None else 'POST'} {path} HTTP/1.1\r\nHost: x\r\n"
        if data is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        if path != "/v1/completions" or data is None or len(data) > 1000:
            head += "Connection: close\r\n"
        writer.write(head.encode() + b"\r\n" + (data or b""))
        await writer.drain()
        return reader, writer


def encode(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--send", metavar="LOAD", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        run_server(args.model)
        return
    if args.send is not None:
        print(json.dumps(asyncio.run(send(Client(args.port), args))))
        return
    server = start(args.model, "--serve")
    assert server.stdout is not None
    try:
        args.port = int(server.stdout.readline())
        loads = asyncio.run(measure(Client(args.port), args))
    finally:
        server.kill()
        server.wait()
    print_rows(loads)


def start(*words: str) -> "subprocess.Popen[str]":
    """This program in a process of its own."""
    return subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True)


def run_server(model: str) -> None:
    options = ServerOptions(port=0)
    engine = ScriptedEngine(model)
    with bind_socket(options) as listener:
        print(listener.getsockname()[1], flush=True)
        serve(engine, options, listener)


async def send(client: Client, args: argparse.Namespace) -> dict[int, int]:
    """Send bursts of a load, one when the other has been answered; how often each status came."""
    if args.send == "prompts":
        text = "the quick brown fox jumps over the lazy dog " * (PROMPT_CHARS // 44)
        path, num, body = "/v1/completions", args.prompts, {"prompt": text, "max_tokens": 1}
    else:
        message = {"role": "user", "content": "ab " * (CHAT_CHARS // 3)}
        path, num = "/v1/chat/completions", NUM_CHATS
        body = {"messages": [message], "max_tokens": 1}
    data, statuses = encode(body), []
    end = time.perf_counter() + args.seconds
    while time.perf_counter() < end:
        statuses += await asyncio.gather(*(client.post(path, data) for _ in range(num)))
    return {status: statuses.count(status) for status in statuses}


async def measure(client: Client, args: argparse.Namespace) -> dict[str, Load]:
    while await client.post("/health", None) != 200:
        await asyncio.sleep(0.1)
    streams = [asyncio.create_task(client.stream()) for _ in range(args.streams)]
    loads = {}
    for name in LOADS:
        sender = None
        if name != "idle":
            words = ["--send", name, "--port", args.port, "--prompts", args.prompts]
            sender = start(args.model, *map(str, words), "--seconds", str(args.seconds))
        await asyncio.sleep(SETTLE_S)
        load = loads[name] = client.load = Load()
        polling = asyncio.create_task(client.poll())
        if sender is None:
            await asyncio.sleep(args.seconds)
        else:
            output, _ = await asyncio.to_thread(sender.communicate)
            load.statuses = json.loads(output)
        polling.cancel()
        await polling
        client.load = Load()
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return loads


def print_rows(loads: dict[str, Load]) -> None:
    print(f"{'':10}{'/health, ms':^30}{'gap between tokens, ms':^32}  requests")
    columns = "p50      p99      max"
    print(f"{'load':10}{columns:>30}{'mean      p95      max':>32}  by status")
    for name, load in loads.items():
        health, gaps = sorted(load.health), sorted(load.gaps)
        values = [
            statistics.median(health), at(health, 0.99), health[-1],
            statistics.fmean(gaps), at(gaps, 0.95), gaps[-1],
        ]  # fmt: skip
        first, second = (
            "".join(f"{value * 1e3:9.1f}" for value in part) for part in (values[:3], values[3:])
        )
        print(f"{name:10}{first:>30}{second:>32}  {load.statuses or ''}")


def at(values: list[float], share: float) -> float:
    """The value below which `share` of the sorted `values` lie."""
    return values[min(len(values) - 1, int(len(values) * share))]


if __name__ == "__main__":
    main()
