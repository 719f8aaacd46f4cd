"""A server's sockets go with it; what a killed one left is removed by the next, and nothing else is."""

from __future__ import annotations

import os
import signal
import tempfile

import pytest

from rose.gateway import socket_folder as room
from rose.gateway.socket_folder import socket_folder
from tests.gateway.processes import running, wait_for


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where temporary folders are made, here and in processes of the test."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def aged(path):
    old = path.stat().st_mtime - 2 * room.YOUNG_S
    os.utime(path, (old, old))
    return path


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_it_is_gone_at_the_end(temporary):
    with socket_folder() as folder:
        assert folder.parent == temporary
        (folder / "engine-0").touch()
    assert names(temporary) == set()


def test_a_killed_server_leaves_nothing_for_good(text_folder, temporary):
    engine = {"folder": str(text_folder), "pids": str(temporary / "pids")}
    with running("serve", folder=str(text_folder), engines=[engine], config={}) as process:
        (left,) = wait_for(lambda: list(temporary.glob(f"{room.PREFIX}*/engine-0")))
        aged(left.parent)
        with socket_folder():
            assert left.exists()  # its server lives
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    aged(left.parent)
    with socket_folder():
        assert not left.parent.exists()


def test_nothing_else_is_removed(temporary):
    """Not one that is being made, nor another program's, nor what a link of the name leads to."""
    young, other, target = temporary / "rose-serve-young", temporary / "rose-other", temporary / "target"
    for path in (young, other, target):
        path.mkdir()
    (temporary / "rose-serve-link").symlink_to(target)
    os.utime(temporary / "rose-serve-link", (1, 1), follow_symlinks=False)
    (temporary / "rose-serve-file").touch()
    for path in (other, target, temporary / "rose-serve-file"):
        aged(path)
    before = names(temporary)
    with socket_folder() as folder:
        assert names(temporary) == before | {folder.name}
