"""Kernels of encoders against their floor and a rival, inside CUDA graphs; one row a case, JSON under --out.

    PYTHONPATH=. python benchmarks/kernels/bench_kernels.py --out DIR [--only norms attention] [--sweep [16x512 1x512]]

A case runs 24 times in a graph, over different buffers or weights in turn, and is given per call: what it takes in a
chain, launch included. Floors are bytes over 4.21 TB/s or operations over 784 TFLOP/s, whichever is longer, and leave
the launch out (0.94 µs in a chain). The rival is torch's own operations, or cuBLAS behind them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from timing import Report, floor_us, graph_us, out_argument, side_by_side
from torch import Tensor

from rose.kernels import short_attention as attention
from rose.kernels.activation import activate_in_place, gated_activation
from rose.kernels.add_norm import add_layer_norm, add_rms_norm
from rose.kernels.embed_layer_norm import embed_layer_norm
from rose.kernels.linear import linear, linear_gated, linear_partial
from rose.kernels.pool import pool_finish
from rose.kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_ref, rope_table

CALLS = 24
DTYPE = torch.bfloat16


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").to(DTYPE)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def per_call(run: Callable[[int], object], calls: int = CALLS) -> float:
    return graph_us(lambda: [run(i) for i in range(calls)], 20) / calls


def case(
    report: Report,
    op: str,
    shape: str,
    ours: Callable[[int], object],
    rival: Callable[[int], object],
    moved: float,
    flops: float = 0.0,
    calls: int = CALLS,
) -> None:
    row: dict[str, object] = {"op": op, "shape": shape, "floor_us": floor_us(moved, flops)}
    for name, run in (("us", ours), ("rival_us", rival)):
        try:
            row[name] = per_call(run, calls)
        except Exception as error:
            row[f"{name}_error"] = f"{type(error).__name__}: {error}"[:200]
    report.row(**row)


def norm(report: Report, T: int, P: int, D: int = 1024) -> None:
    gain, bias, residual = randn(D), randn(D), randn(T, D)
    partial = torch.randn(P, T, D, device="cuda") if P > 1 else randn(1, T, D)
    moved = partial.nbytes + 2 * residual.nbytes
    calls = CALLS if T < 10000 else 4
    case(
        report,
        "add_layer_norm",
        f"{P}x{T}x{D}",
        lambda i: add_layer_norm(partial, bias, residual, gain, bias, 1e-5),
        lambda i: F.layer_norm((residual + partial.sum(0) + bias).to(DTYPE), (D,), gain, bias, 1e-5),
        moved,
        calls=calls,
    )
    case(
        report,
        "add_rms_norm",
        f"{P}x{T}x{D}",
        lambda i: add_rms_norm(partial, residual, gain, 1e-6),
        lambda i: F.rms_norm((residual + partial.sum(0)).to(DTYPE), (D,), gain, 1e-6),
        moved + residual.nbytes,
        calls=calls,
    )


def norms(report: Report) -> None:
    for T, P in ((128, 4), (512, 2), (512, 1), (51200, 1)):
        norm(report, T, P)


def embedding(report: Report) -> None:
    word, position, types, gain = randn(250002, 1024), randn(8194, 1024), randn(1, 1024), randn(1024)

    def one(T: int) -> None:
        ids = [torch.randint(0, 250000, (T,), device="cuda", dtype=torch.int32) for _ in range(CALLS)]
        at = torch.arange(T, device="cuda", dtype=torch.int32)
        case(
            report,
            "embed_layer_norm",
            f"{T}x1024",
            lambda i: embed_layer_norm(ids[i], at, None, word, position, types, gain, gain, 1e-5, 2),
            lambda i: F.layer_norm(word[ids[i]] + position[at + 2] + types[0], (1024,), gain, gain, 1e-5),
            3 * T * 2048,
        )

    for T in (128, 4096):
        one(T)


def rope(report: Report) -> None:
    table, gain = rope_table(8192, 128, 1e6, "cuda"), randn(128)

    def one(T: int) -> None:
        args = (randn(T, 4096), torch.arange(T, device="cuda", dtype=torch.int32) % 512, table, gain, gain, 1e-6, 16, 8)
        case(
            report,
            "qk_norm_rope",
            f"{T}x(16+2*8)x128",
            lambda i: qk_norm_rope(*args),
            lambda i: qk_norm_rope_ref(*args),
            2 * T * 24 * 128 * 2,
            calls=CALLS if T < 10000 else 4,
        )

    for T in (128, 512, 51200):
        one(T)


def swiglu(pair: Tensor) -> Tensor:
    gate, up = pair.chunk(2, -1)
    return F.silu(gate) * up


def product(report: Report, name: str, n: int, k: int, act: str | None, kind: str, T: int) -> None:
    factor = 2 if kind == "gated" else 1
    x, b = randn(T, k), randn(n)
    ws = [randn(n * factor, k) * 0.02 for _ in range(CALLS)]
    ours = {
        "linear": lambda i: linear(x, ws[i], b, act),
        "partial": lambda i: linear_partial(x, ws[i]),
        "gated": lambda i: linear_gated(x, ws[i]),
    }[kind]
    rival = {
        "linear": lambda i: F.gelu(F.linear(x, ws[i], b)) if act else F.linear(x, ws[i], b),
        "partial": lambda i: F.linear(x, ws[i]),
        "gated": lambda i: swiglu(F.linear(x, ws[i])),
    }[kind]
    moved = 2 * (factor * n * k + T * (n + k))
    case(report, f"{kind} {name}", f"{T}x{n}x{k}", ours, rival, moved, 2 * T * n * k * factor)


def products(report: Report) -> None:
    shapes = (
        ("qkv", 3072, 1024, None, "linear"),
        ("o", 1024, 1024, None, "partial"),
        ("fc1", 4096, 1024, "gelu", "linear"),
        ("fc2", 1024, 4096, None, "partial"),
        ("gate_up", 3072, 1024, "silu", "gated"),
        ("down", 1024, 3072, None, "partial"),
    )
    for shape, T in itertools.product(shapes, (64, 128, 256, 512, 1024)):
        product(report, *shape, T)


def activations(report: Report) -> None:
    T = 51200
    x, pair = randn(T, 4096), randn(T, 6144)
    gelu = (lambda i: activate_in_place(x, "gelu"), lambda i: F.gelu(x))
    case(report, "gelu in place", f"{T}x4096", *gelu, 2 * x.nbytes, calls=4)
    case(
        report,
        "swiglu",
        f"{T}x2x3072",
        lambda i: gated_activation(pair),
        lambda i: swiglu(pair),
        1.5 * pair.nbytes,
        calls=4,
    )


def pool_case(report: Report, B: int, S: int, mode: str, how: str) -> None:
    hidden, cu = randn(B * S, 1024), ints([i * S for i in range(B + 1)])
    rows = hidden.view(B, S, 1024)

    def rival(i: int) -> Tensor:
        one = {"cls": rows[:, 0], "last": rows[:, -1]}.get(mode)
        pooled = rows.float().mean(1) if one is None else one.float()
        return F.normalize(pooled, dim=-1) if how == "l2" else (pooled.tanh() * 127).round().to(torch.int8)

    moved = B * 1024 * (4 if how == "l2" else 1) + (hidden.nbytes if mode == "mean" else B * 2048)
    case(report, f"pool {mode} {how}", f"{B}x{S}x1024", lambda i: pool_finish(hidden, cu, mode, how), rival, moved)


def pooling(report: Report) -> None:
    for B, S, mode, how in (
        (1, 128, "cls", "l2"),
        (1, 128, "mean", "tanh_int8"),
        (1, 4096, "mean", "l2"),
        (100, 512, "mean", "l2"),
        (100, 512, "last", "l2"),
    ):
        pool_case(report, B, S, mode, how)


LENGTHS = {
    "1x128": [128],
    "1x256": [256],
    "1x512": [512],
    "25x128": [128] * 25,
    "mixed": [37, 128, 1, 200, 64, 256],
    "16x512": [512] * 16,
}
SWEPT = ("1x128", "1x512", "25x128", "16x512", "mixed")
# Query heads, key heads, dimensions: BGE-M3 and pplx-embed 0.6b.
HEADS = ((16, 16, 64), (16, 8, 128))


def heads(T: int, H: int, G: int, dh: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = randn(T, H + 2 * G, dh).split([H, G, G], dim=1)
    return q, k, v


def sdpa(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """torch's attention: one batched call where lengths are equal, else one call a sequence."""
    group = q.shape[1] // k.shape[1]
    if len(set(lengths)) > 1:
        parts = zip(*(t.split(lengths) for t in (q, k, v)), strict=True)
        return torch.cat([sdpa(*part, [part[0].shape[0]]) for part in parts])
    shaped = [t.view(len(lengths), lengths[0], *t.shape[1:]).transpose(1, 2) for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*shaped, enable_gqa=group > 1)
    return out.transpose(1, 2).reshape(q.shape)


