"""What a command line may look like before argparse reads it: spellings and dotted keys."""

import argparse
import json
import re
import sys
from collections.abc import Callable
from typing import Any

from headrace.configs.errors import ConfigurationError
from headrace.configs.options import parse_size
from headrace.frontend.cli.parser import Parser

_DOTTED = re.compile(r"(--?[A-Za-z][\w-]*)\.([^=]+)(?:=(.*))?", re.DOTALL)
_HELP = "--help="


def with_dashes(argument: str) -> str:
    """`--max_model_len=1` as `--max-model-len=1`: underscores in a flag are dashes.

    What follows the first dot or equals sign stays: keys of JSON have underscores.
    """
    match = re.match(r"--[^.=]*", argument)
    if match is None:
        return argument
    return match.group().replace("_", "-") + argument[match.end() :]


def take_help_topic(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The TOPIC of a `--help=TOPIC`, and the arguments without it."""
    topics = [a.removeprefix(_HELP) for a in arguments if a.startswith(_HELP)]
    rest = [a for a in arguments if not a.startswith(_HELP)]
    return (topics[-1] if topics else None), rest


def merge_dotted_keys(parser: Parser, arguments: list[str]) -> list[str]:
    """`--flag.key value` and the JSON of `--flag`, as one `--flag=JSON`.

    Dotted keys win over those of the JSON, wherever they stand. A value is JSON, or a number such
    as 4k, or else text. `--flag.key+ v` appends to a list, `--flag.key+=v,w` appends several.
    """
    dotted = {_action_of(parser, word) for word in arguments if _DOTTED.fullmatch(word)} - {None}
    if not dotted:
        return arguments
    merging = {action: _Merge(action) for action in dotted if action is not None}
    merged: list[str | _Merge] = []
    words = iter(arguments)
    for word in words:
        action = _action_of(parser, word)
        if action not in merging:
            merged.append(word)
            continue
        merge = merging[action]
        if merge not in merged:
            merged.append(merge)
        match = _DOTTED.fullmatch(word)
        flag, _, after = word.partition("=")
        value: str | None = match[3] if match else (after if "=" in word else None)
        has_equals = value is not None
        if value is None:
            value = next(words, None)
        if value is None:
            raise ConfigurationError(f"{word}: a value is missing")
        if match is None:
            merge.add_plain(flag, value)
        else:
            merge.add_dotted(match[2], value, several=has_equals)
    return [word if isinstance(word, str) else word.argument() for word in merged]


def _action_of(parser: Parser, word: str) -> argparse.Action | None:
    """The option that a word such as `--a`, `--a=1` or `--a.b=1` belongs to."""
    if not word.startswith("-"):
        return None
    return parser.option(re.split(r"[.=]", word, maxsplit=1)[0])


class _Merge:
    """The value of one option in the making."""

    def __init__(self, action: argparse.Action) -> None:
        self._flag = next((f for f in action.option_strings if f.startswith("--")), "")
        self._plain: dict[str, Any] = {}
        self._edits: list[Callable[[dict[str, Any]], None]] = []
        self._seen: set[str] = set()

    def add_plain(self, flag: str, text: str) -> None:
        """The JSON given with the flag itself; the last one counts."""
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ConfigurationError(f"{flag}: {text[:60]!r} is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ConfigurationError(
                f"{flag} {text[:60]} cannot have keys such as those given with dots; leave out one "
                "or the other"
            )
        self._plain = value

    def add_dotted(self, key: str, text: str, *, several: bool) -> None:
        path = key.removesuffix("+").split(".")
        if not all(path):
            raise ConfigurationError(f"{self._flag}.{key}: a key between the dots is empty")
        if key.endswith("+"):
            texts = text.split(",") if several else [text]
            self._edits.append(lambda root: self._append(root, path, [_value(t) for t in texts]))
            return
        if key in self._seen:
            print(
                f"headrace: warning: {self._flag}.{key} is given twice; the last one counts",
                file=sys.stderr,
            )
        self._seen.add(key)
        self._edits.append(lambda root: self._set(root, path, _value(text)))

    def argument(self) -> str:
        for edit in self._edits:
            edit(self._plain)
        return f"{self._flag}={json.dumps(self._plain)}"

    def _append(self, root: dict[str, Any], path: list[str], values: list[Any]) -> None:
        target = self._parent(root, path).setdefault(path[-1], [])
        if not isinstance(target, list):
            raise ConfigurationError(
                f"{self._flag}.{'.'.join(path)}+ appends to a list, but the value is {target!r}"
            )
        target += values

    def _set(self, root: dict[str, Any], path: list[str], value: Any) -> None:
        self._parent(root, path)[path[-1]] = value

    def _parent(self, root: dict[str, Any], path: list[str]) -> dict[str, Any]:
        for depth, key in enumerate(path[:-1]):
            root = root.setdefault(key, {})
            if not isinstance(root, dict):
                raise ConfigurationError(
                    f"{self._flag}.{'.'.join(path)}: {'.'.join(path[: depth + 1])} is {root!r}, "
                    "which has no keys"
                )
        return root


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return parse_size(text)
    except argparse.ArgumentTypeError:
        return text
