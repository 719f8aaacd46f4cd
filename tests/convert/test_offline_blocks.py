"""Blocks, digests and the order in which things reach the disk, against torch, hashlib and the file system."""

from __future__ import annotations

import errno
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
from tests.support.tiny_checkpoints import tiny_bert, tiny_qwen3

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


def test_a_scalar_is_one_value():
    for value in (torch.tensor(1.5), torch.tensor(-2.0, dtype=torch.float64)):
        assert (
            written([value], Slot("x", "BF16", ())) == value.bfloat16().reshape(1).view(torch.uint8).numpy().tobytes()
        )
    with pytest.raises(CheckpointError, match="not finite as F16"):
        written([torch.tensor(1e30)], Slot("x", "F16", ()))
    for parts, shape in (
        ([torch.tensor(1.5)], (1,)),
        ([torch.ones(1)], ()),
        ([torch.tensor(1.5)] * 2, ()),
        ([], ()),
    ):
        with pytest.raises(CheckpointError, match="announced as"):
            written(parts, Slot("x", "F32", shape))


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


def converted(source, target, force=False):
    found, wishes = find_source(source), Wishes(to="embedder")
    with open_weights(found, wishes) as weights:
        return convert(decide(found, wishes, weights), weights, target, force=force)


def failing_sync(monkeypatch, error: int, fails) -> list[Path]:
    """`os.fsync` fails so where `fails` says of a path; the paths that it was asked for."""
    asked: list[Path] = []
    fsync = os.fsync

    def sync(handle):
        path = Path(f"/proc/self/fd/{handle}").readlink()
        asked.append(path)
        if fails(path):
            raise OSError(error, os.strerror(error))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", sync)
    return asked


def replaced_folder(tmp_path) -> tuple[Path, Path]:
    source, target = tiny_bert(tmp_path / "a"), tmp_path / "b"
    target.mkdir()
    (target / "mine.txt").write_text("from before")
    return source, target


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_folders_is_written_to(tmp_path, monkeypatch, caplog, error):
    source, target = replaced_folder(tmp_path)
    asked = failing_sync(monkeypatch, error, Path.is_dir)
    converted(source, target, force=True)
    assert target / "model.safetensors" not in asked
    assert any(path.name == "model.safetensors" for path in asked)
    assert tmp_path in asked
    assert (target / "model.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert not (target / "mine.txt").exists()
    assert not caplog.records


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_cannot_reach_the_disk_has_no_name(tmp_path, monkeypatch, what):
    """A file that its file system cannot sync is not a folder that it cannot sync."""
    source, target = replaced_folder(tmp_path)
    error, fails = (errno.EIO, Path.is_dir) if what == "folder" else (errno.EINVAL, Path.is_file)
    failing_sync(monkeypatch, error, fails)
    with pytest.raises(CheckpointError, match=f"{target} cannot be written"):
        converted(source, target, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert (target / "mine.txt").read_text() == "from before"


@pytest.mark.parametrize("stood", ["folder", "file"])
def test_a_conversion_that_has_its_name_has_succeeded(tmp_path, monkeypatch, caplog, stood):
    """What fails once the target has its name is told, and what it replaced is let go nevertheless."""
    source, target = replaced_folder(tmp_path)
    if stood == "file":
        (target / "mine.txt").unlink()
        target.rmdir()
        target.write_text("from before")
    failing_sync(monkeypatch, errno.EIO, lambda path: path == tmp_path)
    assert converted(source, target, force=True) == target
    assert (target / "model.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert [record.getMessage() for record in caplog.records] == [
        f"{target} is written; whether its name outlives a power cut is unknown: [Errno 5] Input/output error"
    ]
    assert converted(source, target, force=True) == target


def test_what_cannot_be_removed_is_told(tmp_path, monkeypatch, caplog):
    source, target = tiny_bert(tmp_path / "a"), tmp_path / "b"
    target.write_text("from before")

    def refuse(self, missing_ok=False):
        raise PermissionError(errno.EPERM, "Operation not permitted", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        assert converted(source, target, force=True) == target
    (old,) = tmp_path.glob(".b.replaced-*")
    assert f"{target} is written; {old}, which it replaced, cannot be removed" in caplog.text


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
    converted(source, target)
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
