"""A file that is written in many steps and is either whole or not there; an interrupted run goes on where it stopped.

    OUT.partial         rows so far
    OUT.partial.json    how many of them count, which settings they were made with, a digest of what is behind them

The record is replaced after each step, behind the data: what was written and not recorded is cut off. Knows files;
knows neither formats nor servers.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from rose.errors import InvalidInput

_log = logging.getLogger(__name__)


class ItemDigest:
    """sha256 over ids and texts in their order."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, item_id: str | int | None, text: str) -> None:
        for data in (json.dumps(item_id).encode(), text.encode()):  # as JSON, 1 is not "1"
            self._hash.update(len(data).to_bytes(8, "little") + data)

    def value(self) -> str:
        return self._hash.hexdigest()


@dataclass(frozen=True, slots=True)
class Done:
    """How far an earlier run came.

    Attributes:
        size: bytes of the partial file that count.
        digest: of the ids and texts behind its rows.
    """

    rows: int = 0
    size: int = 0
    digest: str = ""
    tokens: int = 0


class Partial:
    """The file on its way to `out`.

    Args:
        settings: whatever decides what a row holds; a run with others does not go on with this one's rows.
        restart: forget an earlier run.
        overwrite: replace an output that is there already.

    Raises:
        InvalidInput: another run is writing it or has written it, or an earlier run had other settings.
    """

    def __init__(
        self, out: Path, settings: Mapping[str, Any], *, restart: bool = False, overwrite: bool = False
    ) -> None:
        self._out = out
        self.path = out.with_name(f"{out.name}.partial")
        self._record = out.with_name(f"{out.name}.partial.json")
        self._settings = dict(settings)
        self.published = False
        self._file = self._locked()
        try:
            if not overwrite and out.exists():  # another run may have written it since the command began
                if self.path.stat().st_size == 0:
                    self.path.unlink()
                raise InvalidInput(f"{out} is there already; --overwrite replaces it")
            if restart:
                self._record.unlink(missing_ok=True)  # first: a record must never count rows that are gone
            self.done = Done() if restart else self._earlier()
            self._file.truncate(self.done.size)
            self._file.seek(self.done.size)
        except BaseException:
            self._file.close()
            raise

    def append(self, data: bytes, done: Done) -> None:
        """Add `data`; `done` says how far that is, its size left out.

        Raises:
            InvalidInput: the disk is full, or cannot be written any more; what was recorded before counts.
        """
        with self.writing():
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]
            now = Done(done.rows, self._file.tell(), done.digest, done.tokens)
            text = json.dumps({"settings": self._settings, **{name: getattr(now, name) for name in _FIELDS}})
            temporary = self._record.with_suffix(".tmp")
            try:
                temporary.write_text(text + "\n", encoding="utf-8")
                temporary.replace(self._record)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
            self.done = now

    @contextmanager
    def writing(self) -> Iterator[None]:
        """What the file system refuses, as an InvalidInput."""
        try:
            yield
        except OSError as error:
            raise InvalidInput(f"cannot write {self.path}: {error.strerror or error}") from error

    def publish(self, made: Path) -> None:
        """Rename a finished file to its place, once its bytes are on the disk; only then are rows and record let go.

        Args:
            made: the rows' own file, or one that was made out of it.
        """
        try:
            with made.open("rb") as written:
                os.fsync(written.fileno())
            made.replace(self._out)
        except OSError:
            if made != self.path:  # it can be made again, and a full disk has better use for the room
                made.unlink(missing_ok=True)
            raise
        self.published = True
        _sync_folder(self._out.parent)
        self.path.unlink(missing_ok=True)
        self._record.unlink(missing_ok=True)

    def close(self) -> None:
        """Keep what is recorded; a file without a row is not kept."""
        if not self.done.rows:
            self.path.unlink(missing_ok=True)
            self._record.unlink(missing_ok=True)
        self._file.close()

    def _locked(self) -> FileIO:
        """The rows' file, held by this run alone.

        Between opening and locking, the run that held it may have published it: then the lock is one on that run's
        output, which is nobody's to write, and the path is opened anew.
        """
        while True:
            file = self._opened()
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                raise InvalidInput(f"another run is writing {self._out}") from None
            if _is_at(file, self.path):
                return file
            file.close()

    def _opened(self) -> FileIO:
        """Without a buffer: what a full disk did not take would be tried once more when the file is closed."""
        try:
            return FileIO(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+")
        except OSError as error:
            raise InvalidInput(f"cannot write {self.path}: {error.strerror}") from None

    def _earlier(self) -> Done:
        try:
            record = json.loads(self._record.read_text(encoding="utf-8"))
            done = Done(**{name: record[name] for name in _FIELDS})
            settings = record["settings"]
        except FileNotFoundError:
            return Done()
        except (ValueError, KeyError, TypeError):
            raise InvalidInput(f"{self._record} cannot be read; --restart begins anew") from None
        if self.path.stat().st_size == 0 and self._out.exists():
            return Done()  # stopped between its file's last rename and the end of its record
        changed = [name for name in self._settings if settings.get(name) != self._settings[name]]
        if changed:
            name = changed[0]
            raise InvalidInput(
                f"{self._out} was begun with {name} {settings.get(name)!r}, not {self._settings[name]!r}; "
                "--restart begins anew"
            )
        if self.path.stat().st_size < done.size:
            raise InvalidInput(f"{self.path} is shorter than {self._record} says; --restart begins anew")
        return done


def _is_at(file: FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    """So that the rename outlives a power cut before what it stands for is removed. It has happened: what fails here
    is told, not raised; and file systems that cannot do it (some FUSE and network mounts) say EINVAL or ENOTSUP."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            _log.warning("whether names in %s outlive a power cut is unknown: %s", folder, error)


_FIELDS = ("rows", "size", "digest", "tokens")
