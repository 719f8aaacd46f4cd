"""What the seconds before a clock starts go to: a line a stage, with --verbose.

Knows clocks; knows no stages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stage(what: str, verbose: bool) -> Iterator[None]:
    """Say how long the block took, if it is wanted."""
    begin = time.perf_counter()
    yield
    if verbose:
        print(f"  {time.perf_counter() - begin:6.2f} s  {what}", flush=True)
