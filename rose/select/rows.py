"""A run as rows: each grid point with its time per backend, what the profile chooses there, and what was best.

Knows rows and files; measures nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rose.attention_backends.choose import Load, best_overall, choose, fastest
from rose.config.profile import AttentionGrid, Point
from rose.select.session import GridRun

# How close to the best a choice has to be to count as right, and how far no fixed backend may be ahead on any load.
WITHIN = 0.03
BEHIND = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One point of one run.

    Attributes:
        run: "first" (the profile came from it) or "check" (fresh inputs, another run than the profile's).
        point: such as "16 x 512". of: "model", or "24 layers" of attention.
        us, spread_us: by backend; see Point.
        chosen: what the profile has for it. best: what was fastest in this run
            of those that are chosen for their time.
        behind: how much longer than the best the chosen one took; 0.01 is 1 %.
        clear: the order was beyond doubt when measuring stopped, after `rounds`.
    """

    run_id: str
    commit: str
    date: str
    command: str
    machine: str
    model: str
    run: str
    shape: str
    of: str
    point: str
    tokens: int
    sequences: int
    max_length: int
    us: Mapping[str, float]
    spread_us: Mapping[str, float]
    chosen: str
    best: str
    behind: float
    clear: bool
    rounds: int

    @property
    def key(self) -> tuple[object, ...]:
        return (self.model, self.shape, self.run, self.tokens, self.sequences, self.max_length)


def chosen_for(point: Point, grid: AttentionGrid, left_out: Mapping[str, str]) -> str | None:
    """What the engine takes at `point` by the profile's `grid`; None if nothing is left."""
    if grid.shape.layout == "paged":
        return next((name for name in best_overall(grid.points) if name not in left_out), None)
    load = Load(point.tokens, point.sequences, point.max_length)
    choice = choose(grid.shape.head_dim, load, left_out, grid.points)
    return None if choice is None else choice.backend


def rows_of(run: GridRun, grid: AttentionGrid, which: str, facts: Mapping[str, str]) -> list[Row]:
    """Rows of `run` against the profile's `grid`.

    Args:
        facts: run_id, commit, date, command, machine, model.
    """
    rows = []
    left_out = {**run.missing, **run.excluded}
    for found in run.measured:
        point = found.point
        if point is None:
            continue
        chosen, best = chosen_for(point, grid, left_out), fastest(point.us)
        if chosen is None:
            continue
        rows.append(
            Row(
                **facts,
                run=which,
                shape=str(grid.shape),
                of=point.of,
                point=point.name,
                tokens=point.tokens,
                sequences=point.sequences,
                max_length=point.max_length,
                us=dict(point.us),
                spread_us=dict(point.spread_us),
                chosen=chosen,
                best=best,
                behind=round(point.us.get(chosen, float("inf")) / point.us[best] - 1, 4),
                clear=found.comparison.clear,
                rounds=found.comparison.rounds,
            )
        )
    return rows


def share_within(rows: Sequence[Row], within: float = WITHIN) -> float:
    """Share of points whose choice is within `within` of the best; 1 of no rows."""
    return sum(row.behind <= within for row in rows) / len(rows) if rows else 1.0


def summary(rows: Sequence[Row]) -> list[str]:
    """Lines: the share within 3 %, where it is not, and the fixed backend that comes nearest."""
    if not rows:
        return ["no grid point was measured"]
    good = sum(row.behind <= WITHIN for row in rows)
    lines = [f"{good} of {len(rows)} points ({share_within(rows):.0%}) are served within {WITHIN:.0%} of the best"]
    for row in sorted(rows, key=lambda row: -row.behind):
        if row.behind > WITHIN:
            lines.append(f"  {row.shape}, {row.point}: {row.chosen} is {row.behind:.1%} behind {row.best}")
    for name in sorted({name for row in rows for name in row.us}):
        common = [row for row in rows if name in row.us and row.chosen in row.us]
        ahead = [row for row in common if row.us[row.chosen] > row.us[name] * (1 + BEHIND)]
        slower = sum(row.us[name] for row in common) / sum(row.us[row.chosen] for row in common) - 1 if common else 0.0
        lines.append(
            f"  fixed to {name}: {slower:+.1%} over the {len(common)} points it serves; "
            f"ahead of the choice by more than {BEHIND:.0%} at {len(ahead)}"
        )
    return lines


def read_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    return [Row(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Add `rows`; those of the same model, shape, run and point are replaced."""
    new = list(rows)
    keys = {row.key for row in new}
    kept = [row for row in read_rows(path) if row.key not in keys]
    ordered = sorted([*kept, *new], key=lambda row: (row.model, row.shape, row.run, row.sequences, row.tokens))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in ordered), encoding="utf-8")
