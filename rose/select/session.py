"""One run of measuring: which loads, in which order, within how many seconds, and what is told meanwhile.

Knows loads, the clock and what to tell; knows neither backends nor devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from rose.config.profile import AttentionGrid
from rose.select.grid import GridLoad
from rose.select.ways import Measured, Ways, measure_load

# A load may take so many times its even share of what is left: one that is clear early leaves its time to others.
GENEROUS = 2.0
Advance = Callable[[str], None]


class Progress(Protocol):
    """Shows how far a stage has come."""

    def stage(self, title: str, steps: int) -> AbstractContextManager[Advance]:
        """A stage of so many steps; the callable ends one of them and names it."""
        ...


class Silent:
    @contextmanager
    def stage(self, title: str, steps: int) -> Iterator[Advance]:
        yield lambda name: None


class Bars:
    """A bar a stage on stderr."""

    @contextmanager
    def stage(self, title: str, steps: int) -> Iterator[Advance]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        columns = (
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[last]}"),
        )
        with RichProgress(*columns, console=Console(stderr=True)) as bars:
            task = bars.add_task(title, total=steps, last="")
            yield lambda name: bars.update(task, advance=1, last=name)


class Budget:
    """Seconds of a run, shared out as it goes."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        return self._end - self._clock()

    def share(self, parts: int) -> Callable[[], bool]:
        """Whether there is time left for one of `parts` things, asked while it is done."""
        until = self._clock() + max(0.0, self.left) * GENEROUS / max(parts, 1)
        until = min(until, self._end)
        return lambda: self._clock() < until


@dataclass(frozen=True, slots=True, kw_only=True)
class GridRun:
    """What came of a grid.

    Attributes:
        measured: in the order measured. skipped: loads for which no time was left.
        missing: backends that could not be tried, with the reason. excluded: those found unfit.
    """

    ways: Ways
    measured: tuple[Measured, ...]
    skipped: tuple[GridLoad, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)

    @property
    def grid(self) -> AttentionGrid:
        """Without the times of backends that turned out unfit later."""
        points = []
        for found in self.measured:
            if found.point is None:
                continue
            us = {name: t for name, t in found.point.us.items() if name not in self.excluded}
            if us:
                points.append(replace(found.point, us=us))
        ordered = sorted(points, key=lambda p: (p.sequences, p.tokens, p.max_length))
        return AttentionGrid(shape=self.ways.shape, points=tuple(ordered), excluded=dict(self.excluded))


def measure_grid(
    ways: Ways,
    loads: Sequence[GridLoad],
    budget: Budget,
    *,
    seed: int,
    progress: Progress | None = None,
    max_rounds: int = 40,
) -> GridRun:
    """Every load that time allows, the first ones first, and one in any case."""
    excluded = dict(ways.excluded)
    measured: list[Measured] = []
    with (progress or Silent()).stage(f"{ways.shape.layout} {ways.of}", len(loads)) as advance:
        for number, load in enumerate(loads):
            if budget.left <= 0 and measured:
                break
            share = budget.share(len(loads) - number)
            # Each load has an input of its own, the same in whatever order and company it is measured.
            found = measure_load(
                ways, load, excluded, seed=seed + hash(load.lengths) % 1000003, time_left=share, max_rounds=max_rounds
            )
            measured.append(found)
            advance(_told(found))
    return GridRun(
        ways=ways,
        measured=tuple(measured),
        skipped=tuple(loads[len(measured) :]),
        missing=dict(ways.missing),
        excluded=excluded,
    )


def _told(found: Measured) -> str:
    if found.point is None:
        return f"{found.load.name}: nothing serves it"
    best, _ = min(found.point.us.items(), key=lambda entry: entry[1])
    return f"{found.load.name}: {best}"
