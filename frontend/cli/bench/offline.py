"""An engine of our own to measure offline, from a command line."""

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headrace.configs.engine_args import EngineArgs
from headrace.configs.options import default_of, option_fields
from headrace.frontend.cli.bench.prompt_tokens import LocalTokens
from headrace.frontend.cli.engine_options import (
    add_model_argument,
    engine_args_of,
    log_to_stderr,
)

if TYPE_CHECKING:
    from headrace.frontend.llm import LLM


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """The positional MODEL and every engine option."""
    add_model_argument(parser)
    EngineArgs.add_cli_args(parser)


def engine_args(args: argparse.Namespace) -> EngineArgs:
    """The engine arguments of a command line that has `add_engine_options`."""
    return engine_args_of(args, EngineArgs)


def changed_fields(args: EngineArgs) -> dict[str, Any]:
    """The fields that differ from their defaults, by name."""
    return {
        field.name: getattr(args, field.name)
        for field in option_fields(type(args))
        if getattr(args, field.name) != default_of(field)
    }


@contextmanager
def open_llm(args: EngineArgs) -> "Iterator[LLM]":
    """An `LLM` that ends with the block; warnings of the engine go to stderr."""
    from headrace.frontend.llm import LLM  # here, so that help is quick

    log_to_stderr(logging.WARNING)
    llm = LLM(**{"model": args.model, **changed_fields(args)})
    try:
        yield llm
    finally:
        llm.close()


def tokens_of(llm: "LLM") -> LocalTokens:
    """The vocabulary that random prompts are drawn from."""
    tokenizer = llm.get_tokenizer()
    return LocalTokens(tokenizer, tokenizer.vocab_size)
