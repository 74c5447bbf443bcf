"""Options of `headrace bench serve`, parsed once into frozen values."""

import argparse
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.configs.environment import API_KEY, read
from headrace.configs.errors import ConfigurationError
from headrace.frontend.cli.bench.arrivals import Arrivals
from headrace.frontend.cli.bench.datasets import (
    DatasetOptions,
    add_dataset_options,
    dataset_options,
)
from headrace.frontend.cli.bench.options import (
    add_json_option,
    add_progress_option,
    check_choice,
    json_object,
    key_value,
    not_negative,
    percentages,
    positive,
    positive_float,
    refuse,
)
from headrace.frontend.cli.bench.serve_result import METRICS, ResultOptions

EXAMPLES = """examples:
  headrace bench serve                          the server on port 8000, 1,000 requests at once
  headrace bench serve --num-prompts 200 --max-concurrency 16 --input-len 512 --output-len 128
  headrace bench serve --request-rate 5 --goodput ttft:500 tpot:50
  headrace bench serve --dataset-name sharegpt --dataset-path sharegpt.json --backend openai-chat
  headrace bench serve --self-check             is this machine quiet enough to measure?

ttft is the time from sending a request to its first token; tpot the time per token after that; itl
the time between the events of a stream; e2el the time to the last token. Compare servers at the
same lengths and the same load: look at tpot and output tokens/s together, since batching trades one
for the other. If any request fails, the figures are of the others only and the exit code is 1.
"""
BACKENDS = {"openai": "openai", "headrace": "openai", "vllm": "openai",
            "openai-chat": "openai-chat", "headrace-chat": "openai-chat",
            "vllm-chat": "openai-chat"}  # fmt: skip
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
BACKENDS_NOT_BUILT = (
    *("openai-responses", "openai-audio", "openai-embeddings", "openai-embeddings-chat"),
    *("openai-embeddings-clip", "openai-embeddings-vlm2vec", "infinity-embeddings"),
    *("infinity-embeddings-clip", "vllm-pooling", "vllm-rerank"),
)
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
SAMPLING = {  # field -> type
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "repetition_penalty": float,
}
REFUSED = {
    "--profile": "profiling a server is not supported yet",
    "--lora-modules": "LoRA adapters are not supported yet",
    "--lora-assignment": "LoRA adapters are not supported yet",
    "--plot-timeline": "plots are not made here; --save-detailed writes what one needs for them",
    "--probe-request-rate": "probe requests are not supported yet",
}


@dataclass(frozen=True)
class SavingOptions:
    """What is written where, beside `--json`."""

    save: bool
    detailed: bool
    append: bool
    directory: Path
    filename: str | None
    metadata: Mapping[str, str]
    label: str | None


@dataclass(frozen=True)
class ServeOptions:
    """A checked command line."""

    backend: str
    url: str
    endpoint: str
    headers: Mapping[str, str]
    insecure: bool
    model: str | None
    served_model_name: str | None
    tokenizer: str | None
    skip_tokenizer: bool
    dataset: DatasetOptions
    num_warmups: int
    arrivals: Arrivals
    max_concurrency: int | None
    fields: Mapping[str, Any]  # of every request's body
    result: ResultOptions
    saving: SavingOptions
    json: Path | None
    ready_timeout_s: float
    request_timeout_s: float
    request_id_prefix: str
    seed: int
    shows_progress: bool
    allow_failures: bool


