"""`--config FILE`: options in YAML, below those of the command line and above the defaults."""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from headrace.configs.errors import ConfigurationError
from headrace.configs.options import flag_of
from headrace.frontend.cli.parser import Parser

CONFIG_FLAG = "--config"
_SUFFIXES = (".yaml", ".yml")


def add_config_option(parser: Parser) -> None:
    """Add `--config FILE` to a command, unless it has an option of that name."""
    if parser.option(CONFIG_FLAG) is None:
        parser.add_argument(
            CONFIG_FLAG,
            metavar="FILE",
            help="YAML file of options (max-model-len: 4k); those of the command line win",
        )


def apply_config_file(parser: Parser, arguments: list[str]) -> None:
    """Make the options of the file that `arguments` name the defaults of `parser`.

    The file is a flat mapping of flag names to values; `null` leaves an option unset. Raises
    ConfigurationError for a second file, an unreadable one, and an unknown or unfit option.
    """
    paths = _paths(arguments)
    if not paths:
        return
    if len(paths) > 1:
        raise ConfigurationError(f"{CONFIG_FLAG} is given {len(paths)} times; give one file")
    path = Path(paths[0])
    given = {word.split("=")[0].split(".")[0] for word in arguments if word.startswith("-")}
    for key, value in _read(path).items():
        action = _action_of(parser, path, str(key))
        if value is None or given.intersection(action.option_strings):
            continue
        try:
            converted = _converted(action, value)
        except (argparse.ArgumentTypeError, ValueError, TypeError) as error:
            raise ConfigurationError(f"{path}: {key}: {error}") from error
        action.required = False
        parser.set_defaults(**{action.dest: converted})


def _paths(arguments: list[str]) -> list[str]:
    paths = [a.partition("=")[2] for a in arguments if a.startswith(CONFIG_FLAG + "=")]
    for word, following in itertools.pairwise(arguments):
        if word == CONFIG_FLAG:
            paths.append(following)
    return paths


def _read(path: Path) -> dict[Any, Any]:
    import yaml

    if path.suffix not in _SUFFIXES:
        raise ConfigurationError(
            f"{CONFIG_FLAG} {path}: the name must end in {' or '.join(_SUFFIXES)}"
        )
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{CONFIG_FLAG} {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        text = " ".join(str(error).split())
        raise ConfigurationError(f"{CONFIG_FLAG} {path}: not valid YAML: {text}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigurationError(
            f"{CONFIG_FLAG} {path}: must hold lines like max-model-len: 4096, not a "
            f"{type(content).__name__}"
        )
    return content


def _action_of(parser: Parser, path: Path, key: str) -> argparse.Action:
    flag = flag_of(key)
    action = parser.option(flag)
    if action is None or flag in (CONFIG_FLAG, "--help"):
        raise ConfigurationError(f"{path}: {key}: {parser.unknown_flag(flag)}")
    if isinstance(action, argparse.BooleanOptionalAction) and flag.startswith("--no-"):
        raise ConfigurationError(f"{path}: {key}: write {key.removeprefix('no-')}: false instead")
    return action


def _converted(action: argparse.Action, value: Any) -> Any:
    """The value that argparse would make of the same on the command line."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"must be true or false, got {value!r}")
        is_inverse = isinstance(action, argparse._StoreFalseAction)
        return not value if is_inverse else value
    is_append = isinstance(action, argparse._AppendAction)
    if is_append or action.nargs in ("+", "*"):
        return [_word(action, item) for item in (value if isinstance(value, list) else [value])]
    if value is True and action.nargs == "?":
        return action.const
    return _word(action, value)


def _word(action: argparse.Action, value: Any) -> Any:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    try:
        converted = action.type(text) if callable(action.type) else text
    except ValueError as error:
        name = getattr(action.type, "__name__", "value")
        raise ValueError(f"invalid {name} value: {text!r}") from error
    if action.choices is not None and converted not in action.choices:
        names = ", ".join(str(choice) for choice in action.choices if choice is not None)
        raise ValueError(f"must be one of {names}, got {text!r}")
    return converted
