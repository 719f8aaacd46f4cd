"""Pictures of the loads with several requests at a time: throughput, latency against requests in flight, decoding.

Knows rows, shapes and published numbers; measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rose.bench.floors import decode_floor_ms, floor_ms
from rose.bench.llm_shapes import LLM_SHAPES
from rose.bench.quantised_shapes import SCHEME_OF
from rose.bench.records import Row
from rose.bench.shapes import SHAPES

WAYS = {"engine": "in process", "link": "light link", "grpc": "gRPC", "http": "HTTP"}
COLORS = {"engine": "#1b6ca8", "link": "#2a9d5c", "grpc": "#e07a1f", "http": "#b5314c"}
# Published sequences a second by tokens, batches of 100 from four clients: (name, tokens -> rate), by model.
PUBLISHED: Mapping[str, Sequence[tuple[str, Mapping[int, float]]]] = {
    "bge-m3": (("Tulip (published)", {512: 1499.3}), ("vLLM 0.22 (published)", {512: 1342.2})),
    "pplx-embed-0.6b": (
        ("Tulip (published)", {512: 926.7, 1024: 422.8, 4096: 72.2}),
        ("vLLM 0.22 (published)", {512: 902.3, 1024: 423.3, 4096: 73.5}),
    ),
}
# Milliseconds a token, prompts of 128 tokens, by prompts at a time; measured on an H200 beside ours.
RIVAL_DECODE: Mapping[str, Mapping[int, float]] = {
    "qwen3-0.6b": {1: 1.60, 8: 1.63, 64: 2.29},
    "qwen3-8b": {1: 5.09, 8: 5.16, 64: 6.10},
}


def in_full(rows: Sequence[Row]) -> list[Row]:
    """Those that are not of 8 bits, which lie on a floor of their own."""
    return [row for row in rows if row.dtype not in SCHEME_OF]


def draw_batches(rows: Sequence[Row], out: Path) -> list[Path]:
    """One picture a model and kind of load, of 8 bits left out; returns the files."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    out.mkdir(parents=True, exist_ok=True)
    written = []
    rows = in_full(rows)
    for kind, axes_of, shapes in (
        ("throughput", _throughput, SHAPES),
        ("concurrency", _concurrency, SHAPES),
        ("decode", _decode, LLM_SHAPES),
    ):
        for model in sorted({row.model for row in rows if row.load.startswith(kind) and row.model in shapes}):
            own = [row for row in rows if row.model == model and row.load.startswith(kind)]
            figure, axes = plt.subplots(figsize=(6, 4.2), layout="constrained")
            axes_of(axes, own, model)
            axes.grid(alpha=0.3)
            axes.legend(fontsize=7)
            figure.suptitle(f"{model}: {own[0].dtype}, {own[0].machine.split(',')[0]}")
            path = out / f"{kind}_{model}.svg"
            figure.savefig(path, metadata={"Date": None})
            plt.close(figure)
            written.append(path)
    return written


def _throughput(axes: Any, rows: Sequence[Row], model: str) -> None:
    """Bars of sequences a second under a line for the floor; as shares of it, since rates span a decade."""
    tokens = sorted({row.tokens for row in rows})
    ways = [via for via in WAYS if any(row.via == via for row in rows)]
    known = PUBLISHED.get(model, ())
    width = 0.8 / (len(ways) + len(known))
    batch = rows[0].batch
    for place, n in enumerate(tokens):
        most = 1e3 * batch / floor_ms(SHAPES[model].config, n, batch)
        axes.plot([place - 0.42, place + 0.42], [1, 1], "--", color="gray", label=_once("floor of the chip", place))
        axes.annotate(f"{most:.0f} /s", (place, 1.01), ha="center", fontsize=7, color="gray")
        bars = [(WAYS[via], COLORS[via], _rate(rows, n, via)) for via in ways]
        bars += [(name, gray, rates.get(n)) for (name, rates), gray in zip(known, ("#777777", "#aaaaaa"), strict=False)]
        for number, (name, color, rate) in enumerate(bars):
            at = place - 0.4 + width * (number + 0.5)
            axes.bar(at, (rate or 0) / most, width * 0.9, color=color, label=_once(name, place))
            if rate:
                axes.annotate(f"{rate:.0f}", (at, rate / most), ha="center", va="bottom", fontsize=6)
    axes.set_xticks(range(len(tokens)), [f"{batch} × {n}" for n in tokens])
    axes.set(ylabel="sequences a second, share of the floor's", ylim=(0, 1.4))
    axes.set_title("batches from several clients at once")


def _concurrency(axes: Any, rows: Sequence[Row], model: str) -> None:
    counts = sorted({row.fronts or 1 for row in rows})
    for place, fronts in enumerate(counts, 1):
        own = sorted((row for row in rows if (row.fronts or 1) == fronts), key=lambda row: row.in_flight)
        color = (COLORS["http"], place / len(counts))  # the most fronts in full
        for name, style in (("p50", "o-"), ("p90", "s--"), ("p99", "^:")):
            numbers = [getattr(row, f"{name}_ms") for row in own]
            label = name + (f", {fronts} fronts" if fronts > 1 else "")
            axes.plot([row.in_flight for row in own], numbers, style, color=color, label=label)
    at = sorted({row.in_flight for row in rows})
    tokens = rows[0].tokens
    floor = [floor_ms(SHAPES[model].config, tokens, n) for n in at]
    axes.plot(at, floor, "--", color="gray", label="floor of the chip, all of them in one batch")
    axes.set(xscale="log", xlabel=f"texts of {tokens} tokens in flight, over HTTP", ylabel="ms", ylim=(0, None))
    axes.set_xticks(at, [str(n) for n in at])
    axes.minorticks_off()
    axes.set_title("latency against requests in flight")


def _decode(axes: Any, rows: Sequence[Row], model: str) -> None:
    prompts = sorted({row.tokens for row in rows})
    for prompt, style in zip(prompts, ("o-", "s--", "^:", "d-."), strict=False):
        for via in WAYS:
            own = sorted((row for row in rows if row.via == via and row.tokens == prompt), key=lambda r: r.in_flight)
            points = [(row.in_flight, row.step_ms or row.tpot_ms) for row in own]
            if points:
                axes.plot(
                    *zip(*points, strict=True), style, color=COLORS[via], label=f"{WAYS[via]}, prompts of {prompt}"
                )
    at = sorted({row.in_flight for row in rows})
    for prompt in prompts:
        length = prompt + (rows[0].new_tokens or 0) // 2
        floor = [decode_floor_ms(LLM_SHAPES[model].config, n, length) for n in at]
        axes.plot(at, floor, "--", color="gray", alpha=0.5 + 0.5 * (prompt == prompts[0]), label=f"floor, {prompt}")
    rival = RIVAL_DECODE.get(model)
    if rival:
        axes.plot(list(rival), list(rival.values()), "s", color="black", mfc="none", label="vLLM 0.22, prompts of 128")
    axes.set(xscale="log", xlabel="prompts at a time", ylabel="ms a token", ylim=(0, None))
    axes.set_xticks(at, [str(n) for n in at])
    axes.minorticks_off()
    axes.set_title("decoding")


def _rate(rows: Sequence[Row], tokens: int, via: str) -> float | None:
    return next((row.per_s for row in rows if row.tokens == tokens and row.via == via), None)


def _once(label: str, place: int) -> str | None:
    """A legend wants each name once."""
    return label if place == 0 else None
