"""Choose the tiles of rose/kernels/tiles.json by measuring on this GPU.

    PYTHONPATH=. python benchmarks/kernels/tune_gemm.py --out DIR [--tokens 64 128] [--shapes bge pplx] [--seconds 240]
        [--missing]

Steps of generating: --tokens 16 32 --shapes qwen3-0.6b qwen3-8b qwen3.5-4b. Shapes in common are measured once. The
heads of language models ("logits") are among their products, and write fp32; the library serves those without a row.
Products of e4m3 codes under one scale a side: --dtype fp8; their rows of the table have names of their own.

Two rounds: a coarse list of tiles for every product, then the neighbours of the best. In each round worker processes
compile the candidates (into Triton's cache) and check them against the library on a batch with a tail, so that one that
is wrong is out and one that crashes takes only its worker along. Then this process times those that passed: 24 weights
(of heads as many as 8 GiB hold) in turn in one graph, each product beside the norm that is its neighbour in a model, so
that dependent launch, the L2 cache and the cost of reading pieces count as they will. The table is written after every
product of either round, and its times after the second; the library (null) gets a row where it is faster.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import os
import queue
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timing import Report, floor_us, graph_us, out_argument
from torch import Tensor

from rose.kernels import tiles
from rose.kernels.activation import activate_in_place, gated_activation
from rose.kernels.add_norm import add_rms_norm, rms_norm
from rose.kernels.add_norm_quantize import rms_norm_quantize
from rose.kernels.linear import run_tile
from rose.kernels.logits import logits_ref
from rose.kernels.quantize import quantize_static
from rose.kernels.scaled_mm import run_codes
from rose.kernels.tiles import Op, Tile, sm90_reason

DEVICE = "cuda"
LAYERS = 24
# What the weights of one product may take: all 24 of every layer so far (4.8 GB at most), of a head of 1.2 GB six. Each
# is read whole by the time its turn comes again, and the L2 cache holds 50 MB.
WEIGHT_BYTES = 8 << 30
# Of codes: of rows whose values are those of a norm, and of weights, both clamped beyond 4.5 sigma.
X_SCALE, W_SCALE = 4.5 / 448, 0.09 / 448


class Product(NamedTuple):
    op: Op
    n: int
    k: int
    activation: str | None = None
    bias: bool = False
    codes: bool = False

    @property
    def gated(self) -> bool:
        return self.op == "gated"

    @property
    def key(self) -> str:
        return tiles.key(self.op, self.n, self.k, codes=self.codes)

    @property
    def size(self) -> int:
        """Bytes a value."""
        return 1 if self.codes else 2

    @property
    def out_size(self) -> int:
        """Bytes a value of the answer, were it in one piece."""
        return 4 if self.op == "logits" else 2

    @property
    def in_turn(self) -> int:
        """Weights to time one after another; two at least."""
        made = tiles.halves(self.op) * self.n * self.k * self.size
        return min(LAYERS, max(2, WEIGHT_BYTES // made))


def _qwen3(hidden: int, qkv: int, heads: int, intermediate: int) -> list[Product]:
    """qkv: rows of the packed projection; heads: columns of the output projection."""
    return [
        Product("linear", qkv, hidden),
        Product("partial", hidden, heads),
        Product("gated", intermediate, hidden, "silu"),
        Product("partial", hidden, intermediate),
    ]


SHAPES: dict[str, list[Product]] = {
    "bge": [
        Product("linear", 3072, 1024, None, True),
        Product("partial", 1024, 1024),
        Product("linear", 4096, 1024, "gelu", True),
        Product("partial", 1024, 4096),
    ],
    # 16 query and 8 key heads of 128.
    "pplx": _qwen3(1024, 4096, 2048, 3072),
    "qwen3-0.6b": [*_qwen3(1024, 4096, 2048, 3072), Product("logits", 151936, 1024)],
    # 32 and 8 heads of 128: pplx-embed-4b, Qwen3-Embedding-4B, Qwen3-Reranker-4B.
    "pplx-4b": _qwen3(2560, 6144, 4096, 9728),
    "qwen3-embedding-4b": _qwen3(2560, 6144, 4096, 9728),
    "qwen3-8b": [*_qwen3(4096, 6144, 4096, 12288), Product("logits", 151936, 4096)],
    # 16 and 4 heads of 256, and a gate for each query head. A delta net's in_proj is q, k, v (8192), z (4096), b and a
    # (32 each); its output projection has the shape of the attention's.
    "qwen3.5-4b": [
        Product("linear", 8192 + 4096 + 2 * 32, 2560),
        *_qwen3(2560, 10240, 4096, 9216),
        Product("logits", 248320, 2560),
    ],
}


def coarse(p: Product, tokens: int) -> Iterator[Tile]:
    """About a wave of programs; pieces only where they are read anyway.

    Many tokens: big programs, two an SM where possible, so that one's epilogue runs under the other's products.
    """
    if tokens <= 32:
        yield from few(p)
        return
    if tokens > tiles.BUCKETS[-1]:
        for bm, bn, warps, stages in (
            (128, 128, 4, 3),
            (128, 128, 8, 3),
            (128, 64, 4, 3),
            (128, 256, 8, 3),
            (64, 128, 4, 4),
        ):
            yield Tile(bm, bn, 64, 1, warps, stages)
            yield Tile(bm, bn, 64, 1, warps, stages, "sm90", stages)
        return
    splits = (1, 2, 4, 8) if p.op == "partial" and tokens <= 512 else (1,)
    # A step of generating waits for weights' bytes: more waves of narrower programs may have more of them on their way.
    most = max(264, tokens * p.n // (64 * 64), p.n // 32 if tokens <= 64 else 0)
    shapes = ((32, 64), (64, 32), (64, 64), (128, 32), (64, 128), (128, 64), (128, 128))
    for split, (bm, bn) in itertools.product(splits, shapes):
        programs = -(-tokens // bm) * (p.n // bn) * split
        if bm > max(64, tokens) or not 60 <= programs <= most:
            continue
        warps = 8 if bm == 128 else 4
        yield Tile(bm, bn, 64, split, 8 if bm * bn >= 128 * 128 else 4, 4)
        yield Tile(bm, bn, 128, split, 8 if bm * bn >= 128 * 128 else 4, 3)
        yield Tile(bm, bn, 128, split, warps, 4, "sm90")
        yield Tile(bm, bn, 64, split, warps, 4, "sm90", 6)


def few(p: Product) -> Iterator[Tile]:
    """A step of generating: what counts is how many bytes of weights are on their way, and how early."""
    splits = (1, 2, 4, 8) if p.op == "partial" else (1,)
    for split, bn in itertools.product(splits, (16, 32, 64, 128)):
        if p.n // bn * split < 60 or p.n // bn * split > max(528, p.n // 32):
            continue
        for bk, stages, kind in ((64, 6, "plain"), (128, 4, "plain"), (256, 3, "plain"), (128, 4, "prefetch")):
            yield Tile(16, bn, bk, split, 4, stages, kind)
        for bk, ahead in ((128, 0), (128, 4), (64, 6), (256, 2)):
            yield Tile(64, bn, bk, split, 4, 4, "sm90", ahead)


def near(p: Product, tokens: int, tile: Tile) -> Iterator[Tile]:
    """One thing changed at a time, and the two that go together."""
    change = dataclasses.replace
    for stages in (2, 3, 4, 5, 6, 8):
        yield change(tile, stages=stages)
    yield change(tile, bk=other_bk(p, tile))
    yield change(tile, warps=12 - tile.warps)
    if p.op == "partial" and tokens <= 512:
        for split in {max(1, tile.split - 1), tile.split + 1, tile.split + 2} - {tile.split}:
            yield change(tile, split=split)
    if tokens > tiles.BUCKETS[-1]:
        if tile.kind == "sm90":
            for depth in (2, 3, 4, 5):
                yield change(tile, stages=depth, ahead=depth)
        return
    if tile.kind == "sm90":
        yield change(tile, late_launch=True)
        for ahead in (0, 2, 3, 4, 6):
            yield change(tile, ahead=ahead)
            yield change(tile, ahead=ahead, late_launch=True)
    else:
        yield change(tile, kind="prefetch")
        yield change(tile, bk=other_bk(p, tile), kind="prefetch")


def other_bk(p: Product, tile: Tile) -> int:
    if p.codes:
        return {128: 256, 256: 128}.get(tile.bk, 256)
    return {64: 128, 128: 64}.get(tile.bk, 128)


def deeper(p: Product, found: Iterable[Tile]) -> Iterator[Tile]:
    """Of codes as many bytes a step, and half of them, for tiles of which that is not known."""
    for tile in found:
        if p.codes:
            yield dataclasses.replace(tile, bk=2 * tile.bk)
        if not p.codes or tile.bk >= 128:
            yield tile


def possible(p: Product, found: Iterable[Tile]) -> list[Tile]:
    """Those that can be launched, each once."""
    halves = 2 if p.gated else 1
    kept: dict[Tile, None] = {}
    for tile in found:
        if p.codes and tile.kind == "prefetch":
            continue
        if tile.kind == "sm90":
            fits = tile.bm >= 64 and sm90_reason(tile, p.n, p.k, gated=p.gated, size=p.size) is None
        else:
            fits = tile.stages * (tile.bm + halves * tile.bn) * tile.bk * p.size <= 220 * 1024
        if fits and p.k % (tile.bk * tile.split) == 0 and p.n % tile.bn == 0:
            kept[tile] = None
    return list(kept)


def weights(p: Product, count: int) -> list[Tensor]:
    shape = (p.n * (2 if p.gated else 1), p.k)
    # In place, and never in fp32: processes side by side hold a head of 1.2 GB each.
    plain = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).mul_(0.02) for _ in range(count)]
    return [quantize_static(w, scale(W_SCALE)) for w in plain] if p.codes else plain


@cache
def scale(value: float) -> Tensor:
    return torch.tensor([value], device=DEVICE)


def library(p: Product, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    if p.codes:
        y = torch._scaled_mm(x, w.t(), scale(X_SCALE), scale(W_SCALE), bias=bias, out_dtype=torch.bfloat16)
    elif p.op == "logits":
        return torch.mm(x, w.t(), out_dtype=torch.float32)
    else:
        y = F.linear(x, w, bias)
    if p.gated:
        return gated_activation(y, p.activation or "silu")
    return y.unsqueeze(0) if p.op == "partial" else activate_in_place(y, p.activation)


def product(p: Product, x: Tensor, w: Tensor, bias: Tensor | None, tile: Tile | None) -> Tensor:
    if tile is None:
        return library(p, x, w, bias)
    pieces = p.op == "partial"
    if p.codes:
        scaled = x, scale(X_SCALE), w, scale(W_SCALE)
        return run_codes(*scaled, bias, p.activation, torch.bfloat16, tile, pieces=pieces, gated=p.gated)
    dtype = torch.float32 if p.op == "logits" else None
    return run_tile(x, w, bias, p.activation, tile, pieces=pieces, gated=p.gated, dtype=dtype)


# -- 1. compile and check, in processes of their own


def check(p: Product, tile: Tile) -> str | None:
    """None if the tile is right on a batch with a tail, else what is wrong."""
    torch.manual_seed(0)
    x = torch.randn(200, p.k, device=DEVICE).to(torch.bfloat16)
    x = quantize_static(x, scale(X_SCALE)) if p.codes else x
    w = weights(p, 1)[0]
    bias = torch.randn(p.n, device=DEVICE).to(torch.bfloat16) if p.bias else None
    out = product(p, x, w, bias, tile)
    torch.cuda.synchronize()
    ref = logits_ref(x, w)  # fp32, some rows of the weight at a time
    if p.codes:
        ref *= X_SCALE * W_SCALE
    if bias is not None:
        ref += bias.float()
    if p.gated:
        ref = gated_activation(ref, p.activation or "silu")
    elif p.op == "partial":
        out = out.float().sum(0)
    else:
        ref = activate_in_place(ref, p.activation)
    error = float((out.float() - ref).norm() / ref.norm())
    return None if error < 6e-3 else f"relative error {error:.2e}"


def worker(tasks: multiprocessing.Queue, results: multiprocessing.Queue) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    while (task := tasks.get()) is not None:
        p, tile = task
        try:
            results.put((p, tile, check(p, tile)))
        except Exception as error:
            results.put((p, tile, f"{type(error).__name__}: {error}"[:300]))
            if "CUDA error" in str(error) or "illegal" in str(error):  # this process's context is lost
                return


class Checkers:
    """Processes that compile and check candidates. All of them are idle, or gone, whenever this one times."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.context = multiprocessing.get_context("spawn")
        self.known: dict[tuple[Product, Tile], bool] = {}
        self.start()

    def start(self) -> None:
        """A lost one is not replaced."""
        self.tasks, self.results = self.context.Queue(), self.context.Queue()
        self.processes = [
            self.context.Process(target=worker, args=(self.tasks, self.results), daemon=True) for _ in range(self.count)
        ]
        for process in self.processes:
            process.start()

    def passed(self, wanted: Iterable[tuple[Product, Tile]], deadline: float) -> None:
        """Check what is not known yet; what the deadline leaves unchecked counts as out."""
        new = [task for task in dict.fromkeys(wanted) if task not in self.known]
        for task in new:
            self.tasks.put(task)
        done = bad = 0
        while done < len(new) and time.perf_counter() < deadline:
            try:
                p, tile, reason = self.results.get(timeout=1)
            except queue.Empty:
                if not any(process.is_alive() for process in self.processes):
                    break
                continue
            done += 1
            self.known[p, tile] = reason is None
            if reason is not None:
                bad += 1
                if bad <= 8:
                    print("  out:", tuple(p), tile, reason, flush=True)
        print(f"checked {done} of {len(new)} candidates, {bad} out", flush=True)
        if done < len(new):
            # They would go on compiling, or hang, on the device that is timed next.
            self.stop()
            self.start()

    def good(self, p: Product, found: list[Tile]) -> list[Tile]:
        return [tile for tile in found if self.known.get((p, tile), False)]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


