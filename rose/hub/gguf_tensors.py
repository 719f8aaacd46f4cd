"""The tensors of a GGUF file, as fp32.

    F32, F16    plain
    Q8_0        blocks of 32: an fp16 scale d and 32 signed bytes q; d q
    Q4_1        blocks of 32: fp16 d and m, 16 bytes; byte j holds value j in its low and value j + 16 in its high half;
                d q + m

Knows the formats of blocks; knows neither names nor models.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from rose.errors import PullError
from rose.hub.gguf import Value, read_header
from rose.hub.safetensors_file import Float32

_BLOCK = 32


@dataclass(frozen=True, slots=True)
class _Info:
    """`shape` is numpy's: the file has it the other way round."""

    shape: tuple[int, ...]
    kind: int
    start: int


class GgufFile:
    """One file, in memory.

    Attributes:
        metadata: its key-value part.

    Raises:
        PullError: not such a file, or one that ends early.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        reader, self.metadata, count = read_header(data)
        entries: list[tuple[str, tuple[int, ...], int, int]] = []
        try:
            for _ in range(count):
                name = str(reader.text())
                sizes = [reader.number("<Q") for _ in range(reader.number("<I"))]
                entries.append((name, tuple(reversed(sizes)), reader.number("<I"), reader.number("<Q")))
        except (struct.error, ValueError):
            raise PullError(f"the GGUF file ends early, after {len(data)} bytes") from None
        alignment = int(self.metadata.get("general.alignment", 32))
        begin = -(-reader.at // alignment) * alignment
        self._entries = {name: _Info(shape, kind, begin + offset) for name, shape, kind, offset in entries}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def key(self, name: str) -> Value:
        """
        Raises:
            PullError: the file has no such key.
        """
        if name not in self.metadata:
            raise PullError(f"the GGUF file has no {name}")
        return self.metadata[name]

    def tensor(self, name: str, shape: tuple[int, ...]) -> Float32:
        """One tensor.

        Raises:
            PullError: there is none of that name, or it has another shape, or a format that is not read.
        """
        info = self._entries.get(name)
        if info is None:
            raise PullError(f"the GGUF file has no tensor {name!r}")
        if info.shape != shape:
            raise PullError(f"tensor {name!r} of the GGUF file has shape {info.shape}, expected {shape}")
        if info.kind not in _FORMATS:
            raise PullError(f"tensor {name!r} of the GGUF file is of type {info.kind}; there are {sorted(_FORMATS)}")
        layout, values_each, decode = _FORMATS[info.kind]
        blocks, left = divmod(prod(shape), values_each)
        if left or info.start + blocks * layout.itemsize > len(self._data):
            raise PullError(f"tensor {name!r} of the GGUF file does not fit into it")
        return decode(np.frombuffer(self._data, layout, blocks, info.start)).reshape(shape)


def _plain(values: npt.NDArray[np.generic]) -> Float32:
    return values.astype(np.float32)


def _q8_0(blocks: npt.NDArray[np.void]) -> Float32:
    return blocks["d"].astype(np.float32)[:, None] * blocks["q"].astype(np.float32)


def _q4_1(blocks: npt.NDArray[np.void]) -> Float32:
    halves = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=1).astype(np.float32)
    return blocks["d"].astype(np.float32)[:, None] * halves + blocks["m"].astype(np.float32)[:, None]


# The format's number -> (one block, values in it, how they are decoded).
_FORMATS: dict[int, tuple[np.dtype[np.generic], int, Callable[..., Float32]]] = {
    0: (np.dtype("<f4"), 1, _plain),
    1: (np.dtype("<f2"), 1, _plain),
    3: (np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", _BLOCK // 2)]), _BLOCK, _q4_1),
    8: (np.dtype([("d", "<f2"), ("q", "i1", _BLOCK)]), _BLOCK, _q8_0),
}
