"""Reading prompts from and printing answers to the terminal."""

import contextlib
import sys
import time
from collections.abc import Generator, Iterator


@contextlib.contextmanager
def ends_at_interrupt() -> Iterator[None]:
    """Ctrl-C ends the block, as end of file does; it is no failure."""
    try:
        yield
    except KeyboardInterrupt:
        print()


def read_lines(prompt: str) -> Iterator[str]:
    """Lines typed by the user, without empty ones, until end of file."""
    shown = prompt if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(shown)
        except EOFError:
            return
        if line.strip():
            yield line


def print_pieces(pieces: Generator[str, None, None], shows_stats: bool) -> str:
    """Print text as it comes, with its speed if asked; returns all of it."""
    began = time.monotonic()
    first = None
    parts = []
    with contextlib.closing(pieces):
        for piece in pieces:
            first = first or time.monotonic()
            parts.append(piece)
            print(piece, end="", flush=True)
    print()
    if shows_stats and first is not None:
        elapsed = time.monotonic() - began
        print(
            f"[first text after {first - began:.2f} s, {len(parts)} pieces in {elapsed:.2f} s, "
            f"{len(parts) / elapsed:.1f} a second]",
            file=sys.stderr,
        )
    return "".join(parts)
