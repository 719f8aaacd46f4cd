"""The file of `rose embed` on its way to its place: whose it is, and what counts in it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest

from rose.cli.bulk.resume import Done, Partial
from rose.errors import InvalidInput

ROWS = b"row 1\nrow 2\n"


def begun(out: Path) -> Partial:
    partial = Partial(out, {"form": "jsonl"})
    partial.append(ROWS, Done(2, 0, "digest", 7))
    return partial


def publishing_meanwhile(monkeypatch, first: Partial, out: Path) -> None:
    """Between a second run's opening of the rows and its lock, the first publishes them and ends."""
    lock = fcntl.flock
    pending = [first]

    def flock(file, flags):
        if pending:
            one = pending.pop()
            one.publish(one.path)
            one.close()
        return lock(file, flags)

    monkeypatch.setattr("rose.cli.bulk.resume.fcntl.flock", flock)


def test_a_run_that_opened_what_another_then_published_leaves_it_alone(tmp_path, monkeypatch):
    out = tmp_path / "v.jsonl"
    publishing_meanwhile(monkeypatch, begun(out), out)
    with pytest.raises(InvalidInput, match="is there already; --overwrite replaces it"):
        Partial(out, {"form": "jsonl"})
    assert out.read_bytes() == ROWS
    assert list(tmp_path.iterdir()) == [out]


def test_a_run_that_is_to_overwrite_writes_a_file_of_its_own(tmp_path, monkeypatch):
    out = tmp_path / "v.jsonl"
    publishing_meanwhile(monkeypatch, begun(out), out)
    second = Partial(out, {"form": "jsonl"}, overwrite=True)
    assert second.done == Done()
    assert not second.path.samefile(out)
    second.append(b"other\n", Done(1, 0, "digest", 1))
    assert out.read_bytes() == ROWS
    second.publish(second.path)
    second.close()
    assert out.read_bytes() == b"other\n"
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(("error", "told"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_a_file_that_has_its_name_is_published(tmp_path, monkeypatch, caplog, error, told):
    """Some file systems cannot sync a folder; whatever that says, the output is there and nothing else is left."""
    out = tmp_path / "v.jsonl"
    partial = begun(out)
    fsync = os.fsync

    def refuse(handle):
        if Path(f"/proc/self/fd/{handle}").readlink() == tmp_path:
            raise OSError(error, os.strerror(error))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", refuse)
    partial.publish(partial.path)
    partial.close()
    assert out.read_bytes() == ROWS
    assert list(tmp_path.iterdir()) == [out]
    assert (f"whether names in {tmp_path} outlive a power cut is unknown" in caplog.text) == told


def test_restart_forgets_the_record_before_the_rows(tmp_path, monkeypatch):
    """Stopped between the two, nothing claims rows that are gone."""
    out = tmp_path / "v.jsonl"
    begun(out).close()
    record = tmp_path / "v.jsonl.partial.json"
    assert json.loads(record.read_text())["rows"] == 2
    unlink = Path.unlink

    def then_stop(self, missing_ok=False):
        unlink(self, missing_ok=missing_ok)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", then_stop)
        with pytest.raises(KeyboardInterrupt):
            Partial(out, {"form": "jsonl"}, restart=True)
    assert not record.exists()
    assert (tmp_path / "v.jsonl.partial").read_bytes() == ROWS
    again = Partial(out, {"form": "jsonl"})
    assert again.done == Done()
    again.close()
    assert list(tmp_path.iterdir()) == []
