"""Result tables for people and result files for programs."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.configs.errors import ConfigurationError

LABEL_WIDTH = 44
VALUE_WIDTH = 14


def print_section(title: str, rows: Mapping[str, Any]) -> None:
    """A heading and one aligned line per row; numbers are rounded to be read."""
    print(f"{f' {title} ':=^{LABEL_WIDTH + VALUE_WIDTH}}")
    for label, value in rows.items():
        print(f"{label + ':':<{LABEL_WIDTH}}{readable(value):>{VALUE_WIDTH}}")


def print_table(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[Any]]) -> None:
    """A heading, a line of column names, and a line of values per row."""
    label_width = max(len(label) for label in [*rows, ""]) + 2
    widths = [max(len(name), 9) + 2 for name in columns]
    print(f"{f' {title} ':-^{LABEL_WIDTH + VALUE_WIDTH}}")
    heads = (f"{name:>{width}}" for name, width in zip(columns, widths, strict=True))
    print(" " * label_width + "".join(heads))
    for label, values in rows.items():
        cells = (f"{readable(value):>{w}}" for value, w in zip(values, widths, strict=True))
        print(f"{label:<{label_width}}" + "".join(cells))


def readable(value: Any) -> str:
    """A number with as many digits as a reader needs; `-` for one that is not known."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.4f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write `result` to `path`; raises ConfigurationError if that is not possible."""
    text = json.dumps(result, indent=2) + "\n"
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigurationError(f"cannot write the result to {path}: {error}") from error
    print(f"result written to {path}", file=sys.stderr)


def check_writable(path: Path | None) -> None:
    """Raise ConfigurationError now rather than after a long measurement."""
    if path is None:
        return
    parent = path.resolve().parent
    if path.is_dir() or not parent.is_dir():
        raise ConfigurationError(f"--json {path}: {parent} must exist, and the name be a file's")
