"""Options said once: a dataclass field carries its CLI flag, help, choices, range and status.

A field is `implemented`; or `later`: known, but accepted only at its default (or at a value that
holds anyway); or `legacy`: accepted, without effect, with one warning.
"""

import argparse
import copy
import dataclasses
import json
import os
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal

from headrace.configs.errors import ConfigurationError, UnsupportedFeatureError

Status = Literal["implemented", "later", "legacy"]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_UNSET_WORDS = ("", "None")
_MAX_SHOWN_CHARS = 60  # of a value in a message


def option(
    default: Any,
    help: str,
    *,
    group: str,
    flags: Sequence[str] = (),
    choices: Sequence[str] | None = None,
    parse: Callable[[str], Any] | None = None,
    minimum: float | None = None,
    status: Status = "implemented",
    holds: Sequence[Any] = (),
    switch: bool = False,
    bare: Any = None,
    secret: bool = False,
) -> Any:
    """A dataclass field that is also a CLI flag.

    `flags` are further spellings beside `--field-name`. `parse` makes a value from a word of the
    command line (default: by the field's type). `holds`: values of a `later` field that are
    accepted beside the default, since they ask for what is the case anyway. A `switch` is a bool
    without its `--no-` form. `bare`: the value of the flag without a word after it. A `secret` is
    left out of the repr. A dict or list as default is fresh for each instance.
    """
    metadata = {
        "help": help, "group": group, "flags": tuple(flags), "choices": choices, "parse": parse,
        "minimum": minimum, "status": status, "holds": tuple(holds), "switch": switch,
        "bare": bare, "secret": secret,
    }  # fmt: skip
    if isinstance(default, dict | list):
        return dataclasses.field(
            default_factory=lambda: copy.deepcopy(default), metadata=metadata, repr=not secret
        )
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


def option_fields(owner: type) -> "list[dataclasses.Field[Any]]":
    """The fields of the dataclass `owner` that were made by `option`."""
    return [field for field in dataclasses.fields(owner) if "group" in field.metadata]


def default_of(field: "dataclasses.Field[Any]") -> Any:
    """The field's default, fresh."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def flag_of(name: str) -> str:
    """`max_model_len` as `--max-model-len`."""
    return "--" + name.replace("_", "-")


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


def parse_json(text: str) -> Any:
    """Any JSON value."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text[:_MAX_SHOWN_CHARS]!r} is not JSON: {error}") from (
            error
        )


def parse_json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"{text[:_MAX_SHOWN_CHARS]!r} is not a JSON object {{...}}"
        )
    return value


def add_options(parser: argparse.ArgumentParser, owner: type, *, skip: Sequence[str] = ()) -> None:
    """Add one flag per option field of the dataclass `owner`, in its groups.

    Absent flags leave the default. A spelling that the parser has already (such as the `-q` of a
    command) keeps its meaning; a field whose own flag is there is left to that flag.
    """
    hints = typing.get_type_hints(owner)
    taken = parser._option_string_actions
    groups: dict[str, Any] = {}
    for field in option_fields(owner):
        if field.name in skip or flag_of(field.name) in taken:
            continue
        name = field.metadata["group"]
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        names = [flag_of(field.name), *(f for f in field.metadata["flags"] if f not in taken)]
        _add_flag(groups[name], names, field, hints[field.name])


def _add_flag(group: Any, names: list[str], field: "dataclasses.Field[Any]", hint: Any) -> None:
    metadata, kind, default = field.metadata, _kind(hint), default_of(field)
    shown = "" if default is None or default == {} or default == [] else f" (default: {default})"
    text = (metadata["help"] + shown + _mark(field, kind.base)).replace("%", "%%")
    common = {"dest": field.name, "default": default, "help": text}
    if kind.base is bool:
        action = "store_true" if metadata["switch"] else _OnOff
        group.add_argument(*names, action=action, **common)
        return
    if kind.is_list:
        common["nargs"] = "+"
    elif metadata["bare"] is not None:
        common |= {"nargs": "?", "const": metadata["bare"]}
    convert = metadata["parse"] or (parse_json_object if kind.base is dict else kind.base)
    choices = metadata["choices"]
    metavar = None if choices else names[0].rsplit("-", 1)[-1].upper()
    if kind.is_optional:
        convert = _or_unset(convert)
        if choices:
            choices, metavar = [*choices, None], "{" + ",".join(choices) + "}"
    group.add_argument(*names, type=convert, choices=choices, metavar=metavar, **common)


