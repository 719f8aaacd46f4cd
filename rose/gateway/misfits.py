"""What of a JSON body does not fit its request type, in words: where it is, what came, and what may stand there.

msgspec refuses such a body, in the words of its own type syntax; here the values are held against the same types once
more to say it plainly. Knows msgspec's types; knows no route.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, TypeAlias

import msgspec
from msgspec import inspect

from rose.errors import InvalidInput
from rose.gateway.inputs import SHOWN_CHARS, kind_of_value

# Field names and item numbers from the body down.
Path: TypeAlias = tuple[str | int, ...]
_AT = re.compile(r" - at `\$\.?([A-Za-z_0-9]+)?")
_WORDS: dict[type[inspect.Type], str] = {
    inspect.IntType: "a whole number",
    inspect.FloatType: "a number",
    inspect.StrType: "a text",
    inspect.NoneType: "null",
    inspect.StructType: "an object",
}
_PLURALS: dict[type[inspect.Type], str] = {
    inspect.IntType: "whole numbers",
    inspect.FloatType: "numbers",
    inspect.StrType: "texts",
    inspect.StructType: "objects",
}


def misfit(kind: type, body: bytes, said: str) -> InvalidInput:
    """The first thing in the body that `kind` has no place for.

    Args:
        said: msgspec's own message; it counts where the values cannot be read, or fit when they are read again.

    Raises:
        msgspec.DecodeError: behind what did not fit, the body is no JSON.
    """
    try:
        value = msgspec.json.decode(body)
    except msgspec.ValidationError:  # a number beyond all bounds, wherever it stands
        return _unread(kind, said, "holds a number that is too large to be read")
    found = next(_misfits(_type_info(kind), value, ()), None)
    if found is None:  # of a field that is sent twice, only the last value can be seen here
        return _unread(kind, said, "is sent twice, once with a value that it does not take")
    path, what = found
    return InvalidInput(f"{_place(path)} {what}", param=str(path[0]) if path else None)


def show_value(value: Any) -> str:
    """What came, short enough to print."""
    if not isinstance(value, str):
        return kind_of_value(value)
    more = "" if len(value) <= SHOWN_CHARS else " and more"
    return f"the text {value[:SHOWN_CHARS]!r}{more}"


def either(words: Sequence[str]) -> str:
    """`a, b or c`."""
    return " or ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


@cache
def _type_info(kind: type) -> inspect.Type:
    return inspect.type_info(kind)


def _unread(kind: type, said: str, what: str) -> InvalidInput:
    at = _AT.search(said)
    name = at.group(1) if at else None
    fields = {field.encode_name: field.type for field in _fields(_type_info(kind))}
    return InvalidInput(f"{name or 'the body'} {what}{_expected(fields.get(name or ''))}", param=name)


def _misfits(kind: inspect.Type, value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """(where, what is wrong there), in the order of the body."""
    inner = list(_alternatives(kind))
    taker = next((one for one in inner if _takes(one, value)), None)
    if taker is None:
        yield path, f"is {show_value(value)}{_expected(kind)}"
    elif isinstance(taker, inspect.StructType):
        fields = {field.encode_name: field for field in taker.fields}
        for name, one in value.items():
            if name in fields:
                yield from _misfits(fields[name].type, one, (*path, name))
        for name, field in fields.items():
            if field.required and name not in value:
                yield (*path, name), "is missing" + _expected(field.type)
    elif isinstance(taker, inspect.DictType):
        for name, one in value.items():
            yield from _misfits(taker.value_type, one, (*path, name))
    elif isinstance(taker, inspect.ListType):
        for index, one in enumerate(value):
            yield from _misfits(taker.item_type, one, (*path, index))


def _alternatives(kind: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.Metadata):
        yield from _alternatives(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from _alternatives(one)
    else:
        yield kind


def _takes(kind: inspect.Type, value: Any) -> bool:
    """Whether the value is of that kind, whatever it holds. JSON's whole numbers are numbers; its booleans are not."""
    match kind:
        case inspect.AnyType():
            return True
        case inspect.NoneType():
            return value is None
        case inspect.BoolType():
            return isinstance(value, bool)
        case inspect.IntType():
            return isinstance(value, int) and not isinstance(value, bool)
        case inspect.FloatType():
            return isinstance(value, int | float) and not isinstance(value, bool)
        case inspect.StrType():
            return isinstance(value, str)
        case inspect.LiteralType():
            return isinstance(value, str) and value in kind.values
        case inspect.ListType():
            return isinstance(value, list)
        case inspect.DictType() | inspect.StructType():
            return isinstance(value, dict)
    return False


def _expected(kind: inspect.Type | None) -> str:
    """What may stand there; nothing of what is not known, or is ignored."""
    allowed = "" if kind is None else _allowed(kind)
    return f": expected {allowed}" if allowed else ""


def _allowed(kind: inspect.Type) -> str:
    schema = (kind.extra_json_schema or {}) if isinstance(kind, inspect.Metadata) else {}
    if "enum" in schema:
        values = schema["enum"]
        return either([*(repr(value) for value in values if value is not None), *(["null"] if None in values else [])])
    if "anyOf" in schema or "items" in schema:  # looked at later, by code of its own; described in a sentence
        first: str = schema["description"].split(". ")[0].rstrip(".")
        return first[:1].lower() + first[1:]
    kinds = sorted(_alternatives(kind), key=lambda one: isinstance(one, inspect.NoneType))
    return either([word for one in kinds for word in _words(one)])


def _words(kind: inspect.Type) -> list[str]:
    if isinstance(kind, inspect.LiteralType):
        return [repr(value) for value in kind.values]
    if isinstance(kind, inspect.BoolType):
        return ["true", "false"]
    if isinstance(kind, inspect.ListType):
        return [f"a list of {_PLURALS.get(type(kind.item_type), 'values')}"]
    if isinstance(kind, inspect.DictType):
        inner = _PLURALS.get(type(kind.value_type))
        return ["an object" if inner is None else f"an object of {inner}"]
    return [_WORDS[type(kind)]] if type(kind) in _WORDS else []


def _fields(kind: inspect.Type) -> Sequence[inspect.Field]:
    return kind.fields if isinstance(kind, inspect.StructType) else ()


def _place(path: Path) -> str:
    """`role of item 2 of messages`; of names that are the caller's own, no more than can be read."""
    named = [f"item {one}" if isinstance(one, int) else one[:SHOWN_CHARS] for one in reversed(path)]
    return " of ".join(named) or "the body"
