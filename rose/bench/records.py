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
        load: "latency", "scoring", "throughput-TOKENS", "concurrency-IN_FLIGHT" or "decode".
        tokens: of each sequence, or of each prompt. batch: sequences of one request, or prompts at a time.
        in_flight: requests open at once.
        via: "engine" (in process), "link", "grpc" or "http"; all but the first from another process.
        backend: attention backend that served it.
        graph_hit_share: batches replayed from a captured graph, of all timed.
        p50_ms .. max_ms: of whole requests. Where there is a window: p50, p90 and p99 of those that ended within, max
            also of those that reach over one of its edges.
        per_s: sequences a second, by the clock of the whole run.
        n: requests timed; where there is a window, those that ended within.
        cosine: least of the items checked against transformers in fp32; None where tokens come back, not vectors.
        tokens_per_s: tokens taken in a second; of decoding, tokens given out.
        floor_share: of the rate that the chip's measured ceilings allow for this shape.
        busy_share: of the clock's time, what the engine's batches took the device by its own events.
        settled_s: under load before the window began: until no batch of a new shape had come for --warm seconds.
        first_runs: in the window, batches that were the first, or the first captured, of their shape; each may be slow.
        gpu_util: share of the samples' time in which any kernel ran, as NVML tells it; also from there, means of the
            window: gpu_mhz, the multiprocessors' clock, and gpu_watts.
        fronts: front processes, where there are several.
        new_tokens: generated a prompt.
        ttft_ms, ttft_p99_ms: from sending a request to its first token: median, and 99 of 100.
        tpot_ms, tpot_p99_ms: of a request, (last token - first) / (n - 1).
        gap_p99_ms: between two tokens of one request. step_ms: a token, once all prompts of a round are in.
        agreement: of generated tokens, those that are the reference's best where it has a clear one.
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
    cosine: float | None = None
    tokens_per_s: float | None = None
    floor_share: float | None = None
    busy_share: float | None = None
    gpu_util: float | None = None
    gpu_mhz: float | None = None
    gpu_watts: float | None = None
    settled_s: float | None = None
    first_runs: int | None = None
    fronts: int | None = None
    new_tokens: int | None = None
    ttft_ms: float | None = None
    ttft_p99_ms: float | None = None
    tpot_ms: float | None = None
    tpot_p99_ms: float | None = None
    gap_p99_ms: float | None = None
    step_ms: float | None = None
    agreement: float | None = None

    @property
    def key(self) -> tuple[object, ...]:
        size = (self.tokens, self.batch, self.in_flight, self.fronts or 1)
        return (self.load, self.model, *size, self.via, self.dtype, self.backend, self.new_tokens or 0)


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
    ordered = sorted(kept + new, key=lambda row: tuple(map(str, row.key[:2])) + row.key[2:])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(_line(row) for row in ordered), encoding="utf-8")


def _line(row: Row) -> str:
    """What a row does not have is left out."""
    return json.dumps({name: value for name, value in asdict(row).items() if value is not None}) + "\n"