def add_options(parser: argparse.ArgumentParser) -> None:
    """Everything `headrace bench serve` takes."""
    add_json_option(parser)
    add_progress_option(parser)
    parser.add_argument(
        "--self-check", action="store_true",
        help="measure a built-in server whose timings are known instead, and print the error",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of prompts and times (default: 0)")
    _add_server_options(parser)
    add_dataset_options(parser, "random")
    _add_load_options(parser)
    _add_sampling_options(parser)
    _add_result_options(parser)
    refuse(parser, REFUSED)


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--backend", default="openai", metavar="KIND",
        help=f"the API to speak: {', '.join(BACKENDS)} (default: openai)",
    )  # fmt: skip
    group.add_argument(
        "--base-url", default=None, metavar="URL", help="the server (default: --host, --port)"
    )
    group.add_argument("--host", default="127.0.0.1", help="(default: 127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, help="(default: 8000)")
    group.add_argument(
        "--endpoint", default=None, metavar="PATH",
        help="(default: /v1/completions, or /v1/chat/completions with openai-chat)",
    )  # fmt: skip
    group.add_argument(
        "--model", default=None, help="model to ask for (default: the first that the server lists)"
    )
    group.add_argument(
        "--served-model-name", default=None, help="its name in requests (default: --model)"
    )
    group.add_argument(
        "--tokenizer", default=None,
        help="a directory, file, alias or hub id to make prompts of exact length with (default: "
        "the server's /tokenize, else plain words)",
    )  # fmt: skip
    group.add_argument("--tokenizer-mode", default="auto", help="auto is the only one")
    group.add_argument(
        "--skip-tokenizer-init", action="store_true", help="make prompts of plain words"
    )
    group.add_argument(
        "--api-key", default=None,
        help="(default: the variable OPENAI_API_KEY or HEADRACE_API_KEY)",
    )  # fmt: skip
    group.add_argument(
        "--header", type=key_value, nargs="+", default=[], metavar="NAME=VALUE",
        help="headers of every request",
    )  # fmt: skip
    group.add_argument("--insecure", action="store_true", help="accept any TLS certificate")


def _add_load_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--num-warmups", type=not_negative, default=0,
        help="requests sent before the measurement, not counted (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--request-rate", type=positive_float, default=float("inf"), metavar="PER_SECOND",
        help="requests a second; inf sends all at once (default: inf)",
    )  # fmt: skip
    group.add_argument(
        "--burstiness", type=positive_float, default=1.0,
        help="of the times between requests: 1 Poisson, below burstier, above steadier "
        "(default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--max-concurrency", type=positive, default=None,
        help="most requests at once (default: no limit)",
    )  # fmt: skip
    group.add_argument(
        "--ramp-up-strategy", choices=["linear", "exponential"], default=None,
        help="go from --ramp-up-start-rps to --ramp-up-end-rps instead of one rate",
    )  # fmt: skip
    group.add_argument("--ramp-up-start-rps", type=positive_float, default=None, metavar="RATE")
    group.add_argument("--ramp-up-end-rps", type=positive_float, default=None, metavar="RATE")
    group.add_argument(
        "--ready-check-timeout-sec", type=float, default=0.0, metavar="SECONDS",
        help="wait so long for the server to answer a first request (default: 0, no wait)",
    )  # fmt: skip
    group.add_argument(
        "--request-timeout", type=positive_float, default=6 * 3600.0, metavar="SECONDS",
        help="a request that takes longer has failed (default: 6 hours)",
    )  # fmt: skip
    group.add_argument(
        "--request-id-prefix", default=None, help="of X-Request-Id (default: bench-RANDOM-)"
    )
    group.add_argument(
        "--allow-failures", action="store_true", help="exit code 0 even if requests failed"
    )


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (what is not given is left to the server)")
    for name, kind in SAMPLING.items():
        group.add_argument("--" + name.replace("_", "-"), type=kind, default=None, metavar="X")
    group.add_argument(
        "--ignore-eos", action="store_true", help="generate to the full output length"
    )
    group.add_argument(
        "--logprobs", type=not_negative, default=None, metavar="N", help="ask for N per token"
    )
    group.add_argument(
        "--extra-body", type=json_object, default={}, metavar="JSON",
        help="more fields of every request's body",
    )  # fmt: skip


def _add_result_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("result")
    group.add_argument(
        "--percentile-metrics", default="ttft,tpot,itl", metavar="NAMES",
        help=f"which to show, of {', '.join(METRICS)} (default: ttft,tpot,itl)",
    )  # fmt: skip
    group.add_argument(
        "--metric-percentiles", type=percentages, default=(99.0,), metavar="PERCENTS",
        help="as 50,90,99 (default: 99)",
    )  # fmt: skip
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="METRIC:MS",
        help="count requests a second that keep these limits, as ttft:500 "
        f"({', '.join(GOODPUT_METRICS)})",
    )  # fmt: skip
    group.add_argument(
        "--save-result", action="store_true",
        help="write LABEL-RATEqps-[concurrencyN-]MODEL-TIMESTAMP.json",
    )  # fmt: skip
    group.add_argument("--save-detailed", action="store_true", help="with every request in it")
    group.add_argument("--append-result", action="store_true", help="as a line of an older file")
    group.add_argument("--result-dir", type=Path, default=Path("."), metavar="DIR")
    group.add_argument("--result-filename", default=None, metavar="NAME")
    group.add_argument(
        "--metadata", type=key_value, nargs="+", default=[], metavar="KEY=VALUE",
        help="fields to add to the result",
    )  # fmt: skip
    group.add_argument("--label", default=None, help="first part of the file name")


