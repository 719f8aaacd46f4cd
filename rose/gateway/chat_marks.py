"""Control tokens that messages contain, followed through the template, so that they can be told from its own.

    messages -> control tokens in them wrapped in two marks -> template -> marks taken out again: Rendered

A mark is a code point that Unicode keeps for private use within programs, and one that no message contains. Knows texts
and places in them; knows neither templates nor ids.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from rose.errors import InvalidInput

# Noncharacters (Unicode 23.7): never in a text that is exchanged.
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class Rendered:
    """What a template made of messages.

    Attributes:
        text: without marks.
        opened, closed: where in it the marks before and behind control tokens stood, ascending; a template may have cut
            them apart.
    """

    text: str
    opened: Sequence[int] = ()
    closed: Sequence[int] = ()

    def forged(self, start: int, end: int) -> bool:
        """Whether a control token at [start, end) is, or was put together from, what a message contains."""
        if _first_from(self.opened, start) == start and _first_from(self.closed, end) == end:
            return True
        return any(_first_from(places, start + 1) < end for places in (self.opened, self.closed))


class ControlMarks:
    """
    Args:
        special: spellings of the tokens that the tokenizer's file calls special; marked wherever they stand.
        template: spellings of other added tokens, of which the template makes use ("<think>"). In an assistant's
            messages they are the model's own words, by which templates find its thinking: marked in all others.
    """

    def __init__(self, special: Iterable[str], template: Iterable[str]) -> None:
        always = set(special)
        self._assistant = _any_of(always)
        self._others = _any_of(always | set(template))

    def mark(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> Marked | None:
        """Copies with control tokens wrapped, or None where there are none.

        Raises:
            InvalidInput: messages that contain every code point that could be a mark.
        """
        texts = [text for value in (*messages, variables) for text in _texts(value)]
        if not any(self._others.search(text) for text in texts):
            return None
        free = [mark for mark in _MARKS if not any(mark in text for text in texts)]
        if len(free) < 2:
            raise InvalidInput("the messages contain all of the noncharacters U+FDD0 to U+FDEF", param="messages")
        opening, closing = free[:2]
        wrapped = f"{opening}\\g<0>{closing}"
        marked = [
            _each(message, self._assistant if message.get("role") == ASSISTANT else self._others, wrapped)
            for message in messages
        ]
        return Marked(marked, _each(variables, self._others, wrapped), (opening, closing))


@dataclass(frozen=True, slots=True)
class Marked:
    """What to render instead; `marks` are the two code points."""

    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    marks: tuple[str, str]

    def unmark(self, text: str) -> Rendered:
        opening, closing = self.marks
        # [text, mark, text, ..., mark, text]
        pieces = re.split(f"([{opening}{closing}])", text)
        places: dict[str, list[int]] = {opening: [], closing: []}
        at = 0
        for piece, mark in zip(pieces[::2], pieces[1::2], strict=False):
            at += len(piece)
            places[mark].append(at)
        return Rendered("".join(pieces[::2]), places[opening], places[closing])


def _any_of(spellings: Iterable[str]) -> re.Pattern[str]:
    """Longer ones first, as tokenizers match them; of none, a pattern that is never found."""
    ordered = sorted((one for one in spellings if one), key=lambda one: (-len(one), one))
    return re.compile("|".join(map(re.escape, ordered)) or "(?!)")


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)


def _each(value: Any, pattern: re.Pattern[str], wrapped: str) -> Any:
    if isinstance(value, str):
        return pattern.sub(wrapped, value)
    if isinstance(value, Mapping):
        return {key: _each(one, pattern, wrapped) for key, one in value.items()}
    return [_each(one, pattern, wrapped) for one in value] if isinstance(value, list) else value


def _first_from(places: Sequence[int], place: int) -> float:
    """The first of them at or behind a place."""
    at = bisect_left(places, place)
    return places[at] if at < len(places) else inf
