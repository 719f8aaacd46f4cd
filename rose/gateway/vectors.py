"""Vectors as JSON, in slices short enough for the event loop, or for a thread to hand the lock of the interpreter on.

Numbers are written with the fewest digits that give back the very float32. Knows arrays and bytes; knows neither
outputs nor requests.
"""

from __future__ import annotations

import asyncio
import base64
from binascii import b2a_base64
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from rose.errors import NonFinite
from rose.proto.convert import AnyArray

# Numbers encoded before other requests get their turn: about 0.7 ms of work.
SLICE = 16384
# Copying this much takes about a millisecond.
JOIN_BYTES = 4 << 20
_SCALE = 1e10
P = ParamSpec("P")
T = TypeVar("T")
_encode = msgspec.json.Encoder().encode


async def embedding_list(rows: AnyArray, *, as_base64: bool, fields: bytes = b"") -> bytes:
    """[items, dimension] as the elements of `data`, comma separated, each with its index.

    Args:
        fields: further fields of every element.
    """
    if rows.size <= SLICE:
        return _items(rows, 0, as_base64, fields)
    step = max(1, SLICE // rows.shape[1])
    pieces: list[bytes] = []
    for start in range(0, len(rows), step):
        pieces.append(_items(rows[start : start + step], start, as_base64, fields))
        await asyncio.sleep(0)
    return await joined(pieces)


async def for_numbers(count: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `work` on so many numbers gives; from a thread where that takes longer than the hop to one."""
    if count <= SLICE:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


async def joined(pieces: list[bytes], between: bytes = b",") -> bytes:
    """The pieces in one, from a thread where they are many megabytes; joining lets go of the interpreter's lock."""
    if sum(map(len, pieces)) <= JOIN_BYTES:
        return between.join(pieces)
    return await asyncio.to_thread(between.join, pieces)


def row_values(rows: AnyArray, *, as_base64: bool) -> list[bytes]:
    """As `value_list`, without giving way: for few numbers, or for a thread."""
    step = max(1, SLICE // max(1, rows.shape[1]))
    return [one for start in range(0, len(rows), step) for one in _values(rows[start : start + step], as_base64)]


async def value_list(rows: AnyArray, *, as_base64: bool) -> list[bytes]:
    """[items, dimension], each row as JSON: a list of numbers, or base64 of its bytes."""
    step = max(1, SLICE // max(1, rows.shape[1]))
    values: list[bytes] = []
    for start in range(0, len(rows), step):
        values += _values(rows[start : start + step], as_base64)
        if start + step < len(rows):
            await asyncio.sleep(0)
    return values


def cut_vectors(rows: AnyArray, cut: int, name: str, *, normalized: bool, splits: Sequence[int] = ()) -> AnyArray:
    """[rows, dimension] cut to `cut` numbers and, where the model normalises, to unit length again: the engine's rule.

    A row that is zero as a whole stays so: the engine sends none but those that have nothing to show.

    Args:
        splits: of an output with several rows an item.

    Raises:
        NonFinite: the cut leaves nothing but zeros of another row; `index` is that of its item.
    """
    short = rows[:, :cut]
    if not normalized:
        return short
    exact = short.astype(np.float64)
    lengths = np.linalg.norm(exact, axis=1, keepdims=True)
    lost = np.flatnonzero((lengths[:, 0] == 0) & rows.any(axis=1))
    if lost.size:
        index = int(lost[0]) if not splits else int(np.searchsorted(splits, lost[0], side="right")) - 1
        raise NonFinite(
            f"the first {cut} dimensions of output {name!r} are all zero and cannot be normalised", index=index
        )
    unit: AnyArray = np.divide(exact, lengths, out=exact, where=lengths > 0).astype(np.float32)
    return unit


def sparse_ids(indices: AnyArray, values: AnyArray) -> bytes:
    """{"indices": [...], "values": [...]}."""
    return b'{"indices":%b,"values":%b}' % (_encode(indices.tolist()), _encode(shortest(values).tolist()))


def base64_array(rows: AnyArray) -> bytes:
    """schemas.Base64Array, little-endian."""
    little = rows.astype(rows.dtype.newbyteorder("<"), copy=False)
    return b'{"dtype":"%b","shape":%b,"data":"%b"}' % (
        rows.dtype.name.encode(),
        _encode(list(rows.shape)),
        base64.b64encode(np.ascontiguousarray(little).tobytes()),
    )


def _items(rows: AnyArray, start: int, as_base64: bool, fields: bytes) -> bytes:
    return b",".join(
        b'{"object":"embedding","index":%d,"embedding":%b%b}' % (start + i, value, fields)
        for i, value in enumerate(_values(rows, as_base64))
    )


def _values(rows: AnyArray, as_base64: bool) -> list[bytes]:
    if as_base64:
        return [b'"%b"' % b2a_base64(row.tobytes(), newline=False) for row in rows]
    return [_encode(row) for row in shortest(rows).tolist()]


def shortest(vectors: AnyArray) -> npt.NDArray[Any]:
    """float32 as doubles that print short: ten decimals where those still give back the same float32.

    A double of a float32 prints 17 digits; the shorter one saves a third of the answer at 6 us per 1024 numbers.
    """
    if vectors.dtype != np.float32:
        return vectors
    exact = vectors.astype(np.float64)
    short = np.rint(exact * _SCALE) / _SCALE
    return np.where(short.astype(np.float32) == vectors, short, exact)
