"""sha256 of a source's files, made on threads of their own while the result is written.

SHA-256 is one chain of blocks, about 2 GB/s a thread with the processor's SHA instructions: a file takes as long as it
takes, and shards are done two at a time where a core is left beside the one that writes. hashlib lets go of the
interpreter lock. Knows files; knows no formats.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from mmap import ACCESS_READ, mmap
from pathlib import Path
from threading import Event

# Bytes that are mapped, and hashed, in one call. Short calls ask for the interpreter lock so often that beside a thread
# that writes blocks they wait for it longer than they hash.
_WINDOW = 32 << 20
_THREADS = max(1, min(2, (os.cpu_count() or 1) - 1))  # on 2 cores a second one takes 0.25 s from a writer's 1.25


@contextmanager
def digesting(paths: Sequence[Path]) -> Iterator[Callable[[], dict[str, str]]]:
    """Yields what waits for the digests (path as it was named -> sha256); they are given up where the body fails."""
    given_up = Event()
    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            futures = {str(path): pool.submit(_digest, path, given_up) for path in paths}
            yield lambda: {name: future.result() for name, future in futures.items()}
        finally:
            given_up.set()


def _digest(path: Path, given_up: Event) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        for at in range(0, size, _WINDOW):
            if given_up.is_set():
                break
            with mmap(file.fileno(), min(_WINDOW, size - at), access=ACCESS_READ, offset=at) as window:
                digest.update(window)
    return digest.hexdigest()
