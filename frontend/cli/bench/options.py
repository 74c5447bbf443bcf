"""Options that bench commands share, and the refusal of those that are known but not built."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from headrace.configs.errors import ConfigurationError


class _Refused(argparse.Action):
    """An option that people know from elsewhere; using it is an error that says why."""

    def __init__(self, option_strings: list[str], dest: str, reason: str, nargs: str) -> None:
        super().__init__(option_strings, dest, nargs, help=argparse.SUPPRESS)
        self.reason = reason

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> NoReturn:
        raise ConfigurationError(f"{option_string}: {self.reason}")


def refuse(parser: argparse.ArgumentParser, reasons: Mapping[str, str]) -> None:
    """Make each option in `reasons` an error with its reason, whatever values follow it."""
    for flag, reason in reasons.items():
        parser.add_argument(
            flag, action=_Refused, reason=reason, nargs="*", dest="refused_" + flag.strip("-")
        )


def check_choice(flag: str, value: str, built: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Raise ConfigurationError unless `value` is one of `built`; `known` are not supported yet."""
    if value in built:
        return
    what = "is not supported yet" if value in known else "does not exist"
    raise ConfigurationError(f"{flag} {value} {what}; choose one of {', '.join(built)}")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """`--json FILE`, also spelled `--output-json`."""
    parser.add_argument(
        "--json",
        "--output-json",
        dest="json",
        type=Path,
        default=None,
        metavar="FILE",
        help="write the result, every raw number included, to FILE as JSON",
    )


def add_progress_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--disable-tqdm", action="store_true", help="no progress bar (it goes to stderr)"
    )


def positive(text: str) -> int:
    """An integer of at least 1."""
    return _integer(text, 1)


def not_negative(text: str) -> int:
    """An integer of at least 0."""
    return _integer(text, 0)


def positive_float(text: str) -> float:
    """A number above 0; `inf` is one."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def key_value(text: str) -> tuple[str, str]:
    """`KEY=VALUE` as a pair."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def percentages(text: str) -> tuple[float, ...]:
    """`50,99.9` as numbers in (0, 100]."""
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 < value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of percentages like 50,99")
    return values


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
    return value
