"""A tensor's bytes as they go into a file: block by block, cast and looked through while they lie in the cache.

A block is read from memory once and written from the processor's cache; nothing is held besides it. Knows how numbers
are laid out; knows neither files nor what a tensor is for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, uint8

from rose.convert.offline.weights import CODES, DTYPES, LETTERS, WIDTHS
from rose.errors import CheckpointError

# Bytes of the result. 2 GB are written in 0.8 s by 256 or 512 kB, in 1 s by 64 kB and in 2 to 3 s by 1 MB: the page
# cache looks for free memory in pieces of such a size, and makes some where there is none (ext4, Linux 6.18).
BLOCK = 256 << 10
# dtype -> bits of infinity, whose exponent is all ones as NaN's is, as a signed integer; of minus infinity, unsigned.
_INFINITE = {
    "F64": (np.int64, 0x7FF0 << 48, np.uint64, 0xFFF0 << 48),
    "F32": (np.int32, 0x7F80 << 16, np.uint32, 0xFF80 << 16),
    "F16": (np.int16, 0x7C00, np.uint16, 0xFC00),
    "BF16": (np.int16, 0x7F80, np.uint16, 0xFF80),
}


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor as it will be written. `dtype` is safetensors' name ("F32", "BF16", ...)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * WIDTHS[self.dtype]


def byte_blocks(parts: Iterable[Tensor], slot: Slot, origin: str) -> Iterator[NDArray[np.uint8]]:
    """`slot.nbytes` bytes; each block is valid until the next.

    Args:
        parts: runs of a tensor's rows, in order; a scalar is one run and one row. Floats are cast to the slot's dtype;
            codes must be of it.
        origin: where the tensor is from, for errors.

    Raises:
        CheckpointError: a tensor that is not as its slot says, or a value that is infinite or NaN in the slot's dtype.
    """
    rows = 0
    for part in parts:
        rows += len(part) if part.dim() else 1
        castable = part.dtype in LETTERS and slot.dtype in DTYPES
        alike = part.dim() == len(slot.shape) and part.shape[1:] == slot.shape[1:]
        if not (alike and (castable or CODES.get(part.dtype) == slot.dtype)):
            raise CheckpointError(f"{slot.name} is {part.dtype} of shape {tuple(part.shape)}, announced as {slot}")
        flat, dtype = part.contiguous().reshape(-1), DTYPES.get(slot.dtype, part.dtype)
        for piece in flat.split(BLOCK // WIDTHS[slot.dtype]) if flat.numel() else ():
            block: NDArray[np.uint8] = piece.to(dtype).view(uint8).numpy()
            if not _finite(block, slot.dtype):
                raise CheckpointError(f"{origin} holds values that are not finite as {slot.dtype}")
            yield block
    if rows != (slot.shape[0] if slot.shape else 1):
        raise CheckpointError(f"{slot.name} has {rows} rows, announced as {slot}")


def _finite(block: NDArray[np.uint8], letters: str) -> bool:
    """Whether no exponent is all ones. The largest integer tells of a positive one as signed bits, and of a negative
    one as unsigned bits: two passes over the cache without a temporary, for any of these dtypes."""
    if letters not in _INFINITE:
        return True
    signed, infinity, unsigned, minus_infinity = _INFINITE[letters]
    return int(block.view(signed).max()) < infinity and int(block.view(unsigned).max()) < minus_infinity
