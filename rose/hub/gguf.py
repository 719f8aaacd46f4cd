"""The key-value part of a GGUF file, version 2 or 3: what a vocabulary file is made of.

Its tensors are read by `gguf_tensors`. Knows the format's types; knows no key.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from rose.errors import PullError

Value: TypeAlias = Any  # a number, a text, a list of texts, or an array of numbers

_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)


def read_metadata(data: bytes) -> dict[str, Value]:
    """Key -> value; arrays of numbers as numpy arrays, arrays of strings as lists.

    Strings are UTF-8; one that is not is given as bytes.

    Raises:
        PullError: no GGUF file, another version, or one that ends early.
    """
    return read_header(data)[1]


def read_header(data: bytes) -> tuple[Reader, dict[str, Value], int]:
    """(a reader that stands behind the key-value part, that part, how many tensors follow).

    Raises:
        PullError: as `read_metadata`.
    """
    if data[:4] != b"GGUF":
        raise PullError(f"no GGUF file: it starts with {data[:4]!r}")
    reader = Reader(data)
    version = reader.number("<I")
    if version not in _VERSIONS:
        raise PullError(f"a GGUF file of version {version}, and only versions 2 and 3 are read")
    tensors = reader.number("<Q")
    try:
        return reader, {reader.text(): reader.value() for _ in range(reader.number("<Q"))}, tensors
    except (struct.error, ValueError, IndexError):
        raise PullError(f"the GGUF file ends early, after {len(data)} bytes") from None


class Reader:
    """What lies in a file, one thing after the other."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 4  # behind the magic
        self._length = struct.Struct("<Q").unpack_from

    @property
    def at(self) -> int:
        return self._at

    def number(self, layout: str) -> int:
        (value,) = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return int(value)

    def value(self) -> Value:
        return self._of(self.number("<I"))()

    def text(self) -> Any:
        (length,) = self._length(self._data, self._at)
        start, self._at = self._at + 8, self._at + 8 + length
        found = self._data[start : self._at]
        if len(found) != length:
            raise ValueError("the string is cut off")
        try:
            return found.decode()
        except UnicodeDecodeError:
            return found

    def _of(self, kind: int) -> Callable[[], Value]:
        if kind == _STRING:
            return self.text
        if kind == _ARRAY:
            return self._array
        if kind not in _SCALARS:
            raise PullError(f"a value of type {kind} in the GGUF file, which the format does not know")
        return lambda: self._numbers(kind, 1)[0].item()

    def _array(self) -> Value:
        kind, count = self.number("<I"), self.number("<Q")
        if kind in _SCALARS:
            return self._numbers(kind, count)
        read = self._of(kind)
        return [read() for _ in range(count)]

    def _numbers(self, kind: int, count: int) -> Any:
        found = np.frombuffer(self._data, np.dtype(_SCALARS[kind]), count, self._at)
        self._at += found.nbytes
        return found
