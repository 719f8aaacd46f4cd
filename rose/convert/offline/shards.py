"""Safetensors files written one tensor at a time: the header is known before any data is.

Format: https://huggingface.co/docs/safetensors (8 bytes of header length, little-endian, a JSON header, the data).
Knows names, shapes and bytes; knows nothing of what they mean.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, uint8

from rose.convert.offline.weights import CODES, LETTERS, WIDTHS
from rose.errors import CheckpointError

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor as it will be written. `dtype` is safetensors' name ("F32", "BF16", ...)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * WIDTHS[self.dtype]


def split_shards(slots: Iterable[Slot], limit: int) -> list[list[Slot]]:
    """Slots in their order, as many a file as fit `limit` bytes; a larger tensor has a file of its own."""
    shards: list[list[Slot]] = [[]]
    size = 0
    for slot in slots:
        if shards[-1] and size + slot.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(slot)
        size += slot.nbytes
    return shards


def write_shards(
    folder: Path, shards: Sequence[Sequence[Slot]], read: Callable[[str], Tensor], advance: Callable[[int], None]
) -> list[Path]:
    """Write model.safetensors, or numbered files and their index.

    Args:
        read: the tensor of a slot's name, in its dtype and shape.
        advance: is told the bytes written so far.

    Raises:
        CheckpointError: a tensor that is not as its slot says.
    """
    count, done = len(shards), 0
    weight_map: dict[str, str] = {}
    paths: list[Path] = []
    for number, slots in enumerate(shards, 1):
        name = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        weight_map |= dict.fromkeys((slot.name for slot in slots), name)
        paths.append(folder / name)
        with (folder / name).open("wb") as file:
            file.write(_header(slots))
            for slot in slots:
                file.write(_bytes(slot, read(slot.name)).data)
                done += slot.nbytes
                advance(done)
    if count > 1:
        index = {"metadata": {"total_size": done}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return paths


def _header(slots: Sequence[Slot]) -> bytes:
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for slot in slots:
        table[slot.name] = {"dtype": slot.dtype, "shape": slot.shape, "data_offsets": [at, at + slot.nbytes]}
        at += slot.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data, and fp32 in it, lies at a multiple of 8
    return struct.pack("<Q", len(text)) + text


def _bytes(slot: Slot, tensor: Tensor) -> NDArray[np.uint8]:
    if tuple(tensor.shape) != slot.shape or (LETTERS | CODES).get(tensor.dtype) != slot.dtype:
        raise CheckpointError(f"{slot.name} is {tensor.dtype} of shape {tuple(tensor.shape)}, announced as {slot}")
    data: NDArray[np.uint8] = tensor.contiguous().reshape(-1).view(uint8).numpy()
    return data
