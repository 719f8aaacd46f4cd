"""Pictures of measured rows: latency against length with the floor line, and scoring against batch size; those of the
other loads are in plots_batch.py.

    python -m rose.bench.plots benchmarks/results/h200/loads.jsonl --out docs/images

Knows rows and the shapes' arithmetic; measures nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rose.bench.floors import floor_ms
from rose.bench.plots_batch import COLORS, WAYS, draw_batches, in_full
from rose.bench.records import Row, read_rows
from rose.bench.shapes import SHAPES

# Published p50 over gRPC and HTTP, ms: (name, tokens -> ms), by model.
PUBLISHED: Mapping[str, Sequence[tuple[str, Mapping[int, float]]]] = {
    "bge-m3": (("Tulip (published)", {128: 1.53, 4096: 9.57}), ("vLLM 0.22 (published)", {128: 4.60, 4096: 11.71})),
    "pplx-embed-0.6b": (
        ("Tulip (published)", {128: 1.88, 4096: 15.41}),
        ("vLLM 0.22 (published)", {128: 4.94, 4096: 16.15}),
    ),
}


def chosen(rows: Sequence[Row], model: str, load: str) -> list[Row]:
    """The rows of one model and load: for each size and way that of the backend which serving would choose."""
    served: dict[tuple[int, int, str], Row] = {}
    for row in sorted(rows, key=lambda row: ("--backend" in row.command, -row.n)):
        if row.model == model and row.load == load:
            served.setdefault((row.tokens, row.batch, row.via), row)
    return sorted(served.values(), key=lambda row: (row.tokens, row.batch))


def draw(rows: Sequence[Row], out: Path) -> list[Path]:
    """One picture a model of those in `rows`, of 8 bits left out: the floors are not theirs; returns the files."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    out.mkdir(parents=True, exist_ok=True)
    written = []
    rows = in_full(rows)
    for model in sorted({row.model for row in rows if row.model in SHAPES and row.load in ("latency", "scoring")}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
        _latency(left, chosen(rows, model, "latency"), model)
        _scoring(right, chosen(rows, model, "scoring"), model)
        own = next(row for row in rows if row.model == model)
        figure.suptitle(f"{model}: one request at a time, {own.dtype}, {own.machine.split(',')[0]}")
        path = out / f"latency_{model}.svg"
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
        written.append(path)
    return written


def _latency(axes: Any, rows: Sequence[Row], model: str) -> None:
    for via, label in WAYS.items():
        points = [(row.tokens, row.p50_ms, row.p99_ms) for row in rows if row.via == via]
        if points:
            tokens, p50, p99 = zip(*points, strict=True)
            axes.plot(tokens, p50, "o-", color=COLORS[via], label=f"{label}, p50 (band: to p99)")
            axes.fill_between(tokens, p50, p99, color=COLORS[via], alpha=0.15)
    for marker, (label, known) in zip("^s", PUBLISHED.get(model, ()), strict=False):
        axes.plot(list(known), list(known.values()), marker, color="black", mfc="none", label=f"{label}, p50")
    lengths = [128, 256, 512, 1024, 2048, 4096]
    floor = [floor_ms(SHAPES[model].config, n) for n in lengths]
    axes.plot(lengths, floor, "--", color="gray", label="floor of the chip")
    axes.set(xscale="log", yscale="log", xlabel="tokens of the sequence", ylabel="ms")
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.minorticks_off()
    axes.set_yticks([0.1, 0.2, 0.5, 1, 2, 5, 10, 20], ["0.1", "0.2", "0.5", "1", "2", "5", "10", "20"])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    axes.set_title("one sequence")


def _scoring(axes: Any, rows: Sequence[Row], model: str) -> None:
    for via in ("engine", "link"):
        points = [(row.batch, row.p50_ms) for row in rows if row.via == via]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=COLORS[via], label=f"{WAYS[via]}, p50")
    batches = [5, 25, 50]
    axes.plot(batches, [floor_ms(SHAPES[model].config, 512, n) for n in batches], "--", color="gray", label="floor")
    axes.set(xlabel="sequences of 512 tokens in one request", ylabel="ms", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    axes.set_title("scoring")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="JSONL of rose bench")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    rows = read_rows(arguments.rows)
    for path in (*draw(rows, arguments.out), *draw_batches(rows, arguments.out)):
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
