"""`headrace bench throughput`: how much an engine gets done when all requests are there at once."""

import argparse
import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headrace.configs.engine_args import AsyncEngineArgs
from headrace.configs.sampling_params import RequestOutputKind, SamplingParams
from headrace.frontend.cli.bench.datasets import (
    Sample,
    add_dataset_options,
    dataset_options,
    make_samples,
)
from headrace.frontend.cli.bench.offline import (
    add_engine_options,
    changed_fields,
    engine_args,
    open_llm,
    tokens_of,
)
from headrace.frontend.cli.bench.options import (
    add_json_option,
    add_progress_option,
    check_choice,
    not_negative,
    positive,
    refuse,
)
from headrace.frontend.cli.bench.prompt_tokens import LocalTokens
from headrace.frontend.cli.bench.report import check_writable, print_section, write_json

if TYPE_CHECKING:
    from headrace.frontend.outputs import RequestOutput

EXAMPLES = """examples:
  headrace bench throughput smollm2-135m --input-len 128 --output-len 128 --num-prompts 200
  headrace bench throughput --dataset-path sharegpt.json --num-prompts 500 --json result.json
  headrace bench throughput --async-engine --num-prompts 100

All requests are handed over at once and generated to their full lengths. Compare tokens/s only at
the same lengths: output tokens cost far more than input tokens.
"""
BACKENDS = ("headrace", "vllm")
BACKENDS_NOT_BUILT = ("hf", "mii", "vllm-chat")
REFUSED = {
    "--lora-path": "LoRA adapters are not supported yet",
    "--prequeue-requests": "requests are always handed over before the engine is waited for",
}


def add_parser(subparsers: Any) -> None:
    """Add `bench throughput`."""
    parser = subparsers.add_parser(
        "throughput",
        help="requests and tokens a second with all requests there at once",
        description="Measure how many requests and tokens a second an engine of our own gets done.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_json_option(parser)
    add_progress_option(parser)
    parser.add_argument(
        "--backend", default="headrace", metavar="KIND", help="headrace, also spelled vllm"
    )
    parser.add_argument("--n", type=positive, default=1, help="choices of each prompt (default: 1)")
    parser.add_argument(
        "--num-warmups", type=not_negative, default=0,
        help="requests generated before, not counted (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--async-engine", action="store_true", help="use the engine that the server uses"
    )
    parser.add_argument("--disable-detokenize", action="store_true", help="token ids only, no text")
    add_dataset_options(parser, None)
    refuse(parser, REFUSED)
    add_engine_options(parser)


@dataclass(frozen=True)
class Counts:
    """What was generated in how many seconds."""

    elapsed: float
    num_requests: int
    num_input_tokens: int
    num_output_tokens: int


def run(args: argparse.Namespace) -> int:
    """Raises HeadraceError if the engine does not start or a request fails."""
    check_writable(args.json)
    check_choice("--backend", args.backend, BACKENDS, BACKENDS_NOT_BUILT)
    dataset_options(args)  # refuses what is wrong before a model is loaded
    counts = asyncio.run(_run_async(args)) if args.async_engine else _run_llm(args)
    result = make_result(counts)
    rows = {
        "requests": result["num_requests"],
        "duration (s)": result["elapsed_time"],
        "input tokens": result["total_input_tokens"],
        "output tokens": result["total_output_tokens"],
        "requests/s": result["requests_per_second"],
        "output tokens/s": result["output_tokens_per_second"],
        "input + output tokens/s": result["tokens_per_second"],
    }
    print_section("throughput benchmark", rows)
    if args.json is not None:
        write_json(args.json, result)
    return 0


def make_result(counts: Counts) -> dict[str, Any]:
    total = counts.num_input_tokens + counts.num_output_tokens
    return {
        "elapsed_time": counts.elapsed,
        "num_requests": counts.num_requests,
        "total_num_tokens": total,
        "requests_per_second": counts.num_requests / counts.elapsed,
        "tokens_per_second": total / counts.elapsed,
        "total_input_tokens": counts.num_input_tokens,
        "total_output_tokens": counts.num_output_tokens,
        "output_tokens_per_second": counts.num_output_tokens / counts.elapsed,
    }


def _run_llm(args: argparse.Namespace) -> Counts:
    with open_llm(engine_args(args)) as llm:
        warmups, samples = _samples(args, tokens_of(llm))
        if warmups:
            llm.generate(_prompts(warmups), _params(warmups, args), use_tqdm=False)
        prompts, params = _prompts(samples), _params(samples, args)
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=not args.disable_tqdm)
        return _count(time.perf_counter() - began, outputs)


async def _run_async(args: argparse.Namespace) -> Counts:
    from headrace.frontend.async_engine import AsyncEngine

    fields = changed_fields(engine_args(args))
    engine = AsyncEngine(AsyncEngineArgs(**{"disable_log_stats": True, **fields}))
    try:
        await engine.start()
        tokenizer = engine.renderer.get_tokenizer()
        warmups, samples = _samples(args, LocalTokens(tokenizer, tokenizer.vocab_size))
        await _generate_all(engine, warmups, args, "warm-up")
        began = time.perf_counter()
        outputs = await _generate_all(engine, samples, args, "requests")
        return _count(time.perf_counter() - began, outputs)
    finally:
        await engine.stop()


async def _generate_all(
    engine: Any, samples: Sequence[Sample], args: argparse.Namespace, what: str
) -> "list[RequestOutput]":
    from tqdm import tqdm

    bar = tqdm(total=len(samples), desc=what, disable=args.disable_tqdm or not samples)

    async def one(number: int, prompt: Any, params: SamplingParams) -> "RequestOutput":
        params.output_kind = RequestOutputKind.FINAL_ONLY
        [rendered] = await engine.renderer.render_cmpl_async([prompt])
        outputs = [o async for o in engine.generate(rendered, params, f"{what}-{number}")]
        bar.update()
        last: RequestOutput = outputs[-1]
        return last

    with bar:
        pairs = zip(_prompts(samples), _params(samples, args), strict=True)
        return await asyncio.gather(*(one(i, *pair) for i, pair in enumerate(pairs)))


def _samples(args: argparse.Namespace, tokens: LocalTokens) -> tuple[list[Sample], list[Sample]]:
    """Those that warm up, and those that count: none is in both, so that none is cached."""
    options = dataset_options(args)
    count = options.num_prompts
    options = replace(options, num_prompts=count + args.num_warmups)
    samples = make_samples(options, tokens, args.seed or 0)
    return samples[count:], samples[:count]


def _prompts(samples: Iterable[Sample]) -> list[Any]:
    return [
        sample.prompt if isinstance(sample.prompt, str) else {"prompt_token_ids": sample.prompt}
        for sample in samples
    ]


def _params(samples: Iterable[Sample], args: argparse.Namespace) -> list[SamplingParams]:
    return [
        SamplingParams(
            n=args.n,
            temperature=1.0,
            max_tokens=sample.max_tokens,
            ignore_eos=True,
            detokenize=not args.disable_detokenize,
        )
        for sample in samples
    ]


def _count(elapsed: float, outputs: "Sequence[RequestOutput]") -> Counts:
    return Counts(
        elapsed=elapsed,
        num_requests=len(outputs),
        num_input_tokens=sum(len(output.prompt_token_ids or []) for output in outputs),
        num_output_tokens=sum(len(c.token_ids) for output in outputs for c in output.outputs),
    )