# -- 2. time


def chain(p: Product, tokens: int, tile: Tile | None, ws: list[Tensor]) -> Callable[[], None]:
    """All weights in turn, each product beside its neighbouring norm."""
    torch.manual_seed(1)
    x = torch.randn(tokens, p.k, device=DEVICE).to(torch.bfloat16)
    gain = torch.ones(p.k, device=DEVICE, dtype=torch.bfloat16)
    residual = torch.randn(tokens, p.n, device=DEVICE).to(torch.bfloat16)
    out_gain = torch.ones(p.n, device=DEVICE, dtype=torch.bfloat16)
    bias = torch.randn(p.n, device=DEVICE).to(torch.bfloat16) if p.bias else None
    made = quantize_static(x, scale(X_SCALE)) if p.codes else x

    def norm() -> Tensor:
        return rms_norm_quantize(x, gain, 1e-6, scale(X_SCALE)) if p.codes else rms_norm(x, gain, 1e-6)

    def run() -> None:
        for w in ws:
            if p.op == "partial":
                add_rms_norm(product(p, made, w, None, tile), residual, out_gain, 1e-6)
            else:
                product(p, norm(), w, bias, tile)

    return run


Timed = dict[Tile | None, float]


def measure(p: Product, tokens: int, found: Iterable[Tile | None], ws: list[Tensor], repeats: int = 8) -> Timed:
    times: Timed = {}
    for tile in found:
        try:
            some = ws[:4] if tokens > tiles.BUCKETS[-1] else ws
            times[tile] = graph_us(chain(p, tokens, tile, some), repeats) / len(some)
        except Exception as error:
            print("  failed:", tile, error, flush=True)
    return times


