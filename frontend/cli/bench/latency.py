"""`headrace bench latency`: how long one batch takes, offline."""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from headrace.configs.beam_search_params import BeamSearchParams
from headrace.configs.errors import ConfigurationError
from headrace.configs.sampling_params import SamplingParams
from headrace.frontend.cli.bench.measures import percent_name, percentile
from headrace.frontend.cli.bench.offline import (
    add_engine_options,
    engine_args,
    open_llm,
    tokens_of,
)
from headrace.frontend.cli.bench.options import (
    add_json_option,
    add_progress_option,
    not_negative,
    positive,
)
from headrace.frontend.cli.bench.profile import print_profile, profile_batch
from headrace.frontend.cli.bench.prompt_tokens import random_prompt
from headrace.frontend.cli.bench.report import check_writable, print_section, write_json

PERCENTS = (10, 25, 50, 75, 90, 99)
CACHE_TIMEOUT_S = 60.0  # for the pages of the KV cache, which a step would else wait for
EXAMPLES = """examples:
  headrace bench latency smollm2-135m --batch-size 1
  headrace bench latency --batch-size 64 --input-len 512 --output-len 64 --json latency.json

A batch of random prompts is generated to its full length, over and over, with new prompts each time
so that the prefix cache holds none of them. The time per step is the latency over the output
length; the first step also computes the prompts. The CPU time below it is what this process (the
front end, which does not run the model) spends on a step.

--profile divides the steps of one batch after the warm-up and leaves. The first table has the
phases of the median step in which every sequence decodes (with --output-len 1, of the median step
with prompts): what follows `beside it` runs in another thread or process meanwhile. The second has
the operations of the native kernels, all layers together: GB/s are weights, keys and values;
norms before a product are part of it. With --profiler-config, torch's profiler records instead.
"""
Iteration = Callable[[], None]


def add_parser(subparsers: Any) -> None:
    """Add `bench latency`."""
    parser = subparsers.add_parser(
        "latency",
        help="time one batch from start to end",
        description="Time how long an engine of our own takes for one batch of requests.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_json_option(parser)
    add_progress_option(parser)
    for flag, default, what in (
        ("--input-len", 32, "prompt tokens"),
        ("--output-len", 128, "output tokens"),
        ("--batch-size", 8, "prompts in a batch"),
        ("--n", 1, "choices of each prompt; the beam width with --use-beam-search"),
        ("--num-iters", 30, "batches that count"),
    ):
        parser.add_argument(
            flag, type=positive, default=default, metavar="N", help=f"{what} (default: {default})"
        )
    parser.add_argument(
        "--num-iters-warmup", type=not_negative, default=10, metavar="N",
        help="batches before them (default: 10)",
    )  # fmt: skip
    parser.add_argument("--use-beam-search", action="store_true", help="search with beams")
    parser.add_argument("--disable-detokenize", action="store_true", help="token ids only, no text")
    parser.add_argument(
        "--profile", action="store_true",
        help="divide the steps of one batch after the warm-up by phase and operation, and leave",
    )  # fmt: skip
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Raises HeadraceError if the engine does not start or a request fails."""
    check_writable(args.json)
    engine = engine_args(args)
    with open_llm(engine) as llm:
        llm.collective_rpc("wait_for_cache", args=(CACHE_TIMEOUT_S,))
        iterate = _iteration(llm, args)
        _repeat(iterate, args.num_iters_warmup, "warm-up", args.disable_tqdm)
        if args.profile and engine.profiler_config:
            llm.start_profile()
            iterate()
            llm.stop_profile()
            print(f"the profile of one batch is in {engine.profiler_config}")
            return 0
        if args.profile:
            profile = profile_batch(llm, iterate)
            print_profile(profile)
            if args.json is not None:
                write_json(args.json, profile)
            return 0
        cpu_before = time.process_time()
        latencies = _repeat(iterate, args.num_iters, "batches", args.disable_tqdm)
        cpu = time.process_time() - cpu_before
    result = make_result(args, latencies, cpu)
    _print(result, args)
    if args.json is not None:
        write_json(args.json, result)
    return 0


def make_result(args: argparse.Namespace, latencies: list[float], cpu_s: float) -> dict[str, Any]:
    """The result of batches that took `latencies` seconds, and `cpu_s` of this process in all."""
    average = statistics.fmean(latencies)
    num_output = args.batch_size * args.n * args.output_len
    return {
        "avg_latency": average,
        "latencies": latencies,
        "percentiles": {percent_name(p): percentile(latencies, p) for p in PERCENTS},
        "input_len": args.input_len,
        "output_len": args.output_len,
        "batch_size": args.batch_size,
        "n": args.n,
        "output_tokens_per_second": num_output / average,
        "avg_step_time": average / args.output_len,
        "avg_step_cpu_time_front_end": cpu_s / len(latencies) / args.output_len,
    }


def _iteration(llm: Any, args: argparse.Namespace) -> Iteration:
    """One batch, with prompts of its own; the same ones in every run of the command."""
    rng = random.Random(0)
    tokens = tokens_of(llm)

    def prompts() -> list[dict[str, Any]]:
        batch = (random_prompt(tokens, args.input_len, rng) for _ in range(args.batch_size))
        return [{"prompt_token_ids": prompt} for prompt in batch]

    if args.use_beam_search:
        beams = BeamSearchParams(args.n, args.output_len, ignore_eos=True)
        return lambda: llm.beam_search(prompts(), beams)
    params = SamplingParams(
        n=args.n,
        temperature=1.0,
        max_tokens=args.output_len,
        ignore_eos=True,
        detokenize=not args.disable_detokenize,
    )

    def generate() -> None:
        outputs = llm.generate(prompts(), params, use_tqdm=False)
        lengths = {len(choice.token_ids) for output in outputs for choice in output.outputs}
        if lengths != {args.output_len}:
            raise ConfigurationError(
                f"--output-len {args.output_len} does not fit: outputs have {sorted(lengths)} "
                "tokens; the context length is shorter than --input-len and --output-len together"
            )

    return generate


def _repeat(iterate: Iteration, count: int, what: str, is_quiet: bool) -> list[float]:
    from tqdm import tqdm

    latencies = []
    for _ in tqdm(range(count), desc=what, disable=is_quiet):
        began = time.perf_counter()
        iterate()
        latencies.append(time.perf_counter() - began)
    return latencies


def _print(result: dict[str, Any], args: argparse.Namespace) -> None:
    shape = f"{args.batch_size} x ({args.input_len} + {args.output_len}) tokens"
    rows = {
        "batch": shape,
        "mean latency (s)": result["avg_latency"],
        **{f"  p{name} (s)": value for name, value in result["percentiles"].items()},
        "output tokens/s": result["output_tokens_per_second"],
        "time per step (ms)": 1e3 * result["avg_step_time"],
        "  CPU time of the front end in it (ms)": 1e3 * result["avg_step_cpu_time_front_end"],
    }
    print_section("latency benchmark", rows)
