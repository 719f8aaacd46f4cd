"""How far the work has come: one bar on stderr, in texts, with tokens a second beside it.

Knows counts; knows nothing of the work.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int, int], None]


@contextmanager
def text_bar(total: int | None) -> Iterator[Advance]:
    """The callable takes the texts and tokens done so far. On a stream that is no terminal, nothing is shown.

    Args:
        total: texts in all; None shows a bar that only moves.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("embedding"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]} tokens/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    started, first = time.monotonic(), -1
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bars:
        task = bars.add_task("", total=total, rate="")

        def advance(rows: int, tokens: int) -> None:
            nonlocal first
            first = tokens if first < 0 else first  # an earlier run's tokens say nothing about this one's speed
            rate = (tokens - first) / max(time.monotonic() - started, 1e-9)
            bars.update(task, completed=rows, rate=f"{rate:,.0f}")

        yield advance
