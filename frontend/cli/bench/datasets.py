"""Prompts to benchmark with: made up, or from files. The same seed gives the same requests."""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.configs.errors import ConfigurationError
from headrace.frontend.cli.bench.options import check_choice, not_negative, positive
from headrace.frontend.cli.bench.prompt_tokens import PromptLike, PromptTokens, random_prompt

RANDOM_INPUT_LEN = 1024
RANDOM_OUTPUT_LEN = 128
CUSTOM_OUTPUT_LEN = 256
PREFIX_OUTPUT_LEN = 128
# Conversations outside of these bounds are left out, as is usual with this data set.
MIN_SHAREGPT_TOKENS = 4
MAX_SHAREGPT_PROMPT = 1024
MAX_SHAREGPT_TOTAL = 2048
NOT_BUILT = (
    *("burstgpt", "sonnet", "random-mm", "random-rerank", "hf", "custom_audio", "custom_image"),
    *("spec_bench", "speed_bench", "timed_trace", "bfcl"),
)


@dataclass(frozen=True)
class Sample:
    """A prompt and how much to generate. `num_prompt_tokens` None: only the server knows."""

    prompt: PromptLike
    num_prompt_tokens: int | None
    max_tokens: int


@dataclass(frozen=True)
class Spread:
    """Lengths are uniform in [mean * (1 - share), mean * (1 + share)], for either side."""

    input: float = 0.0
    output: float = 0.0


@dataclass(frozen=True)
class DatasetOptions:
    """What `--dataset-name` and its companions say; lengths None: the data set's own."""

    name: str = "random"
    path: Path | None = None
    num_prompts: int = 1000
    input_len: int | None = None
    output_len: int | None = None
    spread: Spread = Spread()
    prefix_len: int = 0
    repetition_prefix_len: int = 256
    repetition_suffix_len: int = 256
    num_prefixes: int = 10
    oversample: bool = True
    shuffle: bool = True


def add_dataset_options(parser: argparse.ArgumentParser, default: str | None) -> None:
    """`default` None: sharegpt with a path, else random."""
    group = parser.add_argument_group("data set")
    group.add_argument(
        "--dataset-name", default=default, metavar="NAME",
        help=f"one of {', '.join(DATASETS)} (default: "
        f"{default or 'sharegpt with --dataset-path, else random'})",
    )  # fmt: skip
    group.add_argument(
        "--dataset-path", type=Path, default=None, metavar="FILE",
        help="sharegpt: a JSON list of {conversations: [{value}, {value}]}; custom: JSON lines of "
        "{prompt, output_tokens}",
    )  # fmt: skip
    group.add_argument(
        "--num-prompts", type=positive, default=1000, help="requests to send (default: 1000)"
    )
    group.add_argument(
        "--input-len", "--random-input-len", type=positive, default=None, metavar="TOKENS",
        help=f"prompt length of random prompts (default: {RANDOM_INPUT_LEN})",
    )  # fmt: skip
    group.add_argument(
        "--output-len", "--random-output-len", "--sharegpt-output-len", "--custom-output-len",
        "--prefix-repetition-output-len", type=positive, default=None, metavar="TOKENS",
        help=f"output length (default: random {RANDOM_OUTPUT_LEN}, sharegpt as in the file, custom "
        f"as in the file or {CUSTOM_OUTPUT_LEN}, prefix_repetition {PREFIX_OUTPUT_LEN})",
    )  # fmt: skip
    group.add_argument(
        "--range-ratio", "--random-range-ratio", type=_spread, default=Spread(), metavar="SHARE",
        help="random lengths vary by this share of the mean, 0 to 1, or as JSON per side: "
        '{"input": 0.5, "output": 0.1} (default: 0)',
    )  # fmt: skip
    group.add_argument(
        "--prefix-len", "--random-prefix-len", type=not_negative, default=0, metavar="TOKENS",
        help="tokens that all random prompts begin with, before --input-len (default: 0)",
    )  # fmt: skip
    for name, default_len, what in (
        ("prefix-len", 256, "length of each shared prefix"),
        ("suffix-len", 256, "length of what differs"),
        ("num-prefixes", 10, "how many different prefixes"),
    ):
        group.add_argument(
            f"--prefix-repetition-{name}", type=positive, default=default_len,
            help=f"prefix_repetition: {what} (default: {default_len})",
        )  # fmt: skip
    group.add_argument(
        "--no-oversample", action="store_true",
        help="do not repeat a file that has fewer prompts than --num-prompts",
    )  # fmt: skip
    group.add_argument("--disable-shuffle", action="store_true", help="keep the file's order")


