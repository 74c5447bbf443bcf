"""Chat templates from model files, run as hostile code: sandboxed, with a time and an output limit.

A Jinja template can loop for ever without calling anything, so every `for` of the parsed template
is rewritten to check the clock at each item; calls and multiplications are checked in the
environment's hooks.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.configs.errors import InvalidRequestError

_BUDGET = "_headrace_budget"
_MAX_REPEATED_ITEMS = 1_000_000


@dataclass(frozen=True)
class TemplateLimits:
    """What one rendering may use."""

    max_seconds: float = 10.0
    max_output_chars: int = 16_000_000


DEFAULT_LIMITS = TemplateLimits()


class CompiledTemplate:
    """One chat template, parsed and compiled once; rendering is safe from several threads.

    `loops_over_parts`: it walks the parts of a message's content; `tests_for_string`: it tells
    string content apart. `variables`: the names that it reads from outside.
    """

    def __init__(self, source: str) -> None:
        environment = _make_environment()
        try:
            tree = environment.parse(source)
            self.variables = frozenset(meta.find_undeclared_variables(tree))
            self.loops_over_parts = _loops_over_content(tree)
            self.tests_for_string = any(t.name == "string" for t in tree.find_all(nodes.Test))
            for loop in list(tree.find_all(nodes.For)):
                loop.iter = nodes.Filter(loop.iter, "_checked_items", [], [], None, None)
            code = environment.compile(tree)
        except (jinja2.TemplateError, RecursionError) as error:
            raise InvalidRequestError(
                f"the model's chat template does not compile: {error}"
            ) from error
        self._template = jinja2.Template.from_code(environment, code, environment.globals)

    def render(self, variables: Mapping[str, Any], limits: TemplateLimits = DEFAULT_LIMITS) -> str:
        """The rendered text.

        Raises InvalidRequestError for an error raised by the template, or past a limit.
        """
        budget = _Budget(limits)
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate({**variables, _BUDGET: budget}):
                budget.check()
                num_chars += len(piece)
                if num_chars > limits.max_output_chars:
                    raise InvalidRequestError(
                        f"the rendered chat is longer than {limits.max_output_chars} characters",
                        "messages",
                    )
                pieces.append(piece)
        except InvalidRequestError:
            raise
        except RecursionError as error:
            raise InvalidRequestError(
                "the chat template recurses too deeply", "messages"
            ) from error
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"chat template: {error}", "messages") from error
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise InvalidRequestError(
                f"the chat template cannot render these messages: {error}", "messages"
            ) from error
        return "".join(pieces)


@lru_cache(maxsize=16)
def compile_template(source: str) -> CompiledTemplate:
    """Compile, or find the compiled form of, a template."""
    return CompiledTemplate(source)


class _Budget:
    def __init__(self, limits: TemplateLimits) -> None:
        self._max_seconds = limits.max_seconds
        self._deadline = time.monotonic() + limits.max_seconds

    def check(self) -> None:
        if time.monotonic() > self._deadline:
            raise InvalidRequestError(
                f"the chat template took longer than {self._max_seconds:g} s", "messages"
            )


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _check_budget(__context)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_budget(context)
        if operator == "**" and not (abs(left) < 2**31 and abs(right) < 64):
            raise jinja2.TemplateRuntimeError("power too large")
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                if len(sequence) * count > _MAX_REPEATED_ITEMS:
                    raise jinja2.TemplateRuntimeError("repetition too large")
                break
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks text to train on; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _make_environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.filters["_checked_items"] = _checked_items
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _check_budget(context: Context) -> None:
    budget = context.get(_BUDGET)
    if isinstance(budget, _Budget):
        budget.check()


@jinja2.pass_context
def _checked_items(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    budget = context[_BUDGET]
    for item in items:
        budget.check()
        yield item


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes characters for HTML, which models never saw."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateRuntimeError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether some `for` walks a message's content, itself or by a variable or macro argument."""
    names = {"content"}
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, names):
            names.add(assignment.target.name)
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Name) and node.name in names
