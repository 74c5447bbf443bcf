"""What one rendering of a chat template may use: time, text, lists.

A template can double a string in a loop, so that the memory is gone long before the time is. Every
operation that makes text or lists larger therefore asks here first, with a bound of what it would
make. The bound of all of them together also limits what can be held at one time.
"""

import re
import time
from collections.abc import ItemsView, Iterable, KeysView, Mapping, ValuesView
from dataclasses import dataclass
from typing import Any

from jinja2.utils import Namespace

from headrace.configs.errors import InvalidRequestError

MAX_ITEMS = 1_000_000  # of one list that a template makes
MAX_FIELD_WIDTH = 10_000  # of a formatted number or string, and of an indentation
MAX_INT_BITS = 4096
TOTAL_FACTOR = 16  # all text that is ever made, as a multiple of the longest one allowed
_CONTAINERS = (list, tuple, dict, set, frozenset, KeysView, ValuesView, ItemsView)


@dataclass(frozen=True)
class TemplateLimits:
    """What one rendering may use."""

    max_seconds: float = 10.0
    max_output_chars: int = 16_000_000  # of the result, and of every string on the way


DEFAULT_LIMITS = TemplateLimits()


class Budget:
    """The limits of one rendering, and what it has used. Its methods raise InvalidRequestError."""

    def __init__(self, limits: TemplateLimits) -> None:
        self.limits = limits
        self._deadline = time.monotonic() + limits.max_seconds
        self._num_chars = 0

    def check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise InvalidRequestError(
                f"the chat template took longer than {self.limits.max_seconds:g} s", "messages"
            )

    def check_text(self, num_chars: int) -> None:
        """Before a string of that length is made."""
        self.check_time()
        limit = self.limits.max_output_chars
        if num_chars > limit:
            raise InvalidRequestError(
                f"the chat template makes text longer than {limit} characters", "messages"
            )
        self._num_chars += num_chars
        if self._num_chars > TOTAL_FACTOR * limit:
            raise InvalidRequestError(
                f"the chat template makes more than {TOTAL_FACTOR * limit} characters of text on "
                "the way",
                "messages",
            )

    def check_items(self, num_items: int) -> None:
        """Before a list of that length is made."""
        self.check_time()
        if num_items > MAX_ITEMS:
            raise InvalidRequestError(
                f"the chat template makes a list longer than {MAX_ITEMS} items", "messages"
            )
        self.check_text(8 * num_items)  # a reference takes as much as some characters

    def size(self, value: Any) -> int:
        """A bound of `len(str(value))`.

        Containers are walked as they would be printed: the same list may be inside many times.
        """
        if isinstance(value, str):
            return len(value)
        limit, total, stack = self.limits.max_output_chars, 0, [value]
        while stack:
            item = stack.pop()
            if isinstance(item, Namespace):  # prints what it holds
                item = item._Namespace__attrs
            if isinstance(item, str):
                total += len(item) + 4
            elif isinstance(item, Mapping):
                total += 4 * len(item) + 2
                stack += [*item.keys(), *item.values()]
            elif isinstance(item, _CONTAINERS):
                total += 2 * len(item) + 2
                stack += item
            else:
                total += 64 + (item.bit_length() // 3 if isinstance(item, int) else 0)
            if total > limit or len(stack) > limit:
                self.check_text(limit + 1)
        return total

    def charge(self, value: Any) -> Any:
        """Count a value that was made, or is about to be printed."""
        if isinstance(value, str):
            self.check_text(len(value))
        elif isinstance(value, _CONTAINERS):
            self.check_items(len(value))
        return value

    def replacing(self, text: str, old: str, new: str, count: int | None) -> None:
        """Before `text.replace(old, new, count)`."""
        found = text.count(old)
        if count is not None and count >= 0:
            found = min(found, count)
        self.check_text(len(text) + found * max(0, len(new) - len(old)))

    def check_format(self, form: str, values: Iterable[Any], field: re.Pattern[str]) -> None:
        """Before `values` are put into the fields of `form`, which `field` matches.

        A width that is itself a value could be anything, so it is refused.
        """
        fields = field.findall(form)
        digits = [number for text in fields for number in re.findall(r"\d+", text)]
        width = max((int(number[:10]) for number in digits), default=0)
        if width > MAX_FIELD_WIDTH or any("*" in f or f.endswith("{") for f in fields):
            raise InvalidRequestError(
                f"the chat template formats a field of unknown width or above {MAX_FIELD_WIDTH}",
                "messages",
            )
        largest = max(map(self.size, values), default=0)
        self.check_text(len(form) + len(fields) * (largest + width))
