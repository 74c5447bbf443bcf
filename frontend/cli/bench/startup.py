"""`headrace bench startup`: how long `headrace serve` takes until it answers."""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.configs.engine_args import EngineArgs
from headrace.configs.errors import EngineDeadError
from headrace.configs.model_files.resolve import resolve_model
from headrace.configs.options import default_of, flag_of, option_fields
from headrace.frontend.cli.bench.offline import add_engine_options, engine_args
from headrace.frontend.cli.bench.options import (
    add_json_option,
    add_progress_option,
    not_negative,
)
from headrace.frontend.cli.bench.report import check_writable, print_table, write_json

EXAMPLES = """examples:
  headrace bench startup
  headrace bench startup ./model.gguf --max-model-len 4k --json startup.json

Every start is a new process, `headrace serve` with your options on a free port, timed from its
creation to the first 200 of /health/ready; one request of one token follows. Before a cold start
the model's files are dropped from the system's file cache, so that they are read from the disk
again; Python's own files stay in it. Before a warm start nothing is dropped. Figures are medians.
"""
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.01
TABLE_HEAD = "start-up, in seconds:"
TOTAL_PHASE = "ready"
_ROW = re.compile(r"  (\S.*?)\s+(-?\d+\.\d+)(.*)")
_LISTENING = re.compile(r"listening on (https?://\S+?);?(?:\s|$)")


@dataclass(frozen=True)
class Start:
    """One start, in seconds. `phases` are on the critical path, `overlapped` are beside it."""

    ready: float
    first_request: float
    phases: Mapping[str, float]
    overlapped: Mapping[str, float]


@dataclass
class StartupTable:
    """What the server's log says about its phases."""

    phases: dict[str, float] = field(default_factory=dict)
    overlapped: dict[str, float] = field(default_factory=dict)


