"""The folder of a server's sockets, or of several fronts' counts, and the end of those that killed servers left behind.

A folder in use is locked (flock) by the process that made it, and the kernel unlocks it however that process ends: one
that can be locked belongs to nobody any more. Services that clean /tmp up by age leave locked folders alone, too. Knows
folders; knows neither processes nor what listens in them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "rose-serve-"
# A folder is made first and locked right after; until then it would pass for one that was left behind.
YOUNG_S = 60.0


@contextlib.contextmanager
def socket_folder() -> Iterator[Path]:
    """A folder for this process's sockets, removed at the end. Removes those of killed servers first."""
    _sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name, _opened(Path(name)) as folder:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield Path(name)


def _sweep(parent: Path) -> None:
    for path in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another one's, in use, or gone meanwhile
            found = path.lstat()
            if found.st_uid != os.getuid() or time.time() - found.st_mtime < YOUNG_S:
                continue
            with _opened(path) as folder:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Its descriptor. Raises OSError, for a link that bears the name as well."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield folder
    finally:
        os.close(folder)
