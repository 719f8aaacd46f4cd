"""Settle tiles and attention blocks inside whole encoders: one choice changed at a time, kept if it makes them faster.

    PYTHONPATH=. python benchmarks/kernels/tune_in_model.py --out DIR --candidates tune_gemm.json [--tokens 128 512]

A product's best tile by itself is not always the best between its neighbours, with which it shares the chip under
dependent launch. Starts from the committed table; candidates are what tune_gemm.py found best. Writes the table and
every trial.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from pathlib import Path

import torch
from encoder_probe import Bge, Pplx, products
from timing import Report, capture, out_argument, replay_us

from rose.kernels import add_norm, short_attention, tiles
from rose.kernels.tiles import Tile

ATTENTION = [
    (bm, bn, warps)
    for bm, bn, warps in itertools.product((16, 32, 64, 128), (64, 128, 256), (4, 8))
    if bm * bn <= 128 * 128 and not (bm == 16 and warps == 8)
]


class Trials:
    """The encoder's time under the choices in force."""

    def __init__(self, probe: Bge | Pplx, report: Report) -> None:
        self.probe = probe
        self.report = report
        self.best = self.time("start")

    def time(self, what: str) -> float:
        try:
            graph, out = capture(self.probe.forward)
            us = replay_us(graph)
            if not bool(torch.isfinite(out).all()):
                us = float("inf")
        except Exception as error:
            print(f"  {what}: {type(error).__name__}: {str(error)[:100]}", flush=True)
            us = float("inf")
        self.report.row(model=self.probe.name, tokens=self.probe.T, trial=what, us=us)
        return us

    def keep(self, what: str) -> bool:
        """Whether the choice just made is faster by more than noise (0.3 %)."""
        us = self.time(what)
        if us < 0.997 * self.best:
            self.best = us
            return True
        return False


def settle_attention(trials: Trials, blocks: dict[str, tuple[int, int, int]]) -> None:
    probe = trials.probe
    head_dim = 64 if isinstance(probe, Bge) else 128
    original = short_attention.block
    chosen = original(probe.T, head_dim, probe.T)
    for candidate in ATTENTION:
        if candidate == chosen or candidate[1] * head_dim > 32768 or candidate[1] > max(64, 2 * probe.T):
            continue
        short_attention.block = lambda *_, c=candidate: c
        if trials.keep(f"attention {candidate}"):
            chosen = candidate
    short_attention.block = lambda *_: chosen
    blocks[f"{head_dim}:{probe.T}"] = chosen


def settle_norms(trials: Trials) -> None:
    original = add_norm.row_warps
    for warps in (1, 2, 4, 8):
        add_norm.row_warps = lambda width, w=warps: w
        if trials.keep(f"norm warps {warps}"):
            original = add_norm.row_warps
    add_norm.row_warps = original


def settle_tiles(trials: Trials, candidates: dict[tuple[str, int], list[Tile]]) -> None:
    table, tokens = tiles._table(), str(tiles.bucket(trials.probe.T))
    for op, n, k in products(trials.probe):
        name = tiles.key(op, n, k)
        found = candidates.get((name, trials.probe.T), [])
        current = tiles.choose(op, n, k, trials.probe.T)
        more = [dataclasses.replace(t, late_launch=not t.late_launch) for t in found[:1] if t.kind == "sm90"]
        for tile in [*found, *more]:
            if tile == current:
                continue
            kept = table.setdefault(name, {}).get(tokens)
            table[name][tokens] = tile
            tiles.choose.cache_clear()
            if not trials.keep(f"{name} {tile}"):
                table[name][tokens] = kept if kept is not None else current
                tiles.choose.cache_clear()


def read_candidates(path: Path) -> dict[tuple[str, int], list[Tile]]:
    rows = json.loads(path.read_text())["rows"]
    return {
        (row["product"], row["tokens"]): [Tile(**tile) for _, tile in row["best"] if tile is not None]
        for row in rows
        if "best" in row
    }


def main() -> None:
    parser = out_argument("tune_in_model.json")
    parser.add_argument("--candidates", type=Path, help="tune_gemm.json; without it only attention and norms are tried")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--seconds", type=float, default=150)
    args = parser.parse_args()
    begin = time.perf_counter()
    torch.manual_seed(0)
    candidates = read_candidates(args.candidates) if args.candidates else {}
    report = Report(args.out / "tune_in_model.json")
    blocks: dict[str, tuple[int, int, int]] = {}
    original = short_attention.block
    for tokens, kind in itertools.product(args.tokens, (Bge, Pplx)):
        if time.perf_counter() - begin > args.seconds:
            break
        short_attention.block = original
        trials = Trials(kind(tokens), report)
        print(f"-- {kind.name} {tokens}: {trials.best:.1f} us", flush=True)
        settle_tiles(trials, candidates)
        print(f"   tiles settled: {trials.best:.1f} us", flush=True)
        settle_attention(trials, blocks)
        print(f"   attention settled: {trials.best:.1f} us, {blocks}", flush=True)
        settle_norms(trials)
        print(f"   norms settled: {trials.best:.1f} us after {time.perf_counter() - begin:.0f} s", flush=True)
        table = {
            name: {b: tile and dataclasses.asdict(tile) for b, tile in rows.items()}
            for name, rows in tiles._table().items()
        }
        (args.out / "tiles_in_model.json").write_text(json.dumps(table, indent=1))
        (args.out / "attention_blocks.json").write_text(json.dumps(blocks, indent=1))


if __name__ == "__main__":
    main()