def attention_run(name: str, H: int, G: int, dh: int) -> tuple[Callable[[int], Tensor], Callable[[int], Tensor]]:
    """(ours, torch's) of a batch of LENGTHS."""
    lengths = LENGTHS[name]
    q, k, v = heads(sum(lengths), H, G, dh)
    cu = ints([sum(lengths[:i]) for i in range(len(lengths) + 1)])
    return (
        lambda i: attention.short_attention(q, k, v, cu, max(lengths), False, dh**-0.5),
        lambda i: sdpa(q, k, v, lengths),
    )


def attentions(report: Report, sweep: list[str] | None) -> None:
    """
    Args:
        sweep: batches whose blocks are tried too, those of SWEPT where it is empty; None: of none.
    """
    wanted = [(name, *shape) for name, shape in itertools.product(LENGTHS, HEADS) if not sweep or name in sweep]
    swept = [] if sweep is None else [case for case in wanted if case[0] in (sweep or SWEPT)]
    tasks = [(*case, block) for case in swept for block in blocks(case[0], case[3])]
    reasons = side_by_side(compile_block, tasks, 120)
    for name, H, G, dh in wanted:
        lengths = LENGTHS[name]
        ours, rival = attention_run(name, H, G, dh)
        moved, flops = 2 * sum(lengths) * dh * (2 * H + 2 * G), 4 * H * dh * sum(n * n for n in lengths)
        shape = f"{name} {H}/{G}x{dh}"
        case(report, "short_attention", shape, ours, rival, moved, flops)
        times = {}
        for block in blocks(name, dh) if (name, H, G, dh) in swept else ():
            told = "{}x{} w{}".format(*block)
            if (reason := reasons[name, H, G, dh, block]) is not None:
                print("  out:", shape, told, reason[:120], flush=True)
                continue
            with cut_as(block):
                times[told] = round(per_call(ours), 2)
        if times:
            best = sorted(times.items(), key=lambda item: item[1])
            report.row(op="short_attention blocks", shape=shape, best=best[:8], of=len(best))


