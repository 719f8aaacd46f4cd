"""How large a text or list gets that a template makes of a small one, told before it is made.

Padding, indenting, joining, replacing, and writing a list that holds one text many times can make gigabytes of a few
characters in one call, between two looks at any clock. Sizes are upper bounds, near what comes out for everything an
honest template does. Knows what str's methods and jinja2's filters do; knows neither budgets nor templates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, KeysView, Mapping, Sequence, ValuesView
from typing import Any

from jinja2.filters import do_map
from jinja2.runtime import Context

_NUMBER = re.compile(r"\d+")
# A field whose width is a field itself, and the other's name.
_NESTED = re.compile(r":[^{}]*\{(\w*)")
# Filters that write any value as text.
_WRITING = (
    "string",
    "escape",
    "e",
    "forceescape",
    "safe",
    "upper",
    "lower",
    "capitalize",
    "title",
    "trim",
    "pprint",
    "striptags",
    "truncate",
    "urlencode",
    "urlize",
    "wordcount",
    "xmlattr",
)
# (value, upper bound of what comes out); the value is another one where an iterator had to be read.
Grown = tuple[Any, int]
Growing = Callable[..., Grown]


def of_method(method: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Size of what a bound method of a text gives; None for any other callable, and for methods that do not grow."""
    bound = getattr(method, "__wrapped__", method)  # the sandbox wraps format
    text, name = getattr(bound, "__self__", None), getattr(bound, "__name__", "")
    if not isinstance(text, str):
        return None
    if name in ("ljust", "rjust", "center", "zfill"):
        return max(len(text), _largest(args))
    if name == "expandtabs":
        return len(text) + text.count("\t") * max(8, _largest([*args, *kwargs.values()]))
    if name == "replace" and len(args) > 1:
        return _replaced(text, *args[:2])
    if name == "join" and args and isinstance(args[0], (list, tuple)):
        return _joined(args[0], text)
    if name == "translate" and args and isinstance(args[0], Mapping):
        return len(text) * max([1, *(len(to) for to in args[0].values() if isinstance(to, str))])
    if name in ("format", "format_map"):
        named = {**{str(place): value for place, value in enumerate(args)}, **kwargs}
        if name == "format_map" and args and isinstance(args[0], Mapping):
            named = dict(args[0])
        # One without a name may be any.
        widths = [value for field in _NESTED.findall(text) for value in ([named.get(field)] if field else args)]
        return _formatted(text, list(named.values())) + _largest(widths)
    return None


def of_percent(text: str, values: Any) -> int:
    """Size of `text % values`."""
    each = values if isinstance(values, tuple) else (values,)
    return _formatted(text, each) + (_largest(each) if "*" in text else 0)


def shown(value: Any, known: dict[int, int] | None = None) -> int:
    """Size of `str(value)`, before characters are escaped. What lists hold several times is looked at once, and counted
    each time: a list of itself twice over, forty times, is told at once.

    Args:
        known: id -> size of the lists and mappings looked at so far, which all stay alive meanwhile.
    """
    if isinstance(value, str):
        return len(value)
    if not isinstance(value, (list, tuple, set, frozenset, Mapping, KeysView, ValuesView, ItemsView)):
        return 0
    known = {} if known is None else known
    if (size := known.get(id(value))) is None:
        if isinstance(value, (Mapping, ItemsView)):
            pairs = value.items() if isinstance(value, Mapping) else value
            size = 2 + sum(4 + shown(key, known) + shown(held, known) for key, held in pairs)
        else:
            size = 2 + sum(2 + shown(held, known) for held in value)
        known[id(value)] = size
    return size


def _center(context: Context, value: Any, width: Any = 80) -> Grown:
    return value, max(shown(value), _largest([width]))


def _indent(context: Context, value: Any, width: Any = 4, *args: Any, **kwargs: Any) -> Grown:
    step = len(width) if isinstance(width, str) else _largest([width])
    text = value if isinstance(value, str) else ""  # a list is written in one line
    return value, shown(value) + (text.count("\n") + 1) * step


def _counted(context: Context, value: Any, *args: Any, **kwargs: Any) -> Grown:
    """slice and batch: lists of as many entries as they are told."""
    return value, _largest([*args, *kwargs.values()])


def _json(context: Context, value: Any, *args: Any, **kwargs: Any) -> Grown:
    return value, shown(value) + _largest([*args, *kwargs.values()])


def _shown(context: Context, value: Any, *args: Any, **kwargs: Any) -> Grown:
    return value, shown(value)


def _wrapped(context: Context, value: Any, width: Any = 79, *args: Any, **kwargs: Any) -> Grown:
    between = max([1, *(len(one) for one in (*args, *kwargs.values()) if isinstance(one, str))])
    if not isinstance(value, str):
        return value, shown(value) * (1 + between)
    text = value
    lines = len(text) // max(1, _largest([width])) + len(text.splitlines()) + text.count(" ") + 1
    return value, len(text) + lines * between


def _format(context: Context, value: Any, *args: Any, **kwargs: Any) -> Grown:
    return value, of_percent(value, (*args, *kwargs.values())) if isinstance(value, str) else shown(value)


def _replace(context: Context, value: Any, old: Any, new: Any, count: Any = None) -> Grown:
    parts = (value, old, new)
    if not all(isinstance(part, str) for part in parts):
        return value, (1 + shown(value)) * (1 + shown(new)) + shown(old)
    return value, _replaced(*parts)


def _join(context: Context, value: Any, d: Any = "", attribute: Any = None) -> Grown:
    items = list(value)
    parts = items if attribute is None else list(do_map(context, items, attribute=attribute))
    return items, _joined(parts, str(d))


FILTERS: Mapping[str, Growing] = {
    "center": _center,
    "indent": _indent,
    "tojson": _json,
    "slice": _counted,
    "batch": _counted,
    "wordwrap": _wrapped,
    "format": _format,
    "replace": _replace,
    "join": _join,
    **dict.fromkeys(_WRITING, _shown),
}


def _largest(values: Sequence[Any]) -> int:
    return max([0, *(value for value in values if isinstance(value, int))])


def _formatted(text: str, values: Sequence[Any]) -> int:
    """Each number written in the text may be a width, and each value may stand in every place."""
    widths = sum(int(digits[:12]) for digits in _NUMBER.findall(text))
    places = text.count("{") + text.count("%")
    return len(text) + widths + places * max([0, *map(shown, values)])


def _joined(parts: Sequence[Any], between: str) -> int:
    return sum(map(shown, parts)) + len(between) * len(parts)


def _replaced(text: Any, old: Any, new: Any) -> int:
    if not (isinstance(text, str) and isinstance(old, str) and isinstance(new, str)):
        return 0  # refused by the method itself
    return len(text) + text.count(old) * len(new)
