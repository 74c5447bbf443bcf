"""`headrace bench serve --self-check`: the load generator against a server of known timings."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.configs.errors import RequestFailedError
from headrace.frontend.cli.bench import server_clock
from headrace.frontend.cli.bench.http_target import Target
from headrace.frontend.cli.bench.load import LoadRun, run_load
from headrace.frontend.cli.bench.load_client import LoadRequest
from headrace.frontend.cli.bench.report import check_writable, print_table, write_json
from headrace.frontend.cli.bench.serve_result import ResultOptions, make_result

# Two kinds of answers, so that a wrong mean cannot come out right by chance.
TTFTS_MS = (150.0, 250.0)
ITLS_MS = (40.0, 20.0)
NUM_TOKENS = 16
NUM_PROMPT_TOKENS = 8
NUM_REQUESTS = 16
CONCURRENCY = 8
MAX_ERROR = 0.02
TIMEOUT_S = 30.0
ATTEMPTS = 3
Json = dict[str, Any]


def run_self_check(json_path: Path | None) -> int:
    """Print scripted and measured figures; exit code 1 if one is off by 2 % or more."""
    check_writable(json_path)
    rows = check_against_mock()
    print_table(
        "self-check against scripted timings",
        ["scripted", "measured", "error %"],
        {
            name: [row["scripted"], row["measured"], 100 * row["error"]]
            for name, row in rows.items()
        },
    )
    worst = max(row["error"] for row in rows.values())
    is_good = worst < MAX_ERROR
    print(f"largest error {100 * worst:.2f} %, allowed is less than {100 * MAX_ERROR:g} %: "
          + ("measurements on this machine can be trusted" if is_good else
             "this machine is too busy to measure on, or the benchmark is wrong"))  # fmt: skip
    if json_path is not None:
        write_json(json_path, {"max_error": worst, "is_good": is_good, "figures": rows})
    return 0 if is_good else 1


def check_against_mock(
    measure: Callable[[LoadRun], Json] | None = None, attempts: int = ATTEMPTS
) -> dict[str, Json]:
    """Scripted and measured value and relative error of each figure.

    A busy machine makes single runs late, so the best of `attempts` runs counts. `measure` makes
    the figures of a run; None: as `bench serve` does.
    """
    from headrace.frontend.cli.bench.serve import run_on_loop

    best: dict[str, Json] = {}
    with mock_target() as target:
        for _ in range(attempts):
            run = run_on_loop(_run(target))
            rows = _compare((measure or _figures)(run))
            if not best or _worst(rows) < _worst(best):
                best = rows
            if _worst(best) < MAX_ERROR:
                break
    return best


@contextmanager
def mock_target() -> Iterator[Target]:
    """A mock server in a process of its own."""
    command = [sys.executable, "-P", "-m", "headrace.frontend.cli.bench.mock_server"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        if not port.isdigit():
            raise RequestFailedError("the mock server did not start")
        try:
            yield Target.from_url(f"http://127.0.0.1:{port}", {})
        finally:
            process.kill()


def scripted_figures() -> dict[str, float]:
    """What a perfect benchmark would print, in ms and per second."""
    latencies = [ttft + (NUM_TOKENS - 1) * itl for ttft, itl in zip(TTFTS_MS, ITLS_MS, strict=True)]
    count = len(latencies)
    # Kinds alternate, and a slot that is free takes the next request: with equal numbers of slots
    # and requests in a round, each slot's total decides the duration.
    duration = _duration([latencies[i % count] for i in range(NUM_REQUESTS)]) / 1e3
    return {
        "mean_ttft_ms": sum(TTFTS_MS) / count,
        "mean_tpot_ms": sum(ITLS_MS) / count,
        "mean_itl_ms": sum(ITLS_MS) / count,
        "mean_e2el_ms": sum(latencies) / count,
        "median_e2el_ms": sum(latencies) / count,
        "request_throughput": NUM_REQUESTS / duration,
        "output_throughput": NUM_REQUESTS * NUM_TOKENS / duration,
    }


def _duration(latencies: list[float]) -> float:
    """When the last of `latencies` ends, taken in order by `CONCURRENCY` slots."""
    slots = [0.0] * CONCURRENCY
    for latency in latencies:
        slots.sort()
        slots[0] += latency
    return max(slots)


async def _run(target: Target) -> LoadRun:
    requests = []
    for i in range(NUM_REQUESTS):
        kind = i % len(TTFTS_MS)
        body = {
            "model": "mock",
            "prompt": list(range(NUM_PROMPT_TOKENS)),
            "max_tokens": NUM_TOKENS,
            "stream": True,
            "mock": {"ttft_ms": TTFTS_MS[kind], "itl_ms": ITLS_MS[kind]},
        }
        requests.append(
            LoadRequest(
                "/v1/completions", json.dumps(body).encode(), NUM_PROMPT_TOKENS, NUM_TOKENS, f"{i}"
            )
        )
    return await run_load(
        target, requests, [0.0] * len(requests), max_concurrency=CONCURRENCY, timeout_s=TIMEOUT_S
    )


def _figures(run: LoadRun) -> Json:
    clock: server_clock.ServerClock | None = None
    return make_result(run, ResultOptions(), clock)


def _compare(figures: Json) -> dict[str, Json]:
    rows = {}
    for name, scripted in scripted_figures().items():
        measured = figures[name]
        if measured is None:
            raise RequestFailedError(f"every request to the mock failed: {figures}")
        rows[name] = {
            "scripted": scripted,
            "measured": measured,
            "error": abs(measured - scripted) / scripted,
        }
    return rows


def _worst(rows: dict[str, Json]) -> float:
    return max(float(row["error"]) for row in rows.values())