def dataset_options(args: argparse.Namespace) -> DatasetOptions:
    """The options of a command line that has `add_dataset_options`; raises ConfigurationError."""
    name = args.dataset_name or ("sharegpt" if args.dataset_path else "random")
    check_choice("--dataset-name", name, tuple(DATASETS), NOT_BUILT)
    if name in ("sharegpt", "custom") and args.dataset_path is None:
        raise ConfigurationError(f"--dataset-name {name} needs --dataset-path FILE")
    if name not in ("sharegpt", "custom") and args.dataset_path is not None:
        raise ConfigurationError(f"--dataset-path is for sharegpt and custom, not for {name}")
    return DatasetOptions(
        name=name,
        path=args.dataset_path,
        num_prompts=args.num_prompts,
        input_len=args.input_len,
        output_len=args.output_len,
        spread=args.range_ratio,
        prefix_len=args.prefix_len,
        repetition_prefix_len=args.prefix_repetition_prefix_len,
        repetition_suffix_len=args.prefix_repetition_suffix_len,
        num_prefixes=args.prefix_repetition_num_prefixes,
        oversample=not args.no_oversample,
        shuffle=not args.disable_shuffle,
    )


def make_samples(
    options: DatasetOptions, tokens: PromptTokens, seed: int, as_text: bool = False
) -> list[Sample]:
    """The requests to send. `as_text`: prompts are texts even where ids would be exact."""
    samples = DATASETS[options.name](options, tokens, random.Random(seed))
    return [_to_text(sample, tokens) for sample in samples] if as_text else samples


def _to_text(sample: Sample, tokens: PromptTokens) -> Sample:
    if isinstance(sample.prompt, str):
        return sample
    return replace(sample, prompt=tokens.decode(sample.prompt))


def _random(options: DatasetOptions, tokens: PromptTokens, rng: random.Random) -> list[Sample]:
    prefix = random_prompt(tokens, options.prefix_len, rng)
    samples = []
    for _ in range(options.num_prompts):
        num_input = _vary(options.input_len or RANDOM_INPUT_LEN, options.spread.input, rng)
        num_output = _vary(options.output_len or RANDOM_OUTPUT_LEN, options.spread.output, rng)
        prompt = _join(prefix, random_prompt(tokens, num_input, rng))
        samples.append(Sample(prompt, options.prefix_len + num_input, num_output))
    return samples


def _prefix_repetition(
    options: DatasetOptions, tokens: PromptTokens, rng: random.Random
) -> list[Sample]:
    """Every prefix is used as often as every other, give or take one, in random order."""
    prefix_len, suffix_len = options.repetition_prefix_len, options.repetition_suffix_len
    prefixes = [random_prompt(tokens, prefix_len, rng) for _ in range(options.num_prefixes)]
    num_output = options.output_len or PREFIX_OUTPUT_LEN
    samples = [
        Sample(
            _join(prefixes[i % len(prefixes)], random_prompt(tokens, suffix_len, rng)),
            prefix_len + suffix_len,
            num_output,
        )
        for i in range(options.num_prompts)
    ]
    if options.shuffle:
        rng.shuffle(samples)
    return samples