def _mark(field: "dataclasses.Field[Any]", base: type) -> str:
    """What the help says of an option that does not do all it could."""
    status: Status = field.metadata["status"]
    holds = field.metadata["holds"]
    if status == "legacy":
        return " [no effect]"
    if status == "implemented" or (holds and base is bool):
        return ""
    known = ", ".join(str(value) for value in (default_of(field), *holds) if value is not None)
    return f" [so far only: {known}]" if holds else " [not implemented yet]"


class _OnOff(argparse.BooleanOptionalAction):
    """`--x` / `--no-x`; the help as given (some versions of Python append the default)."""

    def __init__(self, *args: Any, help: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, help=help, **kwargs)
        self.help = help


def _or_unset(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """`convert`, with None for the words that stand for "unset"."""

    def parse(text: str) -> Any:
        return None if text in _UNSET_WORDS else convert(text)

    parse.__name__ = getattr(convert, "__name__", "value")  # argparse: "invalid int value"
    return parse


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What a type hint says: the scalar (or dict), whether None is allowed, whether a list."""

    base: type
    is_optional: bool
    is_list: bool
    allowed: tuple[type, ...]  # classes of values; float allows int, str allows paths


def _kind(hint: Any) -> _Kind:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    parts = typing.get_args(hint) if is_union else (hint,)
    origins = [typing.get_origin(part) or part for part in parts]
    classes: list[type] = []
    for part, origin in zip(parts, origins, strict=True):
        if origin is Literal:
            classes.append(str)
        elif origin in (list, tuple):
            classes += [origin, list]
        elif isinstance(origin, type) and part is not types.NoneType:
            classes.append(origin)
    listed = [part for part, origin in zip(parts, origins, strict=True) if origin in (list, tuple)]
    inner = typing.get_args(listed[0])[0] if listed else None
    scalars = [c for c in classes if c not in (list, tuple)]
    preferred = [c for c in scalars if c is not bool] or scalars or [inner or str]
    allowed = {*classes, *((int,) if float in classes else ())}
    return _Kind(preferred[0], types.NoneType in parts, bool(listed), tuple(allowed))


def check_options(args: Any) -> list[str]:
    """Check every option field of `args`; returns the warnings for legacy ones.

    Raises ConfigurationError for a wrong type, a value outside range or choices, and
    UnsupportedFeatureError for a field that cannot do anything yet.
    """
    hints = typing.get_type_hints(type(args))
    warnings = []
    for field in option_fields(type(args)):
        value, default = getattr(args, field.name), default_of(field)
        if value == default or value is None:
            continue
        status: Status = field.metadata["status"]
        if status == "legacy":
            warnings.append(
                f"{field.name} ({flag_of(field.name)}) has no effect: {field.metadata['help']}"
            )
            continue
        _check_value(field, value, _kind(hints[field.name]))
        if status == "later" and value not in field.metadata["holds"]:
            raise UnsupportedFeatureError(
                f"{_spelled(field, value)} is not implemented yet ({field.name}: "
                f"{field.metadata['help']}); leave it out (default: {default!r})",
                field.name,
            )
    return warnings


def _check_value(field: "dataclasses.Field[Any]", value: Any, kind: _Kind) -> None:
    name, choices, minimum = field.name, field.metadata["choices"], field.metadata["minimum"]
    is_typed = isinstance(value, kind.allowed) or (kind.base is dict and callable(value))
    if isinstance(value, bool) and bool not in kind.allowed:
        is_typed = False
    if not is_typed:
        names = " or ".join(sorted({allowed.__name__ for allowed in kind.allowed}))
        raise ConfigurationError(
            f"{name} must be of type {names}, got {_shown(field, value)} of type "
            f"{type(value).__name__}"
        )
    if choices is not None and value not in choices:
        raise ConfigurationError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    # Not `value < minimum`: nan is refused as well.
    if minimum is not None and isinstance(value, int | float) and not value >= minimum:
        raise ConfigurationError(f"{name} must be at least {minimum:g}, got {value}")


def _spelled(field: "dataclasses.Field[Any]", value: Any) -> str:
    """The option as it would be on a command line."""
    if isinstance(value, bool):
        return flag_of(field.name if value else "no_" + field.name)
    return f"{flag_of(field.name)} {_shown(field, value)}"


def _shown(field: "dataclasses.Field[Any]", value: Any) -> str:
    if field.metadata["secret"]:
        return "(hidden)"
    text = json.dumps(value, default=str) if isinstance(value, dict | list) else str(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "..."


def normalized(args: Any) -> Any:
    """A copy of the dataclass `args`: paths as text, None as the default where None means nothing.

    The copy shares no dict or list with `args`.
    """
    hints = typing.get_type_hints(type(args))
    values = {}
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if value is None and not _kind(hints[field.name]).is_optional:
            value = default_of(field)
        values[field.name] = copy.deepcopy(value)
    return type(args)(**values)
