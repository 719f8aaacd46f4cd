"""What a pull shows while it works: one bar a stage, in bytes.

Knows counts and titles; knows neither packages nor paths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Advance = Callable[[int], None]


class Progress(Protocol):
    """Something that shows how far a stage has come."""

    def stage(self, title: str, total: int) -> AbstractContextManager[Advance]:
        """Start a stage of `total` bytes; the callable takes the bytes done so far, counted from the stage's start."""
        ...


class Silent:
    """Shows nothing: for library use and tests."""

    @contextmanager
    def stage(self, title: str, total: int) -> Iterator[Advance]:
        yield lambda done: None


class Bars:
    """Progress bars on stderr; on a stream that is no terminal, one finished line a stage."""

    @contextmanager
    def stage(self, title: str, total: int) -> Iterator[Advance]:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn, TransferSpeedColumn
        from rich.progress import Progress as RichProgress

        columns = (
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=30),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
        )
        with RichProgress(*columns, console=Console(stderr=True)) as bars:
            task = bars.add_task(title, total=total)
            yield lambda done: bars.update(task, completed=min(done, total))
