"""The room a chat template runs in: jinja2's sandbox, dressed as transformers dresses it, bounded in time and size.

The same switches (trim_blocks, lstrip_blocks), tags (break, continue, generation), functions (raise_exception,
strftime_now, namespace without underscored names) and `tojson`, so that a template gives the same characters here. A
template comes with the model, not with a request, so the bounds are there for a template that goes wrong on some
messages: every loop, call and written piece looks at the clock, and whatever makes much of little (growth.py) is asked
how much before it does. Left out is jinja2's `lipsum`: it writes nonsense for minutes. Knows jinja2; knows neither
messages nor tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from rose.gateway import growth

BUDGET = "rose_budget"
_EACH, _JOINED = "rose_each", "rose_joined"
# Bits of the largest whole number that a template counts with: time in nanoseconds takes 61.
MAX_BITS = 4096
# Characters of a block or macro that is put together before the budget sees it; a model's own limit is far below.
MAX_BLOCK = 1 << 26
_SIZED = (str, list, tuple)
# Methods of texts and numbers that make bytes.
_BYTES = ("encode", "to_bytes")


class OverBudget(Exception):
    """A rendering took too long, or wrote too much; its text says which and the limit."""


class Refusal(TemplateError):
    """What a template itself says is wrong with the messages (raise_exception)."""


class Budget:
    """What one rendering may take.

    Args:
        seconds: of the clock.
        chars: written in all, or held in one text.
    """

    __slots__ = ("_ends", "_left", "chars", "seconds")

    def __init__(self, seconds: float, chars: int) -> None:
        self.seconds, self.chars = seconds, chars
        self._ends = time.monotonic() + seconds
        self._left = chars

    def tick(self) -> None:
        if time.monotonic() > self._ends:
            raise OverBudget(f"it takes longer than {self.seconds:g} s")

    def check(self, size: int) -> None:
        if size > self.chars:
            raise OverBudget(f"it makes more than {self.chars} characters")

    def wrote(self, size: int) -> None:
        self.tick()
        self._left -= size
        if self._left < 0:
            raise OverBudget(f"it makes more than {self.chars} characters")


def write(template: Template, budget: Budget, variables: Mapping[str, Any]) -> str:
    """What a template of the sandbox writes.

    Raises:
        OverBudget: too long, or too much.
        TemplateError, and whatever else an expression can raise: it does not take these variables.
    """
    pieces: list[str] = []
    for piece in template.generate({**variables, BUDGET: budget}):
        budget.wrote(len(piece))
        pieces.append(piece)
    return "".join(pieces)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Makes templates: `from_string`, then `write`."""

    # What makes much of little; the operands are looked at first.
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        extensions = ["jinja2.ext.loopcontrols", _GenerationBlock]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_written)
        self.filters["tojson"] = _tojson
        for name, growing in growth.FILTERS.items():
            self.filters[name] = _bounded(growing, self.filters[name])
        del self.globals["lipsum"]
        self.filters[_EACH], self.filters[_JOINED] = _each, _joined
        self.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now, "namespace": _Namespace}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Bytes are no text of a template's, and grow by methods of their own."""
        return attr not in _BYTES and not isinstance(obj, bytes) and super().is_safe_attribute(obj, attr, value)

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(__context)
        budget.tick()
        if (size := growth.of_method(__obj, args, kwargs)) is not None:
            budget.check(size)
        found = super().call(__context, __obj, *args, **kwargs)
        if isinstance(found, str):
            budget.check(len(found))
        return found

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int) and operator in ("*", "**"):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise SecurityError(f"a whole number of {bits} bits is more than a template needs")
        if operator == "%" and isinstance(left, str):
            _budget(context).check(growth.of_percent(left, right))
        if operator == "*":
            for sized, times in ((left, right), (right, left)):
                if isinstance(sized, _SIZED) and isinstance(times, int):
                    _budget(context).check(len(sized) * max(0, times))
        if operator == "+" and isinstance(left, _SIZED) and isinstance(right, _SIZED):
            _budget(context).check(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """What jinja2 puts a block or a macro together with."""
        texts = list(parts)
        if sum(map(len, texts)) > MAX_BLOCK:
            raise OverBudget(f"it makes more than {MAX_BLOCK} characters")
        return "".join(texts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        watched: nodes.Template = _Watched().visit(super()._parse(source, name, filename))
        return watched


class _Watched(NodeTransformer):
    """Leads every loop, and every joining of texts (~), through a filter that looks at the budget."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 (jinja2's name)
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, _EACH, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, _JOINED, [], [], None, None, lineno=node.lineno)


class _GenerationBlock(Extension):
    """{% generation %}: marks what an assistant said, for training; here its body counts and nothing else."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(Namespace):
    """jinja2's, without names that lead into Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # what it holds may be anything, itself too


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore, such as {name!r}")


class _Ticking:
    """An iterable that looks at the clock at every step; as long as what is in it."""

    def __init__(self, inner: Iterable[Any], budget: Budget) -> None:
        self._inner, self._budget = inner, budget

    def __iter__(self) -> Iterator[Any]:
        for item in self._inner:
            self._budget.tick()
            yield item

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]  # jinja2 makes a list of what raises TypeError here


@pass_context
def _each(context: Context, items: Iterable[Any]) -> _Ticking:
    return _Ticking(items, _budget(context))


@pass_context
def _joined(context: Context, parts: list[Any]) -> str:
    _budget(context).check(growth.shown(parts) - 2 * len(parts) - 2)
    texts = [str(part) for part in parts]
    _budget(context).check(sum(map(len, texts)))
    return "".join(texts)


@pass_context
def _written(context: Context, value: Any) -> Any:
    """What {{ }} is about to write."""
    if not isinstance(value, str):
        _budget(context).check(growth.shown(value))
    return value


def _bounded(growing: growth.Growing, plain: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is asked how large it gets before it does."""
    takes = getattr(plain, "jinja_pass_arg", None)

    @pass_context
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        budget.tick()
        value, size = growing(context, value, *args, **kwargs)
        budget.check(size)
        if takes is None:
            return plain(value, *args, **kwargs)
        return plain(
            {"eval_context": context.eval_ctx, "environment": context.environment}[takes.name], value, *args, **kwargs
        )

    return bounded


def _budget(context: Context) -> Budget:
    budget: Budget = context.parent[BUDGET]
    return budget


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own it leaves <, > and & as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise Refusal(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
