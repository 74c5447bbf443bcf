"""Where headrace keeps what it downloads and builds."""

from collections.abc import Mapping
from pathlib import Path

from headrace.configs.environment import CACHE, read


def cache_dir(environ: Mapping[str, str]) -> Path:
    """$HEADRACE_CACHE, else $XDG_CACHE_HOME/headrace, else ~/.cache/headrace.

    The directory need not exist.

    Empty variables count as absent, and so does an XDG_CACHE_HOME that is not absolute (XDG base
    directory specification).
    """
    if own := read(CACHE, environ):
        return Path(own).expanduser().absolute()
    xdg = Path(environ.get("XDG_CACHE_HOME", ""))
    if xdg.is_absolute():
        return xdg / "headrace"
    home = environ.get("HOME")
    return (Path(home) if home else Path.home()) / ".cache" / "headrace"
