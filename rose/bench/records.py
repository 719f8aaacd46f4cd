"""One row a load, and the file they are kept in: a new run replaces the rows of its loads, the best is never picked.

Knows rows and files; knows neither engines nor models.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What all rows of one run share."""

    run_id: str
    commit: str
    date: str
    command: str
    machine: str
    model: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of the seconds of single requests, in milliseconds."""

    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One load as it was measured.

    Attributes:
        load: "latency" or "scoring".
        tokens: of each sequence. batch: sequences of one request. in_flight: requests open at once.
        via: "engine" (in process), "link", "grpc" or "http"; all but the first from another process.
        backend: attention backend that served it.
        graph_hit_share: batches replayed from a captured graph, of all timed.
        per_s: sequences a second, by the clock of the whole run.
        n: requests timed.
        cosine: least of the items checked against transformers in fp32.
    """

    run_id: str
    commit: str
    date: str
    command: str
    machine: str
    load: str
    model: str
    tokens: int
    batch: int
    in_flight: int
    via: str
    dtype: str
    backend: str
    graph_hit_share: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    per_s: float
    n: int
    cosine: float

    @property
    def key(self) -> tuple[object, ...]:
        return (self.load, self.model, self.tokens, self.batch, self.in_flight, self.via, self.dtype, self.backend)


def percentiles(seconds: Sequence[float]) -> Percentiles:
    """Nearest rank, rounded to a microsecond."""
    ordered = np.sort(np.asarray(seconds)) * 1e3

    def rank(share: float) -> float:
        return round(float(ordered[max(0, int(np.ceil(share * len(ordered))) - 1)]), 3)

    return Percentiles(rank(0.5), rank(0.9), rank(0.99), round(float(ordered[-1]), 3))


def read_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    return [Row(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Add `rows`; those of the same load, model, size, way and backend are replaced."""
    new = list(rows)
    keys = {row.key for row in new}
    kept = [row for row in read_rows(path) if row.key not in keys]
    ordered = sorted(kept + new, key=lambda row: tuple(map(str, row.key[:2])) + tuple(row.key[2:5]) + row.key[5:])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in ordered), encoding="utf-8")