# (queries a program, keys a block, warps)
Block = tuple[int, int, int]


def blocks(name: str, dh: int) -> list[Block]:
    """Other ways to cut the same attention up."""
    whole = max(64, 1 << (max(LENGTHS[name]) - 1).bit_length())
    rows = ((16, 1), (16, 2), (16, 4), (32, 2), (32, 4), (64, 4), (64, 8), (128, 8))
    keys = [bn for bn in sorted({64, 128, whole}) if bn <= whole and bn * dh <= 32768]
    return [(bm, bn, warps) for (bm, warps), bn in itertools.product(rows, keys)]


@contextmanager
def cut_as(block: Block) -> Iterator[None]:
    chosen, attention.block = attention.block, lambda *_: block
    try:
        yield
    finally:
        attention.block = chosen


def compile_block(task: tuple[str, int, int, int, Block]) -> str | None:
    """In a process of its own: into Triton's cache, and whether it is right."""
    *shape, block = task
    torch.manual_seed(0)
    ours, rival = attention_run(*shape)
    with cut_as(block):
        out, expected = ours(0).float(), rival(0).float()
    torch.cuda.synchronize()
    error = float((out - expected).norm() / expected.norm())
    return None if error < 1e-2 else f"relative error {error:.2e}"


def main() -> None:
    parser = out_argument("bench_kernels.json")
    sections = {
        "norms": norms,
        "embedding": embedding,
        "rope": rope,
        "attention": lambda report: attentions(report, args.sweep),
        "products": products,
        "activations": activations,
        "pooling": pooling,
    }
    parser.add_argument("--only", nargs="+", choices=sections, default=list(sections))
    parser.add_argument("--sweep", nargs="*", choices=LENGTHS, help="try other blocks for attention, of these batches")
    args = parser.parse_args()
    torch.manual_seed(0)
    report = Report(args.out / "bench_kernels.json")
    for name in args.only:
        report.section(name, lambda run=sections[name]: run(report))


if __name__ == "__main__":
    main()
