"""Safetensors files written one tensor at a time: the header is known before any data is.

Format: https://huggingface.co/docs/safetensors (8 bytes of header length, little-endian, a JSON header, the data).
Knows names, shapes and bytes; knows nothing of what they mean.
"""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rose.convert.offline.blocks import Slot

INDEX = "model.safetensors.index.json"
# What file systems say that keep no names by themselves (some FUSE and network mounts): they have no fsync of a folder.
_NO_FOLDERS = (errno.EINVAL, errno.ENOTSUP)
_PAGE = 4096  # where the data begins, a multiple of this: matrices are written, and later mapped, by whole pages


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
    folder: Path,
    shards: Sequence[Sequence[Slot]],
    read: Callable[[Slot], Iterable[NDArray[np.uint8]]],
    advance: Callable[[int], None],
) -> list[Path]:
    """Write model.safetensors, or numbered files and their index; each goes to the disk while the next is written.

    Args:
        read: the bytes of a slot's tensor, as `byte_blocks` gives them; what it raises is passed on.
        advance: is told the bytes written so far.
    """
    count, done = len(shards), 0
    weight_map: dict[str, str] = {}
    paths: list[Path] = []
    with ThreadPoolExecutor(1) as disk:
        syncs: list[Future[None]] = []
        for number, slots in enumerate(shards, 1):
            name = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            weight_map |= dict.fromkeys((slot.name for slot in slots), name)
            paths.append(folder / name)
            with (folder / name).open("wb") as file:
                file.write(_header(slots))
                file.flush()
                for slot in slots:
                    for block in read(slot):
                        file.write(block.data)
                    done += slot.nbytes
                    advance(done)
            syncs.append(disk.submit(sync, folder / name))
        for reached in syncs:
            reached.result()
    if count > 1:
        index = {"metadata": {"total_size": done}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return paths


def sync(path: Path) -> None:
    """Wait until a file, or a folder's names where its file system can do that, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_FOLDERS or not path.is_dir():
            raise
    finally:
        os.close(handle)


def _header(slots: Sequence[Slot]) -> bytes:
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for slot in slots:
        table[slot.name] = {"dtype": slot.dtype, "shape": slot.shape, "data_offsets": [at, at + slot.nbytes]}
        at += slot.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _PAGE)
    return struct.pack("<Q", len(text)) + text
