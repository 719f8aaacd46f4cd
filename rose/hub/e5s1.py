"""The E5S1 container: a BERT encoder whose matrices are 4-bit blocks, in one file.

    "E5S1", version, sizes, pieces with scores, a map of code points, a directory of tensors, their data

Matrices are Q4_0: blocks of 32 values, an fp16 scale and 16 bytes; byte j holds value j in its low and value j + 16 in
its high half, each as value + 8. Everything else is fp32. The scale has 11 bits and a value 4, so fp32 holds every
product exactly. Knows bytes and arrays; knows neither names of checkpoints nor packages.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rose.errors import PullError

BLOCK = 32
_BLOCK_BYTES = 2 + BLOCK // 2
_FLOAT32, _Q4_0 = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class E5S1Sizes:
    """The header's numbers, under the names config.json has for them."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    unk_token_id: int


@dataclass(frozen=True, slots=True)
class _Entry:
    kind: int
    count: int
    offset: int
    size: int


class E5S1File:
    """One container, in memory.

    Attributes:
        sizes: the header.

    Raises:
        PullError: not such a file, or one that ends early.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 4
        if data[:4] != b"E5S1":
            raise PullError(f"no E5S1 container: it starts with {data[:4]!r}")
        (version,) = self._read("I")
        if version != 1:
            raise PullError(f"an E5S1 container of version {version}, and only version 1 is read")
        self.sizes = self._read_sizes()
        self._entries = self._read_directory()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def tensor(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """One tensor, in fp32.

        Raises:
            PullError: there is none of that name, or it has another number of values.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise PullError(f"the E5S1 container has no tensor {name!r}")
        if entry.count != np.prod(shape):
            raise PullError(f"tensor {name!r} of the E5S1 container has {entry.count} values, expected {shape}")
        if entry.kind == _Q4_0:
            return _dequantize(self._array(np.uint8, entry.size, entry.offset)).reshape(shape)
        return self._array(np.dtype("<f4"), entry.count, entry.offset).reshape(shape)

    def _read_sizes(self) -> E5S1Sizes:
        hidden, layers, heads, inner, vocab, positions, types = self._read("7i")
        eps, block = self._read("fi")
        if block != BLOCK:
            raise PullError(f"the E5S1 container has blocks of {block} values, and only {BLOCK} is read")
        pieces, bos, eos, pad, unk = self._read("5i")
        (blob,) = self._read("Q")
        self._at += 4 * (pieces + 1) + 4 * pieces + blob  # offsets, scores, text of the pieces
        return E5S1Sizes(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=inner,
            vocab_size=vocab,
            max_position_embeddings=positions,
            type_vocab_size=types,
            layer_norm_eps=float(str(np.float32(eps))),  # the decimal number that was meant, not its float32 neighbour
            bos_token_id=bos,
            eos_token_id=eos,
            pad_token_id=pad,
            unk_token_id=unk,
        )

    def _read_directory(self) -> dict[str, _Entry]:
        _, map_bytes = self._read("iI")
        self._at += map_bytes
        (count,) = self._read("i")
        entries = {}
        for _ in range(count):
            (length,) = self._read("H")
            name = self._data[self._at : self._at + length].decode()
            self._at += length
            entry = _Entry(*self._read("BIQQ"))
            _check(name, entry, len(self._data))
            entries[name] = entry
        return entries

    def _read(self, layout: str) -> tuple[Any, ...]:
        try:
            values = struct.unpack_from("<" + layout, self._data, self._at)
        except struct.error:
            raise PullError(f"the E5S1 container ends early, after {len(self._data)} bytes") from None
        self._at += struct.calcsize("<" + layout)
        return values

    def _array(self, dtype: Any, count: int, offset: int) -> npt.NDArray[Any]:
        return np.frombuffer(self._data, dtype, count, offset)


def _check(name: str, entry: _Entry, file_size: int) -> None:
    if entry.kind not in (_FLOAT32, _Q4_0):
        raise PullError(f"tensor {name!r} of the E5S1 container is of kind {entry.kind}, which is not read")
    due = 4 * entry.count if entry.kind == _FLOAT32 else entry.count // BLOCK * _BLOCK_BYTES
    if entry.size != due or (entry.kind == _Q4_0 and entry.count % BLOCK):
        raise PullError(f"tensor {name!r} of the E5S1 container: {entry.size} bytes for {entry.count} values")
    if entry.offset + entry.size > file_size:
        raise PullError(f"tensor {name!r} lies beyond the end of the E5S1 container")


def _dequantize(blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """[N * 18] bytes -> [N, 32]."""
    rows = blocks.reshape(-1, _BLOCK_BYTES)
    scales = rows[:, :2].copy().view("<f2").astype(np.float32)
    packed = rows[:, 2:]
    values = np.empty((len(rows), BLOCK), dtype=np.float32)
    values[:, : BLOCK // 2] = packed & 15
    values[:, BLOCK // 2 :] = packed >> 4
    values -= 8
    values *= scales
    return values
