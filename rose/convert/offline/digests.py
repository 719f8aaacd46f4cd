"""sha256 of a source's files, made on threads of their own while the result is written.

SHA-256 is one chain of blocks, about 1.9 GB/s a thread with the processor's SHA instructions: a file takes as long as
it takes, and shards are done two at a time. hashlib lets go of the interpreter lock. Knows files; knows no formats.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

_CHUNK = 1 << 20  # bytes: read into one buffer that stays in the cache, so that memory is not touched again
_THREADS = 2


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
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while not given_up.is_set() and (count := file.readinto(buffer)):
            digest.update(buffer[:count])
    return digest.hexdigest()
