"""Tiny files in the formats that `rose pull` converts, written value by value: a second opinion on the readers."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Tensor = np.ndarray


def q4_0(values: Sequence[int], scale: float) -> bytes:
    """One block of 32 values -8 .. 7."""
    codes = [value + 8 for value in values]
    return struct.pack("<e", scale) + bytes(codes[j] | codes[j + 16] << 4 for j in range(16))


def e5s1(
    sizes: Sequence[int],
    tensors: Mapping[str, tuple[int, int, bytes]],
    *,
    magic: bytes = b"E5S1",
    version: int = 1,
    block: int = 32,
) -> bytes:
    """A container.

    Args:
        sizes: hidden, layers, heads, inner, vocabulary, positions, types.
        tensors: name -> (kind, number of values, data); kind 0 is fp32, 1 is Q4_0.
    """
    pieces = [b"<s>", b"<pad>", b"</s>", b"<unk>", b"a"]
    ends = np.cumsum([0, *map(len, pieces)])
    head = magic + struct.pack("<I7ifi", version, *sizes, 1e-12, block)
    head += struct.pack("<5iQ", len(pieces), 0, 2, 1, 3, int(ends[-1]))
    head += np.asarray(ends, "<u4").tobytes() + bytes(4 * len(pieces)) + b"".join(pieces)
    head += struct.pack("<iI", 1, 12) + bytes(12)  # the map of code points, whatever it holds
    names = [name.encode() for name in tensors]
    directory_bytes = 4 + sum(2 + len(name) + 21 for name in names)
    offset = len(head) + directory_bytes
    directory, data = struct.pack("<i", len(tensors)), b""
    for name, (kind, count, values) in zip(names, tensors.values(), strict=True):
        directory += struct.pack("<H", len(name)) + name
        directory += struct.pack("<BIQQ", kind, count, offset + len(data), len(values))
        data += values
    return head + directory + data


def gguf(pairs: Mapping[str, tuple[int, Any]], *, magic: bytes = b"GGUF", version: int = 3) -> bytes:
    """A file of key-value pairs alone.

    Args:
        pairs: key -> (type code, value); for type 9 the value is (type code of the items, items).
    """
    body = b"".join(_text(key) + struct.pack("<I", kind) + _value(kind, value) for key, (kind, value) in pairs.items())
    return magic + struct.pack("<IQQ", version, 0, len(pairs)) + body


_LAYOUTS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def _text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def _value(kind: int, value: Any) -> bytes:
    if kind == 8:
        return _text(value)
    if kind == 9:
        inner, items = value
        return struct.pack("<IQ", inner, len(items)) + _items(inner, items)
    return struct.pack("<" + _LAYOUTS[kind], value)


def _items(kind: int, items: Iterable[Any]) -> bytes:
    return b"".join(_value(kind, item) for item in items)


def gguf_with_tensors(
    pairs: Mapping[str, tuple[int, Any]],
    tensors: Mapping[str, tuple[int, Sequence[int], bytes]],
    *,
    alignment: int = 32,
) -> bytes:
    """A file with tensors behind its pairs.

    Args:
        tensors: name -> (type number, shape as numpy has it, data).
    """
    head = gguf(pairs)
    head = head[:8] + struct.pack("<Q", len(tensors)) + head[16:]
    offset, data = 0, b""
    for name, (kind, shape, values) in tensors.items():
        data += bytes(offset - len(data)) + values
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += _text(name) + sizes + struct.pack("<IQ", kind, offset)
        offset = -(-len(data) // alignment) * alignment
    return head + bytes(-len(head) % alignment) + data


def q8_0(values: Sequence[int], scale: float) -> bytes:
    """One block of 32 values -128 .. 127."""
    return struct.pack("<e32b", scale, *values)


def q4_1(values: Sequence[int], scale: float, least: float) -> bytes:
    """One block of 32 values 0 .. 15."""
    return struct.pack("<2e", scale, least) + bytes(values[j] | values[j + 16] << 4 for j in range(16))