def add_parser(subparsers: Any) -> None:
    """Add `bench startup`."""
    parser = subparsers.add_parser(
        "startup",
        help="time cold and warm starts of the server",
        description="Time cold and warm starts of `headrace serve`, phase by phase.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_json_option(parser)
    add_progress_option(parser)
    for kind, default, what in (
        ("cold", 3, "starts with the model's files dropped from the file cache"),
        ("warmup", 1, "starts before the warm ones, not counted"),
        ("warm", 3, "starts with everything in the file cache"),
    ):
        parser.add_argument(
            f"--num-iters-{kind}", type=not_negative, default=default, metavar="N",
            help=f"{what} (default: {default})",
        )  # fmt: skip
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Raises HeadraceError if the server does not start."""
    check_writable(args.json)
    options = engine_args(args)
    model = resolve_model(options.model, revision=options.revision, token=options.hf_token)
    starts: dict[str, list[Start]] = {"cold": [], "warm": []}
    plan = ["cold"] * args.num_iters_cold + ["warmup"] * args.num_iters_warmup
    plan += ["warm"] * args.num_iters_warm
    from tqdm import tqdm

    for kind in tqdm(plan, desc="starts", disable=args.disable_tqdm):
        if kind == "cold":
            drop_file_cache(model)
        start = time_start(options)
        if kind in starts:
            starts[kind].append(start)
    _report(starts)
    if args.json is not None:
        write_json(args.json, {kind: _as_json(found) for kind, found in starts.items()})
    return 0


def time_start(options: EngineArgs) -> Start:
    """Start a server, wait until it is ready, ask it for one token, stop it."""
    environ = dict(os.environ)
    if isinstance(options.hf_token, str):  # not on a command line, where every user can read it
        environ["HF_TOKEN"] = options.hf_token
    command = [sys.executable, "-P", "-m", "headrace", "serve", *server_flags(options)]
    with tempfile.TemporaryFile("w+") as log:
        began = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=log, env=environ, start_new_session=True
        )
        try:
            url = _wait_ready(process, log.fileno())
            ready = time.perf_counter() - began
            first = _first_request(url)
            log.seek(0)
            table = read_table(log.read().splitlines())
        finally:
            _stop(process)
    return Start(ready, first, table.phases, table.overlapped)


def server_flags(options: EngineArgs) -> list[str]:
    """A command line for `headrace serve` with these engine arguments, but no secrets."""
    flags = [options.model, "--host", "127.0.0.1", "--port", "0"]
    for option in option_fields(type(options)):
        name, value = option.name, getattr(options, option.name)
        if name == "model" or option.metadata.get("secret") or value == default_of(option):
            continue
        if isinstance(value, bool):
            flags.append(flag_of(name) if value else "--no-" + flag_of(name)[2:])
        elif isinstance(value, dict):
            flags += [flag_of(name), json.dumps(value)]
        elif isinstance(value, list | tuple):
            flags += [flag_of(name), *(str(item) for item in value)]
        else:
            flags += [flag_of(name), str(value)]
    return flags


def read_table(lines: Sequence[str]) -> StartupTable:
    """The phases in a server's log."""
    table = StartupTable()
    inside = False
    for line in lines:
        match = _ROW.fullmatch(line) if inside else None
        inside = line.endswith(TABLE_HEAD) or match is not None
        if match is None or match[1] == TOTAL_PHASE:
            continue
        kind = table.overlapped if "overlapped" in match[3] else table.phases
        kind[match[1]] = float(match[2])
    return table


def drop_file_cache(model: Path) -> int:
    """Ask the system to drop the files of `model` from its cache; returns how many bytes that is.

    Pages that another process maps stay.
    """
    dropped = 0
    for path in [model] if model.is_file() else sorted(model.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            dropped += path.stat().st_size
    return dropped


def _wait_ready(process: "subprocess.Popen[bytes]", log: int) -> str:
    """The server's address, when it takes requests. Raises EngineDeadError."""
    deadline = time.monotonic() + START_TIMEOUT_S
    url = None
    while time.monotonic() < deadline:
        text = os.pread(log, os.fstat(log).st_size, 0).decode("utf-8", "replace")
        if process.poll() is not None:
            raise EngineDeadError(
                f"the server ended with code {process.returncode}: {text[-1000:]}"
            )
        match = _LISTENING.search(text)
        url = match[1] if match else None
        if url is not None:
            with suppress(OSError, urllib.error.URLError):
                urllib.request.urlopen(f"{url}/health/ready", timeout=5).close()
                return url
        time.sleep(POLL_S)
    raise EngineDeadError(f"the server was not ready within {START_TIMEOUT_S:g} s")


def _first_request(url: str) -> float:
    """Seconds for a completion of one token."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as response:
        model = json.load(response)["data"][0]["id"]
    body = {"model": model, "prompt": [1, 2, 3, 4], "max_tokens": 1}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=60) as response:
        response.read()
    return time.perf_counter() - began


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End the server; everything it started ends with it."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _report(starts: Mapping[str, list[Start]]) -> None:
    kinds = [kind for kind, found in starts.items() if found]
    if not kinds:
        print("no start was counted: --num-iters-cold and --num-iters-warm are both 0")
        return
    counted = [start for kind in kinds for start in starts[kind]]
    phases = list(dict.fromkeys(phase for start in counted for phase in start.phases))
    beside = list(dict.fromkeys(phase for start in counted for phase in start.overlapped))
    rows: dict[str, list[float | None]] = {}
    for phase in phases:
        rows[phase] = [_median([s.phases.get(phase) for s in starts[k]]) for k in kinds]
    rows["phases together"] = [_median([sum(s.phases.values()) for s in starts[k]]) for k in kinds]
    rows["ready, as a client sees it"] = [_median([s.ready for s in starts[k]]) for k in kinds]
    rows["  fastest"] = [min(s.ready for s in starts[k]) for k in kinds]
    rows["  slowest"] = [max(s.ready for s in starts[k]) for k in kinds]
    rows["first request after that"] = [
        _median([s.first_request for s in starts[k]]) for k in kinds
    ]
    for phase in beside:
        rows[f"{phase} (beside the others)"] = [
            _median([s.overlapped.get(phase) for s in starts[k]]) for k in kinds
        ]
    counts = [f"{kind} x{len(starts[kind])}" for kind in kinds]
    print_table("start-up, medians in seconds", counts, rows)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _as_json(starts: Sequence[Start]) -> dict[str, Any]:
    return {
        "ready_s": [start.ready for start in starts],
        "median_ready_s": _median([start.ready for start in starts]),
        "first_request_s": [start.first_request for start in starts],
        "phases_s": [dict(start.phases) for start in starts],
        "overlapped_s": [dict(start.overlapped) for start in starts],
    }
