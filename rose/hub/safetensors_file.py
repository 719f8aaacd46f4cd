"""A safetensors file written tensor by tensor, so that a model larger than memory's comfort is never held whole.

The library's own writer takes every tensor at once. Knows names, shapes and bytes; knows neither models nor torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rose.hub.progress import Advance

Float32 = npt.NDArray[np.float32]
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class LazyArray:
    """A float32 tensor that is made when it is written.

    Attributes:
        read: makes it, in `shape`.
    """

    shape: tuple[int, ...]
    read: Callable[[], Float32]

    @property
    def nbytes(self) -> int:
        return 4 * prod(self.shape)


def write_tensors(path: Path, tensors: Mapping[str, LazyArray], advance: Advance = lambda done: None) -> None:
    """Write `tensors` as F32, in the order given; `advance` is told the bytes of data written so far.

    The header is padded with spaces to a multiple of eight bytes, as the format asks.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    done = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            values = tensor.read()
            if values.shape != tensor.shape:
                raise ValueError(f"{name} was announced as {tensor.shape} and came as {values.shape}")
            file.write(np.ascontiguousarray(values, dtype="<f4").data)
            done += tensor.nbytes
            advance(done)


def read_tensors(path: Path) -> dict[str, LazyArray]:
    """The tensors of a file that `write_tensors` wrote, in its order; their data is read when it is asked for."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    del header["__metadata__"]
    return {name: _stored(path, 8 + size, entry["shape"], *entry["data_offsets"]) for name, entry in header.items()}


def _stored(path: Path, start: int, shape: list[int], begin: int, end: int) -> LazyArray:
    def read() -> Float32:
        return np.fromfile(path, dtype="<f4", count=(end - begin) // 4, offset=start + begin).reshape(shape)

    return LazyArray(tuple(shape), read)
