"""Chat templates from model files, run as hostile code: sandboxed, bounded in time and memory.

A Jinja template can loop for ever, or double a string until the memory is gone, without calling
anything, so the parsed template is rewritten: every `for` checks the clock at each item, and
everything that makes text or lists asks the rendering's `Budget`.
"""

from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from headrace.configs.errors import InvalidRequestError
from headrace.frontend.template_budget import DEFAULT_LIMITS, Budget, TemplateLimits
from headrace.frontend.template_operations import (
    BUDGET,
    FILTERS,
    REMOVED_FILTERS,
    budget_of,
    charged_output,
    check_method,
    check_operator,
)

MAX_TEMPLATE_CHARS = 1_000_000


class CompiledTemplate:
    """One chat template, parsed and compiled once; rendering is safe from several threads.

    `loops_over_parts`: it walks the parts of a message's content; `tests_for_string`: it tells
    string content apart. `variables`: the names that it reads from outside.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARS or BUDGET in source:
            raise InvalidRequestError(
                f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are "
                f"allowed, and not the name {BUDGET}"
            )
        environment = _make_environment()
        try:
            tree = environment.parse(source)
            self.variables = frozenset(meta.find_undeclared_variables(tree))
            self.loops_over_parts = _loops_over_content(tree)
            self.tests_for_string = any(t.name == "string" for t in tree.find_all(nodes.Test))
            code = environment.compile(_Rewriter().visit(tree))
        except (jinja2.TemplateError, RecursionError) as error:
            raise InvalidRequestError(f"the chat template does not compile: {error}") from error
        self._template = jinja2.Template.from_code(environment, code, environment.globals)

    def render(self, variables: Mapping[str, Any], limits: TemplateLimits = DEFAULT_LIMITS) -> str:
        """The rendered text.

        Raises InvalidRequestError for an error raised by the template, or past a limit.
        """
        budget = Budget(limits)
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate({**variables, BUDGET: budget}):
                budget.check_time()
                num_chars += len(piece)
                if num_chars > limits.max_output_chars:
                    raise InvalidRequestError(
                        f"the rendered chat is longer than {limits.max_output_chars} characters",
                        "messages",
                    )
                pieces.append(piece)
        except InvalidRequestError:
            raise
        except MemoryError as error:
            raise InvalidRequestError("the chat template uses up the memory", "messages") from error
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


class _Rewriter(NodeTransformer):
    """Puts the budget into a parsed template, where the environment has no hook for it."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_checked_items")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        first, *others = node.nodes
        return _filtered(first, "_concatenated", others)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "_charged")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "_charged") if isinstance(node.arg, nodes.Slice) else node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = _filtered(node.filter, "_charged")
        return node


def _filtered(
    node: nodes.Node | None, name: str, args: list[nodes.Expr] | None = None
) -> nodes.Filter:
    lineno = None if node is None else node.lineno
    return nodes.Filter(node, name, args or [], [], None, None, lineno=lineno)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(__context)
        budget.check_time()
        check_method(budget, __obj, args, kwargs)
        return budget.charge(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operator(budget_of(context), operator, left, right)
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks text to train on; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _make_environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, _GenerationTag],
        finalize=charged_output,
    )
    for name in REMOVED_FILTERS:
        del environment.filters[name]
    del environment.globals["lipsum"]
    environment.filters.update(FILTERS)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


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