def best_of(times: Timed, count: int) -> list[Tile | None]:
    return sorted(times, key=lambda tile: times[tile])[:count]


def conclude(report: Report, p: Product, tokens: int, times: Timed, ws: list[Tensor]) -> Tile | None:
    """Time the best again, longer, and report."""
    finals = measure(p, tokens, {*best_of(times, 5), None}, ws, 40)
    order = best_of(finals, 4)
    factor = 2 if p.gated else 1
    report.row(
        product=p.key,
        tokens=tokens,
        us_with_norm=finals[order[0]],
        library_us_with_norm=finals[None],
        floor_us=floor_us(
            p.size * (factor * p.n * p.k + tokens * p.k) + p.out_size * tokens * p.n,
            p.size * tokens * p.k * p.n * factor,
        ),
        best=[(round(finals[t], 2), None if t is None else as_row(t)) for t in order],
        best_of_kind={
            kind: round(min((us for t, us in times.items() if t is not None and t.kind == kind), default=-1.0), 2)
            for kind in ("plain", "prefetch", "sm90")
        },
    )
    return order[0]


# -- 3. write


def as_row(tile: Tile) -> dict[str, object]:
    defaults = {f.name: f.default for f in dataclasses.fields(Tile)}
    return {name: value for name, value in dataclasses.asdict(tile).items() if value != defaults[name]}


