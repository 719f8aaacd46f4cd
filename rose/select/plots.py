"""Pictures of a profile: crossovers with the floor line, the saturation curve, launching against the device, padding.

Needs matplotlib. Knows profiles; measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rose.config.profile import AttentionGrid, ModelNumbers, Point, Profile

COLORS = {
    "triton_short": "#c2185b",
    "flash_attention4": "#1565c0",
    "flashinfer3": "#2e7d32",
    "flashinfer2": "#ef6c00",
    "torch_sdpa": "#757575",
    "triton_paged": "#c2185b",
    "flashinfer_paged": "#ef6c00",
    "torch_paged": "#757575",
}
# (sequences, tokens of each) -> least µs the device could take.
Floor = Callable[[int, int], float]


def draw(profile: Profile, out: Path, *, floor: Floor | None = None, formats: Sequence[str] = ("svg",)) -> list[Path]:
    """Every picture there are numbers for; returns the files."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "rose"  # the same numbers give the same file
    out.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for grid in profile.grids:
        figure = crossovers(grid, floor)
        if figure is not None:
            shape = grid.shape
            name = f"crossovers_{shape.num_heads}_{shape.num_kv_heads}x{shape.head_dim}_{shape.layout}"
            written += _save(figure, out / name, formats)
    for numbers in profile.models:
        for kind, figure in (
            ("saturation", saturation(numbers)),
            ("launch", launching(numbers)),
            ("padding", padding(numbers)),
            ("threads", threads(numbers)),
        ):
            if figure is not None:
                written += _save(figure, out / f"{kind}_{numbers.name.replace('/', '_')}", formats)
    return written


def crossovers(grid: AttentionGrid, floor: Floor | None) -> Any:
    """Time against length, a panel for each number of sequences and a line for each backend; None of too few points."""
    panels: dict[int, list[Point]] = {}
    for point in grid.points:
        if point.even:
            panels.setdefault(point.sequences, []).append(point)
    panels = {count: points for count, points in sorted(panels.items()) if points}
    if not panels:
        return None
    figure, axes = _figure(len(panels))
    for axis, (count, points) in zip(axes, panels.items(), strict=True):
        points.sort(key=_length)
        for name in sorted({name for point in points for name in point.us}):
            mine = [(_length(point), point.us[name]) for point in points if name in point.us]
            axis.plot(*zip(*mine, strict=True), marker="o", ms=3.5, lw=1.4, label=name, color=COLORS.get(name))
        if floor is not None and grid.shape.layout == "ragged":
            lengths = [_length(point) for point in points]
            least = [floor(count, length) for length in lengths]
            axis.plot(lengths, least, "k--", lw=1, label="floor")
        axis.set(xscale="log", yscale="log", title=f"{count} sequence{'s' if count > 1 else ''}", xlabel="tokens each")
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("µs of a batch, planning included", fontsize=8)
    axes[0].legend(fontsize=7)
    figure.suptitle(f"{grid.shape}; {grid.points[0].of}", fontsize=10)
    return figure


def saturation(numbers: ModelNumbers) -> Any:
    if not numbers.saturation:
        return None
    figure, (axis,) = _figure(1)
    tokens, rates = zip(*((t, t / us) for t, us in numbers.saturation), strict=True)
    axis.plot(tokens, rates, marker="o", color="#1565c0")
    for bound, name in ((numbers.online_tokens, "online"), (numbers.bulk_tokens, "bulk")):
        if bound is not None:
            axis.axvline(bound, ls="--", lw=1, color="#757575")
            axis.annotate(f"{name} {bound}", (bound, max(rates)), fontsize=8, rotation=90, va="top", ha="right")
    axis.set_xscale("log", base=2)
    axis.set(xlabel="tokens of a batch", ylabel="tokens per µs", ylim=(0, None), title=f"{numbers.name}: saturation")
    axis.grid(alpha=0.3)
    return figure


def launching(numbers: ModelNumbers) -> Any:
    if not numbers.launch:
        return None
    figure, (axis,) = _figure(1)
    tokens, launch, plain, graph = zip(*numbers.launch, strict=True)
    axis.plot(tokens, launch, marker="o", color="#ef6c00", label="CPU launches it")
    axis.plot(tokens, plain, marker="o", color="#757575", label="plain run")
    axis.plot(tokens, graph, marker="o", color="#1565c0", label="graph's replay")
    if numbers.inflection_tokens is not None:
        axis.axvline(numbers.inflection_tokens, ls="--", lw=1, color="#757575", label="graphs up to here")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set(xlabel="tokens of a batch", ylabel="µs", title=f"{numbers.name}: launching against the device")
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)
    return figure


def padding(numbers: ModelNumbers) -> Any:
    if not numbers.padding:
        return None
    figure, (axis,) = _figure(1)
    tokens, fine, coarse = zip(*numbers.padding, strict=True)
    saved = [100 * (1 - f / c) for f, c in zip(fine, coarse, strict=True)]
    axis.bar([f"{t + 1}–{t + 256}" for t in tokens], saved, color="#2e7d32")
    axis.set(ylabel="% saved by steps of 64", title=f"{numbers.name}: padding to 64 against 256")
    axis.tick_params(axis="x", rotation=45, labelsize=7)
    axis.grid(alpha=0.3, axis="y")
    return figure


def threads(numbers: ModelNumbers) -> Any:
    if not numbers.threads:
        return None
    figure, (axis,) = _figure(1)
    for dtype in dict.fromkeys(row[0] for row in numbers.threads):
        mine = sorted((count, us / 1e3) for kind, count, us in numbers.threads if kind == dtype)
        axis.plot(*zip(*mine, strict=True), marker="o", label=dtype)
    axis.set(xlabel="threads", ylabel="ms of a batch of 512 tokens", ylim=(0, None), title=f"{numbers.name}: threads")
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)
    return figure


def _length(point: Point) -> int:
    return point.tokens // point.sequences


def _figure(panels: int) -> tuple[Any, list[Any]]:
    import matplotlib.pyplot as plt

    columns = min(panels, 3)
    rows = -(-panels // columns)
    size = (6.0, 3.8) if panels == 1 else (3.6 * columns, 3.2 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for unused in axes.flat[panels:]:
        unused.remove()
    return figure, list(axes.flat[:panels])


def _save(figure: Any, path: Path, formats: Sequence[str]) -> list[Path]:
    import matplotlib.pyplot as plt

    written = []
    for kind in formats:
        file = path.with_name(f"{path.name}.{kind}")
        figure.savefig(file, metadata={"Date": None} if kind == "svg" else None)
        written.append(file)
    plt.close(figure)
    return written
