"""`headrace bench serve`: load a server over HTTP and report what its clients see."""

import argparse
import asyncio
import datetime
import json
import math
import random
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.configs.errors import RequestFailedError
from headrace.frontend.cli.bench import server_clock
from headrace.frontend.cli.bench.datasets import Sample, make_samples
from headrace.frontend.cli.bench.http_target import AnswerError, Target, fetch
from headrace.frontend.cli.bench.load import LoadRun, run_load
from headrace.frontend.cli.bench.load_client import LoadRequest, Record
from headrace.frontend.cli.bench.prompt_tokens import open_tokens
from headrace.frontend.cli.bench.report import check_writable, write_json
from headrace.frontend.cli.bench.serve_options import (
    EXAMPLES,
    ServeOptions,
    add_options,
    parse_options,
)
from headrace.frontend.cli.bench.serve_result import details_of, make_result, print_result

READY_INTERVAL_S = 0.5
EXIT_FAILURES = 1


def add_parser(subparsers: Any) -> None:
    """Add `bench serve`."""
    parser = subparsers.add_parser(
        "serve",
        help="load a running server and measure what its clients see",
        description="Send requests to an OpenAI-compatible server and report latency and "
        "throughput by the client's clock, with the server's own means beside them where it has "
        "/metrics.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code 1 if a request failed, unless `--allow-failures`."""
    if args.self_check:
        from headrace.frontend.cli.bench.self_check import run_self_check

        return run_self_check(args.json)
    options = parse_options(args)
    check_writable(options.json)
    result = run_on_loop(_measure(options))
    print_result(result, options.result)
    _save(result, options)
    return EXIT_FAILURES if result["failed"] and not options.allow_failures else 0


def run_on_loop(coroutine: Any) -> Any:
    """Run on the quickest loop there is, with as many open connections as the system allows."""
    import uvloop

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


async def _measure(options: ServeOptions) -> dict[str, Any]:
    target = Target.from_url(options.url, options.headers, options.insecure)
    await _wait_listed(target, options.ready_timeout_s)
    model = options.model or await first_model(target)
    name = options.served_model_name or model
    tokens = await asyncio.to_thread(
        open_tokens, options.tokenizer, options.skip_tokenizer, target, name, _warn
    )
    count = options.dataset.num_prompts
    num_extra = options.num_warmups + 1  # sent before the run: what it sends is then not cached
    samples = await asyncio.to_thread(
        make_samples,
        replace(options.dataset, num_prompts=count + num_extra),
        tokens,
        options.seed,
        options.backend == "openai-chat",
    )
    requests = make_requests(samples, options, name)
    requests, extra = requests[:count], requests[count:] or requests
    if options.ready_timeout_s:
        await _check_one(target, extra[0], options)
    if options.num_warmups:
        await _warm_up(target, extra, options)
    times = options.arrivals.times(len(requests), random.Random(options.seed))
    before = await server_clock.scrape(target)
    run = await _run_with_bar(target, requests, times, options)
    clock = server_clock.between(before, await server_clock.scrape(target))
    return _full_result(run, options, model, clock)


def make_requests(
    samples: Sequence[Sample], options: ServeOptions, model: str
) -> list[LoadRequest]:
    """The bodies to send, in order."""
    requests = []
    for number, sample in enumerate(samples):
        body: dict[str, Any] = {"model": model, "max_tokens": sample.max_tokens}
        if options.backend == "openai-chat":
            body["messages"] = [{"role": "user", "content": sample.prompt}]
        else:
            body["prompt"] = sample.prompt
        requests.append(
            LoadRequest(
                options.endpoint,
                json.dumps(body | dict(options.fields)).encode(),
                sample.num_prompt_tokens,
                sample.max_tokens,
                f"{options.request_id_prefix}{number}",
            )
        )
    return requests


async def first_model(target: Target) -> str:
    """The first model that the server lists; raises RequestFailedError if it lists none."""
    try:
        return str(json.loads(await fetch(target, "GET", "/v1/models"))["data"][0]["id"])
    except AnswerError as error:
        raise RequestFailedError(
            f"no list of models from {target.url}: {error}; is the server running there?"
        ) from error
    except (ValueError, LookupError, TypeError) as error:
        raise RequestFailedError(f"{target.url} lists no models; name one with --model") from error


async def _wait_listed(target: Target, timeout_s: float) -> None:
    """Poll until the server lists its models, if there is a time to wait."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with suppress(AnswerError):
            await fetch(target, "GET", "/v1/models")
            return
        await asyncio.sleep(READY_INTERVAL_S)


async def _check_one(target: Target, request: LoadRequest, options: ServeOptions) -> None:
    """One request before the run; raises RequestFailedError if it fails."""
    run = await run_load(target, [request], [0.0], timeout_s=options.ready_timeout_s)
    if not run.records[0].is_success:
        raise RequestFailedError(f"the first request failed: {run.records[0].error}")


async def _warm_up(target: Target, requests: Sequence[LoadRequest], options: ServeOptions) -> None:
    chosen = [requests[i % len(requests)] for i in range(options.num_warmups)]
    run = await run_load(
        target, chosen, [0.0] * len(chosen), max_concurrency=options.max_concurrency,
        timeout_s=options.request_timeout_s,
    )  # fmt: skip
    failed = [record for record in run.records if not record.is_success]
    if failed:
        raise RequestFailedError(
            f"{len(failed)} of {len(chosen)} warm-up requests failed: {failed[0].error}"
        )


async def _run_with_bar(
    target: Target, requests: Sequence[LoadRequest], times: Sequence[float], options: ServeOptions
) -> LoadRun:
    from tqdm import tqdm

    with tqdm(total=len(requests), desc="requests", disable=not options.shows_progress) as bar:

        def advance(record: Record) -> None:
            bar.update()

        return await run_load(
            target, requests, times, max_concurrency=options.max_concurrency,
            timeout_s=options.request_timeout_s, on_done=advance,
        )  # fmt: skip


def _full_result(
    run: LoadRun, options: ServeOptions, model: str, clock: server_clock.ServerClock | None
) -> dict[str, Any]:
    rate = options.arrivals.rate
    result = {
        "date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": options.backend,
        "endpoint_type": options.backend,
        "label": options.saving.label,
        "model_id": model,
        "tokenizer_id": options.tokenizer or model,
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": options.arrivals.burstiness,
        "max_concurrency": options.max_concurrency,
        **options.saving.metadata,
        **make_result(run, options.result, clock),
    }
    if options.arrivals.ramp_up is not None:
        result |= {
            "ramp_up_strategy": options.arrivals.ramp_up,
            "ramp_up_start_rps": options.arrivals.start_rate,
            "ramp_up_end_rps": options.arrivals.end_rate,
        }
    return result | (details_of(run) if options.saving.detailed else {})


def _save(result: dict[str, Any], options: ServeOptions) -> None:
    if options.json is not None:
        write_json(options.json, result)
    saving = options.saving
    if not saving.save:
        return
    path = saving.directory / (saving.filename or result_name(result, saving.label))
    if saving.append:
        with path.open("a") as file:
            file.write(json.dumps(result) + "\n")
    else:
        write_json(path, result)


def result_name(result: dict[str, Any], label: str | None) -> Path:
    """`<label>-<rate>qps-[concurrency<n>-]<model>-<timestamp>.json`."""
    limit = result["max_concurrency"]
    parts = [
        label or result["backend"],
        f"{result['request_rate']}qps",
        *([f"concurrency{limit}"] if limit is not None else []),
        str(result["model_id"]).rstrip("/").split("/")[-1],
        result["date"],
    ]
    return Path("-".join(parts) + ".json")


def _warn(text: str) -> None:
    print(f"headrace: {text}", file=sys.stderr)