def without(name: str, bucket: str) -> str | None:
    """What the table says where it has no tile."""
    return "epilogue" if (name, bucket) in tiles.epilogues() else None


def write(path: Path, table: dict[str, dict[str, Tile | None]]) -> None:
    """One line a bucket, so that a change reads well."""
    products = []
    for name in sorted(table):
        rows = [
            f'  "{b}": {json.dumps(without(name, b) if t is None else as_row(t))}'
            for b, t in sorted(table[name].items(), key=lambda item: (len(item[0]), item[0]))
        ]
        products.append(f' "{name}": {{\n' + ",\n".join(rows) + "\n }")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(products) + "\n}\n")


def main() -> None:
    parser = out_argument("tiles.json and tune_gemm.json")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512, 64, 256, 192, 1024])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["bge", "pplx"])
    parser.add_argument("--seconds", type=float, default=240, help="stop choosing after this long")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--dtype", choices=["bf16", "fp8"], default="bf16")
    parser.add_argument("--missing", action="store_true", help="only what has no row of its own in the table")
    args = parser.parse_args()
    began = time.perf_counter()
    by_key: dict[str, Product] = {}
    for p in (p for name in args.shapes for p in SHAPES[name]):
        if p.op == "logits" and args.dtype == "fp8":  # heads stay as they are when layers are quantised
            continue
        p = p._replace(codes=args.dtype == "fp8")
        by_key.setdefault(p.key, p)
    table = {name: dict(rows) for name, rows in tiles._table().items()}
    plan = [
        (p, m)
        for m in args.tokens
        for p in by_key.values()
        if not args.missing or tiles.bucket(m) not in table.get(p.key, {})
    ]
    checkers = Checkers(args.workers)
    report = Report(args.out / "tune_gemm.json")
    ws = {p: weights(p, p.in_turn) for p, _ in plan}
    times: dict[tuple[Product, int], Timed] = {}

    lists = {(p, m): possible(p, deeper(p, coarse(p, m))) for p, m in plan}
    checkers.passed(((p, tile) for (p, _), found in lists.items() for tile in found), began + 0.4 * args.seconds)
    print(f"coarse list compiled after {time.perf_counter() - began:.0f} s", flush=True)
    for p, m in plan:
        times[p, m] = measure(p, m, [None, *checkers.good(p, lists[p, m])], ws[p])
        for best in best_of(times[p, m], 1):
            table.setdefault(p.key, {})[tiles.bucket(m)] = best
        write(args.out / "tiles.json", table)
    print(f"and timed after {time.perf_counter() - began:.0f} s", flush=True)

    for p, m in plan:
        seeds = [tile for tile in best_of(times[p, m], 3) if tile is not None]
        lists[p, m] = [t for t in possible(p, (n for seed in seeds for n in near(p, m, seed))) if t not in times[p, m]]
    checkers.passed(((p, tile) for (p, _), found in lists.items() for tile in found), began + 0.75 * args.seconds)
    checkers.stop()
    print(f"neighbours compiled after {time.perf_counter() - began:.0f} s", flush=True)
    for p, m in plan:
        if time.perf_counter() - began < args.seconds:
            times[p, m] |= measure(p, m, checkers.good(p, lists[p, m]), ws[p])
        try:
            table.setdefault(p.key, {})[tiles.bucket(m)] = conclude(report, p, m, times[p, m], ws[p])
        except Exception as error:  # what was best of its first round stays
            print("  failed:", p.key, m, f"{type(error).__name__}: {error}"[:300], flush=True)
        write(args.out / "tiles.json", table)
    print(f"done after {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
