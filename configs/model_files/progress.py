"""What a download says on stderr: bars on a terminal, plain lines elsewhere."""

import contextlib
import sys
from collections.abc import Callable, Iterator


class Progress:
    """Messages and bars on stderr; silent unless `enabled`."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled

    def say(self, message: str) -> None:
        """One line."""
        if self._enabled:
            sys.stderr.write(f"{message}\n")
            sys.stderr.flush()

    @contextlib.contextmanager
    def bar(self, title: str, total: int) -> Iterator[Callable[[int], object]]:
        """A function that takes the bytes done since its last call, out of `total`."""
        if not self._enabled or not sys.stderr.isatty():
            yield lambda num_bytes: None
            return
        from tqdm import tqdm

        with tqdm(desc=title, total=total, unit="B", unit_scale=True, leave=False) as bar:
            yield bar.update
