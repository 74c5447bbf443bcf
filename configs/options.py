"""Options said once: a dataclass field carries flag names, help and choices of its CLI flag."""

import argparse
import dataclasses
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def option(
    default: Any,
    help: str,
    *,
    group: str,
    flags: Sequence[str] = (),
    choices: Sequence[str] | None = None,
    parse: Callable[[str], Any] | None = None,
    secret: bool = False,
) -> Any:
    """A dataclass field that is also a CLI flag.

    `flags` are further spellings beside `--field-name`; a `secret` is left out of the repr.
    """
    metadata = {
        "help": help,
        "group": group,
        "flags": tuple(flags),
        "choices": choices,
        "parse": parse,
    }
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


def parse_size(text: str) -> int:
    """`1k` is 1000 and `1K` is 1024 (also m/M, g/G, t/T); decimals with a lower-case suffix."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number like 4096, 4k, 25.6k, 4K or 2G")
    number, suffix = match.groups()
    if suffix.isupper() or not suffix:
        if "." in number:
            raise argparse.ArgumentTypeError(f"{text!r}: decimals need a lower-case suffix (25.6k)")
        return int(int(number) * 1024 ** _POWERS[suffix.lower()])
    return round(float(number) * 1000 ** _POWERS[suffix])


def add_options(parser: argparse.ArgumentParser, owner: type, *, skip: Sequence[str] = ()) -> None:
    """Add one flag per option field of the dataclass `owner`, in its groups.

    Absent flags leave the default.
    """
    hints = typing.get_type_hints(owner)
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(owner):
        if field.name in skip or "group" not in field.metadata:
            continue
        name = field.metadata["group"]
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        _add_flag(groups[name], field, hints[field.name])


def _add_flag(group: Any, field: "dataclasses.Field[Any]", hint: Any) -> None:
    metadata = field.metadata
    names = ["--" + field.name.replace("_", "-"), *metadata["flags"]]
    base, is_list = _base_type(hint)
    shown = "" if field.default is None else f" (default: {field.default})"
    common = {"dest": field.name, "default": field.default, "help": metadata["help"] + shown}
    if base is bool:
        group.add_argument(*names, action=argparse.BooleanOptionalAction, **common)
        return
    convert = metadata["parse"] or base
    metavar = None if metadata["choices"] else names[0].rsplit("-", 1)[-1].upper()
    if is_list:
        common["nargs"] = "+"
    group.add_argument(*names, type=convert, choices=metadata["choices"], metavar=metavar, **common)


def _base_type(hint: Any) -> tuple[type, bool]:
    """The scalar type of `int | None` or `str | list[str] | None`, and whether it may be a list."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        parts = [part for part in typing.get_args(hint) if part is not type(None)]
        is_list = any(typing.get_origin(part) is list for part in parts)
        scalars = [part for part in parts if isinstance(part, type) and part is not bool]
        return (scalars[0] if scalars else bool), is_list
    if typing.get_origin(hint) is typing.Literal:
        return str, False
    return hint, False