def parse_options(args: argparse.Namespace) -> ServeOptions:
    """Raises ConfigurationError where options do not fit together."""
    check_choice("--backend", args.backend, tuple(BACKENDS), BACKENDS_NOT_BUILT)
    check_choice("--tokenizer-mode", args.tokenizer_mode, ("auto",), ("hf", "mistral", "slow"))
    backend = BACKENDS[args.backend]
    endpoint = args.endpoint or ENDPOINTS[backend]
    if not endpoint.startswith("/"):
        raise ConfigurationError(f"--endpoint must start with /, got {endpoint}")
    host = f"[{args.host}]" if ":" in args.host else args.host
    prefix = args.request_id_prefix
    return ServeOptions(
        backend=backend,
        url=args.base_url or f"http://{host}:{args.port}",
        endpoint=endpoint,
        headers=_headers(args),
        insecure=args.insecure,
        model=args.model,
        served_model_name=args.served_model_name,
        tokenizer=args.tokenizer,
        skip_tokenizer=args.skip_tokenizer_init,
        dataset=dataset_options(args),
        num_warmups=args.num_warmups,
        arrivals=_arrivals(args),
        max_concurrency=args.max_concurrency,
        fields=_fields(args, backend),
        result=_result_options(args),
        saving=_saving(args),
        json=args.json,
        ready_timeout_s=args.ready_check_timeout_sec,
        request_timeout_s=args.request_timeout,
        request_id_prefix=f"bench-{secrets.token_hex(4)}-" if prefix is None else prefix,
        seed=args.seed,
        shows_progress=not args.disable_tqdm,
        allow_failures=args.allow_failures,
    )


def _headers(args: argparse.Namespace) -> dict[str, str]:
    headers = dict(args.header)
    key = args.api_key or os.environ.get("OPENAI_API_KEY") or read(API_KEY, os.environ)
    if key:
        headers.setdefault("Authorization", f"Bearer {key}")
    return headers


def _arrivals(args: argparse.Namespace) -> Arrivals:
    ends = (args.ramp_up_start_rps, args.ramp_up_end_rps)
    if args.ramp_up_strategy is None:
        if ends != (None, None):
            raise ConfigurationError("--ramp-up-start-rps and -end-rps need --ramp-up-strategy")
        return Arrivals(args.request_rate, args.burstiness)
    if None in ends or args.request_rate != float("inf"):
        raise ConfigurationError(
            "--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps, and takes no "
            "--request-rate"
        )
    return Arrivals(
        burstiness=args.burstiness,
        ramp_up=args.ramp_up_strategy,
        start_rate=args.ramp_up_start_rps,
        end_rate=args.ramp_up_end_rps,
    )


def _fields(args: argparse.Namespace, backend: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    for name in SAMPLING:
        value = getattr(args, name)
        if value is not None:
            fields[name] = value
    if args.ignore_eos:
        fields["ignore_eos"] = True
    if args.logprobs is not None and backend == "openai-chat":
        fields |= {"logprobs": True, "top_logprobs": args.logprobs}
    elif args.logprobs is not None:
        fields["logprobs"] = args.logprobs
    return fields | args.extra_body


def _result_options(args: argparse.Namespace) -> ResultOptions:
    metrics = tuple(name.strip() for name in args.percentile_metrics.split(","))
    for name in metrics:
        check_choice("--percentile-metrics", name, tuple(METRICS), ())
    goodput = {}
    for text in args.goodput:
        name, _, limit = text.partition(":")
        check_choice("--goodput", name, GOODPUT_METRICS, ())
        try:
            goodput[name] = float(limit)
        except ValueError:
            raise ConfigurationError(f"--goodput {text}: METRIC:MS, as ttft:500") from None
    return ResultOptions(
        metrics=metrics,
        percents=args.metric_percentiles,
        goodput=goodput or None,
        paced=args.max_concurrency is None
        and (args.ramp_up_strategy is not None or args.request_rate != float("inf")),
    )


def _saving(args: argparse.Namespace) -> SavingOptions:
    saves = args.save_result or args.append_result
    if args.save_detailed and not (saves or args.json):
        raise ConfigurationError("--save-detailed needs --save-result or --json FILE")
    if saves and not args.result_dir.is_dir():
        raise ConfigurationError(f"--result-dir {args.result_dir} is not a directory")
    return SavingOptions(
        save=saves,
        detailed=args.save_detailed,
        append=args.append_result,
        directory=args.result_dir,
        filename=args.result_filename,
        metadata=dict(args.metadata),
        label=args.label,
    )
