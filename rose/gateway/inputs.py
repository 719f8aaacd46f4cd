"""The `input` field of a request, checked and told apart: texts, or token ids.

Every refusal names the field, the item and the limit. Knows Python values; knows neither tokenisers nor carriers.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from rose.errors import InvalidInput, PayloadTooLarge, RoseError, from_kind
from rose.proto.convert import IntArray

FIELD = "input"
# Of what a caller sent, in an answer that says what is wrong with it.
SHOWN_CHARS = 64
_INT32, _UINT32 = np.dtype(np.int32), np.dtype(np.uint32)
_largest = np.maximum.reduce


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts as the caller sent them: nothing stripped, none empty."""

    items: Sequence[str]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token id sequences, int32, none empty, every id within the vocabulary."""

    items: Sequence[IntArray]


Input: TypeAlias = Texts | Tokens


def parse_input(value: Any, *, vocab_size: int, max_items: int, max_ids: int) -> Input:
    """What a JSON `input` holds.

    Args:
        value: a text, a list of texts, a list of ids, or a list of id lists.

    Raises:
        InvalidInput: anything else, an empty text or list, an id outside 0 .. vocab_size - 1.
        PayloadTooLarge: more than `max_items` items, or `max_ids` token ids in all; told before any of them is read.
    """
    if isinstance(value, str):
        return check_texts([value], max_items)
    if not isinstance(value, list):
        raise InvalidInput(f"expected a text or a list, got {kind_of_value(value)}", param=FIELD)
    if not value:
        raise InvalidInput("the list is empty: expected at least one text or token id", param=FIELD)
    first = value[0]
    if isinstance(first, str):
        check_count(len(value), max_items)
        _same_kind(value, str, "a text")
        return check_texts(value, max_items)
    if isinstance(first, list):
        check_count(len(value), max_items)
        _same_kind(value, list, "a list of token ids")
        _check_ids(sum(map(len, value)), max_ids)
        return Tokens([_ids(ids, index, vocab_size) for index, ids in enumerate(value)])
    if type(first) in (int, float, bool):
        _check_ids(len(value), max_ids)
        return Tokens([_ids(value, 0, vocab_size)])
    raise InvalidInput(
        f"expected a text, a token id or a list of token ids, got {kind_of_value(first)}", param=FIELD, index=0
    )


def check_texts(texts: Sequence[str], max_items: int) -> Texts:
    """Raises InvalidInput for no text or an empty one, PayloadTooLarge for too many."""
    if not texts:
        raise InvalidInput("the list is empty: expected at least one text or token id", param=FIELD)
    check_count(len(texts), max_items)
    if "" in texts:
        raise InvalidInput("the text is empty", param=FIELD, index=list(texts).index(""))
    return Texts(texts)


def check_count(count: int, max_items: int) -> None:
    if count > max_items:
        raise PayloadTooLarge(f"{count} items in one request, the limit is {max_items}", param=FIELD)


def _check_ids(count: int, max_ids: int) -> None:
    if count > max_ids:
        raise PayloadTooLarge(f"{count} token ids in one request, the limit is {max_ids}", param=FIELD)


def _ids(ids: list[Any], index: int, vocab_size: int) -> IntArray:
    if not ids:
        raise InvalidInput("the list of token ids is empty", param=FIELD, index=index)
    if set(map(type, ids)) != {int}:
        position = next(i for i, one in enumerate(ids) if type(one) is not int)
        raise InvalidInput(
            f"a token id is an integer, got {kind_of_value(ids[position])} at position {position}",
            param=FIELD,
            index=index,
        )
    try:
        row = np.frombuffer(array("i", ids), dtype=_INT32)
        # Seen as unsigned, a negative id is larger than any vocabulary.
        if _largest(row.view(_UINT32)) < vocab_size:
            return row
    except OverflowError:  # larger than any int32
        pass
    position = next(i for i, one in enumerate(ids) if not 0 <= one < vocab_size)
    raise InvalidInput(
        f"token id {show(ids[position])} at position {position} is outside the vocabulary 0..{vocab_size - 1}",
        param=FIELD,
        index=index,
    )


def _same_kind(items: list[Any], kind: type, name: str) -> None:
    if set(map(type, items)) != {kind}:
        index = next(i for i, item in enumerate(items) if type(item) is not kind)
        raise InvalidInput(f"expected {name} as in item 0, got {kind_of_value(items[index])}", param=FIELD, index=index)


def renamed(error: RoseError, param: str | None, index: int | None) -> RoseError:
    """The error with the caller's name of the field, where it is one, and the number of the item."""
    own = param if param is not None else error.param
    return from_kind(error.kind, error.message, param=own, index=index, retry_after_s=error.retry_after_s)


def show(number: int) -> str:
    """An integer from outside, short enough to print (Python refuses to print very long ones)."""
    return str(number) if number.bit_length() <= 128 else f"an integer of {number.bit_length()} bits"


def shorten(message: str, most: int) -> str:
    """A message of at most about `most` characters: it may quote a caller who has sent megabytes."""
    return message if len(message) <= most else f"{message[:most]}... ({len(message)} characters)"


def show_bytes(raw: bytes) -> str:
    """A header from outside, in quotes."""
    text = raw[: SHOWN_CHARS + 1].decode("latin-1")
    return repr(text) if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]!r} and more"


def kind_of_value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, int):
        return f"the number {show(value)}"
    if isinstance(value, float):
        return f"the number {value!r}"
    return "a text" if isinstance(value, str) else "a list" if isinstance(value, list) else "an object"
