"""Kernels of generating against their floors and rivals, inside CUDA graphs; one row a case, JSON under --out.

    PYTHONPATH=. python benchmarks/kernels/decode.py --out DIR [--only decode prefill sample head] [--sweep]

A case runs once a layer in a graph, over another cache or other logits each time, and is given per call, launch
included. Floors are bytes over 4.21 TB/s or operations over 784 TFLOP/s. Rivals: torch's attention over keys that lie
in one piece, torch.argmax, softmax and multinomial, cuBLAS.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from timing import Report, floor_us, graph_us, out_argument
from torch import Tensor

from rose.batch import HeadRotation
from rose.kernels import paged_decode as decode_module
from rose.kernels import paged_prefill as prefill_module
from rose.kernels.gemm import gemm
from rose.kernels.linear import run_tile
from rose.kernels.logits import logits as library_logits
from rose.kernels.paged_attention import paged_decode, paged_prefill
from rose.kernels.paged_decode import DecodeTile, decode_tile
from rose.kernels.paged_prefill import PrefillTile
from rose.kernels.qk_norm_rope import qk_norm_rope, rope_table
from rose.kernels.sample import greedy, sample
from rose.kernels.store_kv import store_kv
from rose.kernels.tiles import Tile, heuristic, sm90_reason

LAYERS = 16
PAGE = 16
DTYPE = torch.bfloat16
# (query heads, key/value heads, head dim): Qwen3-0.6B, Qwen3-8B, Qwen3.5-4B.
HEADS = {"0.6b": (16, 8, 128), "8b": (32, 8, 128), "3.5-4b": (16, 4, 256)}


def per_call(run: Callable[[int], object], calls: int = LAYERS) -> float:
    return graph_us(lambda: [run(i) for i in range(calls)], 20) / calls


def timed(row: dict[str, object], name: str, run: Callable[[int], object], calls: int = LAYERS) -> None:
    try:
        row[name] = per_call(run, calls)
    except Exception as error:
        row[f"{name}_error"] = f"{type(error).__name__}: {error}"[:200]


class Cache:
    """Sequences of one length in scattered pages, a cache a layer, as many layers as fit 24 GB."""

    def __init__(self, sequences: int, length: int, heads: tuple[int, int, int]) -> None:
        self.H, self.G, self.D = heads
        pages = -(-length // PAGE)
        count = sequences * pages + 1
        self.layers = max(1, min(LAYERS, int(24e9 / (4 * count * PAGE * self.G * self.D))))
        shape = (count, PAGE, self.G, self.D)
        self.pairs = [tuple(torch.randn(shape, device="cuda").to(DTYPE) for _ in range(2)) for _ in range(self.layers)]
        self.table = (1 + torch.randperm(count - 1, device="cuda")).int().view(sequences, pages)
        self.lengths = torch.full((sequences,), length, dtype=torch.int32, device="cuda")
        last = (length - 1) % PAGE
        self.slots = (self.table[:, -1] * PAGE + last).int().contiguous()
        self.positions = self.lengths - 1

    def packed(self, tokens: int) -> Tensor:
        return torch.randn(tokens, (self.H + 2 * self.G) * self.D, device="cuda").to(DTYPE)

    def heads_of(self, qkv: Tensor) -> tuple[Tensor, ...]:
        return qkv.view(qkv.shape[0], -1, self.D).split([self.H, self.G, self.G], dim=1)


def decode_case(report: Report, name: str, B: int, length: int, sweep: bool) -> None:
    cache = Cache(B, length, HEADS[name])
    H, G, D = HEADS[name]
    bound = next(b for b in (1024, 4096, 16384, 65536) if b >= length)
    gain, table = torch.ones(D, device="cuda", dtype=DTYPE), rope_table(bound, D, 1e6, "cuda")
    qkv, scale = cache.packed(B), D**-0.5
    rotation = HeadRotation(cache.positions, table, gain, gain, 1e-6)
    where = cache.table, cache.lengths, cache.slots, bound, scale

    def fused(i: int) -> Tensor:
        return paged_decode(*cache.heads_of(qkv), *cache.pairs[i % cache.layers], *where, None, rotation)

    def separate(i: int) -> Tensor:
        pair = cache.pairs[i % cache.layers]
        qk_norm_rope(qkv, cache.positions, table, gain, gain, 1e-6, H, G)
        q, k, v = cache.heads_of(qkv)
        store_kv(k, v, *pair, cache.slots)
        return paged_decode(q, k, v, *pair, *where)

    flat = [torch.randn(B, G, length, D, device="cuda").to(DTYPE) for _ in range(2)]

    def rival(i: int) -> Tensor:
        q = cache.heads_of(qkv)[0].unsqueeze(2)
        return F.scaled_dot_product_attention(q, *flat, enable_gqa=True)

    moved = 2 * B * length * G * D * 2
    row: dict[str, object] = {"op": "paged_decode", "shape": f"{name} {B}x{length}", "floor_us": floor_us(moved, 0)}
    row["splits"] = decode_tile(B, G, D, bound).splits
    timed(row, "us", fused)
    timed(row, "separate_us", separate)
    timed(row, "rival_us", rival)
    report.row(**row)
    if sweep:
        decode_sweep(report, str(row["shape"]), B, G, bound, fused)


def decode_sweep(report: Report, shape: str, B: int, G: int, bound: int, run: Callable[[int], object]) -> None:
    chosen, times = decode_module.decode_tile, {}
    most = max(1, min(64, 1056 // (B * G)))
    splits = sorted({1, most, *(s for s in (2, 4, 8, 16, 32) if s <= most)})
    for bn, count, warps, stages in itertools.product((16, 32, 64, 128), splits, (2, 4, 8), (3, 5)):
        tile = DecodeTile(bn, count, warps, stages)
        decode_module.decode_tile = lambda *_, tile=tile: tile
        try:
            times[f"{bn} /{count} w{warps} s{stages}"] = round(per_call(run), 2)
        except Exception as error:
            print("  failed:", tile, str(error)[:120], flush=True)
        finally:
            decode_module.decode_tile = chosen
    report.row(op="paged_decode tiles", shape=shape, best=sorted(times.items(), key=lambda item: item[1])[:8])


def decodes(report: Report, sweep: bool) -> None:
    cases = (
        (1, 128),
        (1, 256),
        (1, 1024),
        (1, 4096),
        (1, 32768),
        (8, 256),
        (8, 4096),
        (64, 256),
        (64, 1024),
        (64, 4096),
    )
    for name, (B, length) in itertools.product(HEADS, cases):
        decode_case(report, name, B, length, sweep and length in (256, 4096))


def prefill_case(report: Report, name: str, B: int, chunk: int, length: int, sweep: bool) -> None:
    cache = Cache(B, length, HEADS[name])
    H, G, D = HEADS[name]
    q = cache.heads_of(cache.packed(B * chunk))[0]
    cu = torch.arange(B + 1, dtype=torch.int32, device="cuda") * chunk

    def ours(i: int) -> Tensor:
        return paged_prefill(q, *cache.pairs[i % cache.layers], cache.table, cache.lengths, cu, 0, D**-0.5)

    flat = [torch.randn(B, G, length, D, device="cuda").to(DTYPE) for _ in range(2)]

    def rival(i: int) -> Tensor:
        queries = q.view(B, chunk, H, D).transpose(1, 2)
        return F.scaled_dot_product_attention(queries, *flat, is_causal=chunk == length, enable_gqa=True)

    pairs = B * (chunk * (length - chunk) + chunk * chunk / 2)
    floor = floor_us(2 * B * length * G * D * 2, 4 * H * D * pairs)
    row: dict[str, object] = {"op": "paged_prefill", "shape": f"{name} {B}x{chunk} of {length}", "floor_us": floor}
    timed(row, "us", ours)
    timed(row, "rival_us", rival)
    report.row(**row)
    if not sweep:
        return
    chosen, times = prefill_module.prefill_tile, {}
    for bm, bn, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
        tile = PrefillTile(bm, bn, warps, stages)
        prefill_module.prefill_tile = lambda *_, tile=tile: tile
        try:
            times[f"{bm}x{bn} w{warps} s{stages}"] = round(per_call(ours), 1)
        except Exception as error:
            print("  failed:", tile, str(error)[:120], flush=True)
        finally:
            prefill_module.prefill_tile = chosen
    report.row(op="paged_prefill tiles", shape=row["shape"], best=sorted(times.items(), key=lambda item: item[1])[:6])


def prefills(report: Report, sweep: bool) -> None:
    for name, case in itertools.product(HEADS, ((1, 128, 128), (1, 512, 512), (1, 2048, 2048), (4, 512, 4096))):
        prefill_case(report, name, *case, sweep)


def sampling(report: Report) -> None:
    V = 151_936
    settings = {
        "plain": (1.0, 0, 1.0, 0.0),
        "qwen3 (20, 0.95)": (0.6, 20, 0.95, 0.0),
        "top_p 0.9": (0.8, 0, 0.9, 0.0),
        "min_p": (1.0, 0, 1.0, 0.05),
        "top_k 200, top_p": (1.0, 200, 0.9, 0.0),
    }
    for S in (1, 8, 64):
        rows = [torch.randn(S, V, device="cuda") * 3 for _ in range(8)]
        floor = floor_us(S * V * 4, 0)
        row: dict[str, object] = {"op": "greedy", "shape": f"{S}x{V}", "floor_us": floor}
        timed(row, "us", lambda i, rows=rows: greedy(rows[i % 8], V))
        timed(row, "rival_us", lambda i, rows=rows: rows[i % 8].argmax(-1))
        report.row(**row)
        seeds, steps = torch.arange(S, device="cuda"), torch.arange(S, dtype=torch.int32, device="cuda")
        for name, (heat, k, p, least) in settings.items():
            full = [torch.full((S,), x, device="cuda", dtype=torch.float32) for x in (heat, p, least)]
            top_k = torch.full((S,), k, device="cuda", dtype=torch.int32)
            args = (full[0], top_k, full[1], full[2], seeds, steps, V)
            row = {"op": "sample", "shape": f"{S}x{V} {name}", "floor_us": floor}
            timed(row, "us", lambda i, rows=rows, args=args: sample(rows[i % 8], *args))
            timed(
                row, "rival_us", lambda i, rows=rows, heat=heat: torch.multinomial((rows[i % 8] / heat).softmax(-1), 1)
            )
            report.row(**row)


def head_case(report: Report, M: int, V: int, D: int, sweep: bool) -> None:
    x = torch.randn(M, D, device="cuda").to(DTYPE)
    copies = 4 if V * D * 2 * 4 < 20e9 else 1
    weights = [(torch.randn(V, D, device="cuda") * 0.02).to(DTYPE) for _ in range(copies)]
    row: dict[str, object] = {"op": "lm_head", "shape": f"{M}x{V}x{D}"}
    row["floor_us"] = floor_us(V * D * 2 + M * V * 4, 2 * M * V * D)
    fallback = heuristic("linear", V, D, M)
    timed(row, "us", lambda i: gemm(x, weights[i % copies], None, None, fallback, pieces=False, dtype=torch.float32), 8)
    timed(row, "rival_us", lambda i: library_logits(x, weights[i % copies]), 8)
    report.row(**row)
    if not sweep:
        return
    times = {}
    rounded = min(64, max(16, 1 << (M - 1).bit_length()))
    candidates = [
        Tile(rounded, bn, bk, 1, warps, stages, kind)
        for bn, bk, warps, stages, kind in itertools.product(
            (32, 64, 128), (64, 128, 256), (4, 8), (3, 4, 6), ("plain", "prefetch")
        )
    ]
    for bn, bk, ahead in itertools.product((32, 64, 128), (64, 128), (0, 3, 4, 6)):
        tile = Tile(64, bn, bk, 1, 4, 4, "sm90", ahead)
        if sm90_reason(tile, V, D, gated=False) is None:
            candidates.append(tile)
    for tile in candidates:
        try:
            if tile.kind == "sm90":
                # This kernel writes bf16 here; fp32 out adds M * V * 2 bytes.
                run = lambda i, tile=tile: run_tile(x, weights[i % copies], None, None, tile, pieces=False, gated=False)  # noqa: E731
            else:
                run = lambda i, tile=tile: gemm(  # noqa: E731
                    x, weights[i % copies], None, None, tile, pieces=False, dtype=torch.float32
                )
            times[f"{tile}"] = round(per_call(run, 8), 1)
        except Exception as error:
            print("  failed:", tile, str(error)[:100], flush=True)
    report.row(op="lm_head tiles", shape=row["shape"], best=sorted(times.items(), key=lambda item: item[1])[:6])


def heads(report: Report, sweep: bool) -> None:
    for M, (V, D) in itertools.product((1, 8, 64), ((151_936, 1024), (151_936, 4096), (248_320, 2560))):
        head_case(report, M, V, D, sweep)


def main() -> None:
    parser = out_argument("decode_kernels.json")
    sections = {
        "decode": lambda report: decodes(report, args.sweep),
        "prefill": lambda report: prefills(report, args.sweep),
        "sample": sampling,
        "head": lambda report: heads(report, args.sweep),
    }
    parser.add_argument("--only", nargs="+", choices=sections, default=list(sections))
    parser.add_argument("--sweep", action="store_true", help="try other tiles")
    args = parser.parse_args()
    torch.manual_seed(0)
    report = Report(args.out / "decode_kernels.json")
    for name in args.only:
        report.section(name, lambda run=sections[name]: run(report))


if __name__ == "__main__":
    main()
