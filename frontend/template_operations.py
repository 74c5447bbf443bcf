"""What chat templates can call, with the budget asked first: filters, string methods, operators.

Everything here has the result of the plain operation, or raises.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2 import filters as plain
from jinja2.runtime import Context

from headrace.configs.errors import InvalidRequestError
from headrace.frontend.template_budget import MAX_INT_BITS, MAX_ITEMS, Budget

BUDGET = "_headrace_budget"  # the variable of a rendering that holds its Budget
MAX_INDENT = 64
# Their results can be far larger than their arguments, and no chat template needs them.
REMOVED_FILTERS = (
    "batch", "center", "pprint", "slice", "urlize", "wordwrap", "xmlattr",
)  # fmt: skip
_BRACE_FIELD = re.compile(r"\{[^{}]*[{}]")
_PERCENT_FIELD = re.compile(r"%(?:\([^()%]*\))?[-#0 +]*[*\d]*(?:\.[*\d]*)?")
_REFUSED_METHODS = frozenset({"encode", "to_bytes", "translate"})
_PADDINGS = frozenset({"center", "ljust", "rjust", "zfill"})


def budget_of(context: Context) -> Budget:
    """The budget of the rendering that `context` belongs to."""
    budget: Budget = context[BUDGET]
    return budget


def check_operator(budget: Budget, operator: str, left: Any, right: Any) -> None:
    """Before `left operator right`."""
    budget.check_time()
    if operator == "%" and isinstance(left, str):
        values = right if isinstance(right, tuple) else (right,)
        budget.check_format(left, [*values, right], _PERCENT_FIELD)
    elif operator == "+" and isinstance(left, str) and isinstance(right, str):
        budget.check_text(len(left) + len(right))
    elif operator == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
        budget.check_items(len(left) + len(right))
    elif operator == "**" and not (abs(left) < 2**31 and abs(right) < 64):
        raise jinja2.TemplateRuntimeError("power too large")
    elif operator == "*":
        _check_product(budget, left, right)


def _check_product(budget: Budget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_INT_BITS:
            raise jinja2.TemplateRuntimeError("number too large")
        return
    sequence, count = (left, right) if isinstance(right, int) else (right, left)
    if not isinstance(count, int):
        return
    if isinstance(sequence, str):
        budget.check_text(len(sequence) * max(0, count))
    elif isinstance(sequence, list | tuple):
        budget.check_items(len(sequence) * max(0, count))


def check_method(budget: Budget, method: Any, args: tuple[Any, ...], kwargs: Any) -> None:
    """Before `method(*args, **kwargs)`: those of strings that can make more than they are given."""
    method = getattr(method, "__wrapped__", method)  # the sandbox wraps `format`
    owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if name in _REFUSED_METHODS and isinstance(owner, str | int):
        raise jinja2.TemplateRuntimeError(f"{name} is not available in chat templates")
    if not isinstance(owner, str):
        return
    if name in ("format", "format_map"):
        values = [*args, *kwargs.values()]
        budget.check_format(owner, values, _BRACE_FIELD)
    elif name in _PADDINGS and args and isinstance(args[0], int):
        budget.check_text(max(len(owner), args[0]))
    elif name == "expandtabs":
        width = args[0] if args and isinstance(args[0], int) else kwargs.get("tabsize", 8)
        budget.check_text(len(owner) + owner.count("\t") * abs(int(width)))
    elif name == "replace" and len(args) >= 2:
        budget.replacing(owner, str(args[0]), str(args[1]), None)
    elif name == "join" and args:
        items = args[0]
        if not isinstance(items, str | list | tuple | Mapping):
            raise jinja2.TemplateRuntimeError("str.join takes a list; use the filter join")
        budget.check_text((len(items) + 1) * len(owner) + budget.size(items))


@jinja2.pass_context
def charged(context: Context, value: Any) -> Any:
    """`value`, counted as something that was made."""
    return budget_of(context).charge(value)


@jinja2.pass_context
def charged_output(context: Context, value: Any) -> Any:
    """`value`, which is about to be printed."""
    budget = budget_of(context)
    budget.check_text(budget.size(value))
    return value


@jinja2.pass_context
def checked_items(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    """`items` for a loop, with a look at the clock before each of them."""
    budget = budget_of(context)
    for item in items:
        budget.check_time()
        yield item


@jinja2.pass_context
def concatenated(context: Context, *parts: Any) -> str:
    """The operator `~`."""
    budget = budget_of(context)
    budget.check_text(sum(map(budget.size, parts)))
    return "".join(map(str, parts))


@jinja2.pass_context
def _join(
    context: Context, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    if attribute is not None:
        value = map(plain.make_attrgetter(context.environment, attribute), value)
    items, separator = _as_list(context, value), str(d)
    budget = budget_of(context)
    budget.check_text(budget.size(items) + len(separator) * len(items))
    return separator.join(map(str, items))


@jinja2.pass_context
def _replace(context: Context, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, before, after = str(s), str(old), str(new)
    budget_of(context).replacing(text, before, after, count)
    return text.replace(before, after, -1 if count is None else count)


@jinja2.pass_context
def _indent(
    context: Context, s: str, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
    size = len(width) if isinstance(width, str) else width
    budget_of(context).check_text(len(s) + (s.count("\n") + 2) * size)
    return plain.do_indent(s, width, first, blank)


@jinja2.pass_context
def _format(context: Context, value: Any, *args: Any, **kwargs: Any) -> str:
    form = str(value)
    budget_of(context).check_format(form, [*args, *kwargs.values()], _PERCENT_FIELD)
    return plain.do_format(form, *args, **kwargs)


@jinja2.pass_context
def _string(context: Context, value: Any) -> str:
    charged_output(context, value)
    return str(value)


@jinja2.pass_context
def _as_list(context: Context, value: Iterable[Any]) -> list[Any]:
    items = list(itertools.islice(checked_items(context, value), MAX_ITEMS + 1))
    budget_of(context).check_items(len(items))
    return items


@jinja2.pass_context
def _map(context: Context, value: Iterable[Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Every item counts when it is made: this is how a filter is applied many times at once."""
    budget = budget_of(context)
    for item in plain.do_map(context, value, *args, **kwargs):
        yield budget.charge(item)


@jinja2.pass_context
def _sum(
    context: Context, value: Iterable[Any], attribute: str | int | None = None, start: Any = 0
) -> Any:
    if attribute is not None:
        value = map(plain.make_attrgetter(context.environment, attribute), value)
    total, budget = start, budget_of(context)
    for item in value:
        check_operator(budget, "+", total, item)
        total = total + item
    return total


@jinja2.pass_context
def _to_json(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes characters for HTML, which models never saw."""
    width = len(indent) if isinstance(indent, str) else indent or 0
    if width > MAX_INDENT:
        raise InvalidRequestError(
            f"the chat template indents JSON by more than {MAX_INDENT}", "messages"
        )
    budget = budget_of(context)
    budget.check_text(budget.size(value))
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    budget.charge(text)
    return text


FILTERS: dict[str, Callable[..., Any]] = {
    "join": _join,
    "replace": _replace,
    "indent": _indent,
    "format": _format,
    "string": _string,
    "list": _as_list,
    "map": _map,
    "sum": _sum,
    "tojson": _to_json,
    "_charged": charged,
    "_checked_items": checked_items,
    "_concatenated": concatenated,
}