def _sharegpt(options: DatasetOptions, tokens: PromptTokens, rng: random.Random) -> list[Sample]:
    def samples(items: list[Any]) -> Iterator[Sample]:
        for item in items:
            turns = item.get("conversations") if isinstance(item, dict) else None
            if not isinstance(turns, list) or len(turns) < 2:
                continue
            prompt, answer = (str(turn.get("value", "")) for turn in turns[:2])
            num_prompt, num_answer = tokens.count(prompt), tokens.count(answer)
            num_output = options.output_len or num_answer or RANDOM_OUTPUT_LEN
            if num_prompt is not None and not _is_usable(num_prompt, num_output, options):
                continue
            if prompt:
                yield Sample(prompt, num_prompt, num_output)

    return _fill(_read(options, json.loads), samples, options, rng)


def _is_usable(num_prompt: int, num_output: int, options: DatasetOptions) -> bool:
    if num_prompt < MIN_SHAREGPT_TOKENS or num_prompt > MAX_SHAREGPT_PROMPT:
        return False
    if options.output_len is None and num_output < MIN_SHAREGPT_TOKENS:
        return False
    return num_prompt + num_output <= MAX_SHAREGPT_TOTAL


def _custom(options: DatasetOptions, tokens: PromptTokens, rng: random.Random) -> list[Sample]:
    def lines(text: str) -> list[Any]:
        return [json.loads(line) for line in text.splitlines() if line.strip()]

    def samples(items: list[Any]) -> Iterator[Sample]:
        for item in items:
            prompt = item.get("prompt") if isinstance(item, dict) else None
            if not isinstance(prompt, str) or not prompt:
                raise ConfigurationError(f"{options.path}: every line needs a text as its 'prompt'")
            wanted = options.output_len or item.get("output_tokens") or CUSTOM_OUTPUT_LEN
            yield Sample(prompt, tokens.count(prompt), int(wanted))

    return _fill(_read(options, lines), samples, options, rng)


def _read(options: DatasetOptions, parse: Callable[[str], Any]) -> list[Any]:
    assert options.path is not None
    try:
        items = parse(options.path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--dataset-path {options.path}: {error}") from error
    if not isinstance(items, list):
        raise ConfigurationError(f"--dataset-path {options.path}: a list was expected")
    return items


def _fill(
    items: list[Any],
    samples: Callable[[list[Any]], Iterator[Sample]],
    options: DatasetOptions,
    rng: random.Random,
) -> list[Sample]:
    """As many samples as were asked for, repeated if there are fewer and that is allowed."""
    if options.shuffle:
        rng.shuffle(items)
    chosen = []
    for sample in samples(items):
        chosen.append(sample)
        if len(chosen) == options.num_prompts:
            return chosen
    if not chosen:
        raise ConfigurationError(f"--dataset-path {options.path} has no prompt that can be used")
    if options.oversample:
        chosen += rng.choices(chosen, k=options.num_prompts - len(chosen))
    return chosen


def _join(first: PromptLike, second: PromptLike) -> PromptLike:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first} {second}" if first else second
    assert isinstance(first, list) and isinstance(second, list)
    return first + second


def _vary(mean: int, share: float, rng: random.Random) -> int:
    return max(1, rng.randint(round(mean * (1 - share)), round(mean * (1 + share))))


def _spread(text: str) -> Spread:
    try:
        value = json.loads(text)
        spread = Spread(**value) if isinstance(value, dict) else Spread(float(value), float(value))
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number nor JSON: {error}"
        ) from None
    if not all(0 <= share <= 1 for share in (spread.input, spread.output)):
        raise argparse.ArgumentTypeError(f"{text!r} is not in [0, 1]")
    return spread


DATASETS: dict[str, Callable[[DatasetOptions, PromptTokens, random.Random], list[Sample]]] = {
    "random": _random,
    "sharegpt": _sharegpt,
    "custom": _custom,
    "prefix_repetition": _prefix_repetition,
}
