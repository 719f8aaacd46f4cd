"""Blocks, digests and the order in which things reach the disk, against torch, hashlib and the file system."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from rose.convert.offline import Wishes, blocks, convert, decide, digests, find_source, open_weights
from rose.convert.offline.blocks import Slot, byte_blocks
from rose.convert.offline.digests import digesting
from rose.convert.offline.weights import DTYPES
from rose.errors import CheckpointError
from tests.support.tiny_checkpoints import tiny_qwen3

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def written(parts, slot) -> bytes:
    return b"".join(block.tobytes() for block in byte_blocks(parts, slot, "the source"))


@pytest.mark.parametrize("letters", ["F16", "BF16"])
def test_every_pattern_of_16_bits_is_finite_exactly_where_torch_says_so(letters):
    every = torch.from_numpy(np.arange(2**16, dtype=np.uint16).view(np.int16)).view(DTYPES[letters])
    finite = every.isfinite()
    expected = every[finite].view(torch.uint8).numpy().tobytes()
    assert written([every[finite]], Slot("x", letters, (int(finite.sum()),))) == expected
    for value in every[~finite]:
        with pytest.raises(CheckpointError, match=f"the source holds values that are not finite as {letters}"):
            written([torch.stack([torch.ones_like(value), value])], Slot("x", letters, (2,)))


@pytest.mark.parametrize("letters", ["F32", "F64"])
def test_the_ends_of_longer_dtypes(letters):
    dtype, limits = DTYPES[letters], torch.finfo(DTYPES[letters])
    least = limits.smallest_normal
    ends = torch.tensor([limits.max, limits.min, least, -least, least / 2, 0.0, -0.0], dtype=dtype)
    assert written([ends], Slot("x", letters, (7,))) == ends.numpy().tobytes()
    nan = torch.tensor([torch.nan], dtype=dtype)
    for value in (nan, nan.copysign(torch.tensor(-1.0)), nan * 0 + torch.inf, torch.tensor([torch.inf, -torch.inf])):
        for bad in value.to(dtype).unbind():
            with pytest.raises(CheckpointError, match="not finite"):
                written([torch.stack([ends[0], bad, ends[1]])], Slot("x", letters, (3,)))
    quiet = torch.tensor([-1], dtype=INTEGERS[dtype.itemsize]).view(dtype)  # a NaN with all bits set
    with pytest.raises(CheckpointError, match="not finite"):
        written([quiet], Slot("x", letters, (1,)))


@pytest.mark.parametrize("size", [6, 4096, 256 << 10])
def test_blocks_are_the_cast_tensor_however_it_is_cut(monkeypatch, size):
    monkeypatch.setattr(blocks, "BLOCK", size)
    tensor = torch.randn(301, 37, generator=torch.Generator().manual_seed(0))
    expected = tensor.bfloat16().view(torch.uint8).numpy().tobytes()
    slot = Slot("x", "BF16", (301, 37))
    assert written([tensor], slot) == expected
    assert written(tensor.split(7), slot) == expected
    assert written([tensor.T.contiguous().T], slot) == expected
    assert written([torch.empty(0, 37)], Slot("x", "BF16", (0, 37))) == b""


def test_what_is_not_as_announced_is_refused():
    codes = torch.ones(2, 3, dtype=torch.int8)
    assert written([codes], Slot("x", "I8", (2, 3))) == b"\1" * 6
    for part, slot in (
        (torch.ones(2, 3), Slot("x", "BF16", (2, 4))),
        (torch.ones(2, 3), Slot("x", "BF16", (3, 3))),
        (torch.ones(2, 3), Slot("x", "I8", (2, 3))),
        (codes, Slot("x", "BF16", (2, 3))),
    ):
        with pytest.raises(CheckpointError, match="announced as"):
            written([part], slot)


def test_digests_are_hashlibs(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "_WINDOW", 1 << 16)
    paths = []
    for size in (0, 1, 1 << 16, (1 << 16) + 1, 3 << 16):
        paths.append(tmp_path / f"{size}.bin")
        paths[-1].write_bytes(np.random.default_rng(size).bytes(size))
    with digesting(paths) as found:
        assert found() == {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_digests_are_given_up_with_the_conversion(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "_WINDOW", 1 << 12)
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(64 << 20))
    begun, futures = [], []

    class Submits(digests.ThreadPoolExecutor):
        def submit(self, fn, *arguments):
            futures.append((super().submit(fn, *arguments), arguments[1]))
            begun.append(arguments[0])
            return futures[-1][0]

    monkeypatch.setattr(digests, "ThreadPoolExecutor", Submits)
    with pytest.raises(KeyboardInterrupt), digesting([path] * 2):
        raise KeyboardInterrupt
    assert begun == [path] * 2
    assert all(future.done() and event.is_set() for future, event in futures)
    assert futures[0][0].result() != hashlib.sha256(path.read_bytes()).hexdigest()


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    source, target = tiny_qwen3(tmp_path / "a", shards=2), tmp_path / "b"
    order: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def note_sync(handle):
        fsync(handle)
        order.append(str(Path(f"/proc/self/fd/{handle}").readlink()))

    def note_rename(self, to):
        order.append(f"renamed to {to.name}")
        return rename(self, to)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    found, wishes = find_source(source), Wishes(to="embedder")
    with open_weights(found, wishes) as weights:
        convert(decide(found, wishes, weights), weights, target)
    at = order.index("renamed to b")
    hidden = next(Path(path) for path in order if Path(path).parent == tmp_path)
    assert hidden.name.startswith(".b.partial-")
    assert {Path(path) for path in order[:at]} >= {hidden / path.relative_to(target) for path in target.rglob("*")}
    assert order[at - 1] == str(hidden)
    assert order[at + 1 :] == [str(tmp_path)]
    with safe_open(target / "model.safetensors", "pt") as made:
        assert made.keys()
    header = int.from_bytes((target / "model.safetensors").read_bytes()[:8], "little")
    assert (header + 8) % 4096 == 0
