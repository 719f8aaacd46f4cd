"""A JSON body as one of the request types, or an error that names the field.

Knows JSON and what msgspec refuses; knows no route.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import msgspec

from rose.errors import InvalidInput, PayloadTooLarge, RoseError
from rose.gateway.inputs import show_bytes
from rose.gateway.misfits import misfit
from rose.proto.frames import MAX_DEADLINE_MS

TIMEOUT_HEADER = b"x-request-timeout-ms"
# Reading more than this takes milliseconds: in a thread, where others get their turn between its steps.
INLINE_BYTES = 256 << 10
# Beside the values that there is a limit for: fields, and what each document may carry besides its text.
SPARE_VALUES = 1 << 16
P = ParamSpec("P")
T = TypeVar("T")
# A JSON text, or the rest of a body in which one never ends.
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\Z)', re.DOTALL)
_MALFORMED = "JSON is malformed: "
_TOO_DEEP = "the JSON is nested too deeply"


async def off_loop(body: bytes, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `work` gives, from a thread if it has much of a body to read."""
    if len(body) <= INLINE_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


async def read_body(decoder: msgspec.json.Decoder[T], body: bytes, max_values: int) -> T:
    """As `decode_body`, off the event loop where that takes long.

    Args:
        max_values: most that any request may hold, in token ids or texts.

    Raises:
        PayloadTooLarge: many more values than that; told before any of them is read.
    """
    return await off_loop(body, _decode_checked, decoder, body, max_values + SPARE_VALUES)


def _decode_checked(decoder: msgspec.json.Decoder[T], body: bytes, max_values: int) -> T:
    check_values(body, max_values)
    return decode_body(decoder, body)


def check_values(body: bytes, most: int) -> None:
    """Raises PayloadTooLarge for a body of more values.

    Decoding them takes the interpreter lock for all of its time, up to a second for the ids that fit in 32 MiB. Values
    are told by the commas between them; where there are few in all, those within texts need not be told apart.
    """
    if body.count(b",") <= most:
        return
    found = end = 0
    for text in _TEXT.finditer(body):
        found += body.count(b",", end, text.start())
        end = text.end()
        if found > most:
            break
    if found > most or found + body.count(b",", end) > most:
        raise PayloadTooLarge(f"the body holds more than {most} values, which is more than any request may")


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Raises InvalidInput that names the field where there is one."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _misfit(decoder.type, body, str(error)) from None
    except msgspec.DecodeError as error:
        raise _malformed(body, str(error)) from None
    except RecursionError:
        raise InvalidInput(_TOO_DEEP) from None


def timeout_s(header: bytes | None, default: float) -> float:
    """Seconds a request may take. Raises InvalidInput unless the header is a whole number of milliseconds."""
    if header is None:
        return default
    text = header.strip()
    # Python refuses to read thousands of digits.
    if not text.isdigit() or len(text.lstrip(b"0")) > len(str(MAX_DEADLINE_MS)) or not 0 < int(text) <= MAX_DEADLINE_MS:
        raise InvalidInput(
            f"X-Request-Timeout-Ms is {show_bytes(header)}: expected whole milliseconds, 1..{MAX_DEADLINE_MS}",
            param="X-Request-Timeout-Ms",
        )
    return int(text) / 1000


def _misfit(kind: Any, body: bytes, said: str) -> RoseError:
    try:
        return misfit(kind, body, said)
    except msgspec.DecodeError as error:
        return _malformed(body, str(error))
    except RecursionError:
        return InvalidInput(_TOO_DEEP)


def _malformed(body: bytes, text: str) -> RoseError:
    """Why the body is no JSON; a lone surrogate, which JSON's grammar allows, is named with its field and item."""
    if b"\\ud" in body.lower():
        found = _lone_surrogate(body)
        if found is not None:
            param, index = found
            return InvalidInput(
                "the text holds a lone surrogate, which is no Unicode text: send the pair, or leave it out",
                param=param,
                index=index,
            )
    text = text.removeprefix(_MALFORMED)
    return InvalidInput(f"the body is no valid JSON: {text[:1].lower()}{text[1:]}")


def _lone_surrogate(body: bytes) -> tuple[str, int] | None:
    """The field and the item of the first one."""
    try:
        fields: dict[str, Any] = json.loads(body)
        pairs = [(name, i, text) for name, value in fields.items() for i, text in _texts(value)]
    except (ValueError, AttributeError, RecursionError):
        return None
    return next(((name, i) for name, i, text in pairs if not _is_unicode(text)), None)


def _texts(value: Any) -> Iterator[tuple[int, str]]:
    """Every text of a field, with the item it belongs to."""
    items = value if isinstance(value, list) else [value]
    waiting = [(i, item) for i, item in reversed(list(enumerate(items)))]
    while waiting:
        index, item = waiting.pop()
        if isinstance(item, str):
            yield index, item
        elif isinstance(item, list | dict):
            inner = item if isinstance(item, list) else list(item.values())
            waiting += [(index, one) for one in reversed(inner)]


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
