"""Small kernels that do several passes' work in one, against their floor and torch's own operations; JSON under --out.

    PYTHONPATH=. python benchmarks/kernels/bench_fused.py --out DIR [--only embedding codes] [--tokens 128 16384]

What bench_kernels.py, bench_gated_delta.py and decode.py leave out: the first norm of a decoder with its gather, the
heads and gates of Qwen3.5's attention, parts of a text, keys and values on their way into pages, tokens that stay on
the device, and every pass that answers in 8 bits. A case runs 24 times in a graph and is given per call, launch
included. Floors are bytes over 4.21 TB/s and leave the launch out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timing import Report, floor_us, graph_us, out_argument
from torch import Tensor

from rose.batch import HeadRotation
from rose.kernels.activation import activate
from rose.kernels.activation_quantize import activate_quantize, gated_activation_quantize
from rose.kernels.add_norm_quantize import add_layer_norm_quantize, add_rms_norm_quantize, rms_norm_quantize
from rose.kernels.embed_rms_norm import embed_rms_norm
from rose.kernels.gated_qk_norm_rope import gated_qk_norm_rope, gated_qk_norm_rope_ref
from rose.kernels.latest import keep_latest, take_latest
from rose.kernels.pool import pool_spans
from rose.kernels.qk_norm_rope import rope_table
from rose.kernels.quantize import FP8, quantize_group, quantize_static, quantize_token
from rose.kernels.sigmoid_gate import sigmoid_gate
from rose.kernels.store_kv import qk_norm_rope_store, qk_norm_rope_store_ref

CALLS = 24
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16
D, FFN, EPS = 1024, 3072, 1e-6
LARGEST = 448.0  # of e4m3


class Case(NamedTuple):
    """One row: what is done by ours and by torch alone, and the bytes that have to move."""

    op: str
    shape: str
    ours: Callable[[], Any]
    rival: Callable[[], Any]
    moved: float


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(DTYPE)


def randint(most: int, *shape: int) -> Tensor:
    return torch.randint(0, most, shape, device=DEVICE, dtype=torch.int32)


def codes_of(x: Tensor, scale: Tensor | float) -> Tensor:
    return (x / scale).clamp(-LARGEST, LARGEST).to(FP8)


def embedding(T: int) -> Iterator[Case]:
    table, gain, ids = randn(151_936, D), randn(D), randint(151_936, T)

    def rival() -> tuple[Tensor, Tensor]:
        rows = table[ids]
        return F.rms_norm(rows, (D,), gain, EPS), rows

    yield Case("embed_rms_norm", f"{T}x{D}", lambda: embed_rms_norm(ids, table, gain, EPS), rival, 3 * T * D * 2)


def gated_heads(T: int) -> Iterator[Case]:
    """Qwen3.5-4B: 16 query heads with their gates, 4 of keys and values, 256 wide, of which 64 are turned."""
    H, G, width = 16, 4, 256
    qkv, positions = randn(T, 2 * (H + G) * width), torch.arange(T, dtype=torch.int32, device=DEVICE) % 4096
    table, gain = rope_table(4096, 64, 1e7, DEVICE), randn(width)
    args = (positions, table, gain, gain, EPS, H, G)
    moved = 2 * T * (H + G) * width * 2
    shape = f"{T}x({H}+{G})x{width}"
    yield Case(
        "gated_qk_norm_rope",
        shape,
        lambda: gated_qk_norm_rope(qkv, *args),
        lambda: gated_qk_norm_rope_ref(qkv, *args),
        moved,
    )
    x = randn(T, H, width)

    def rival() -> Tensor:
        gate = qkv[:, : 2 * H * width].unflatten(-1, (H, 2, -1))[:, :, 1]
        return (x * gate.sigmoid()).flatten(1)

    yield Case("sigmoid_gate", f"{T}x{H}x{width}", lambda: sigmoid_gate(x, qkv), rival, 3 * x.nbytes)


def parts(T: int) -> Iterator[Case]:
    each = min(64, T)
    S = T // each
    hidden = randn(T, D)
    starts = torch.arange(S, dtype=torch.int32, device=DEVICE) * each
    spans = torch.stack([starts, starts + each], 1)
    yield Case(
        "pool_spans",
        f"{S} of {each}x{D}",
        lambda: pool_spans(hidden, spans),
        lambda: hidden[: S * each].view(S, each, D).float().mean(1),
        hidden.nbytes + S * D * 4,
    )


def decoding(T: int) -> Iterator[Case]:
    """Qwen3-0.6B's heads into pages of 16 tokens; ids that lie on the device."""
    H, G, width, page = 16, 8, 128, 16
    pages = -(-T // page) + 1
    qkv, gain = randn(T, (H + 2 * G) * width), randn(width)
    positions = torch.arange(T, dtype=torch.int32, device=DEVICE) % 4096
    rotation = HeadRotation(positions, rope_table(4096, width, 1e6, DEVICE), gain, gain, EPS)
    caches = [torch.zeros(pages, page, G, width, dtype=DTYPE, device=DEVICE) for _ in range(4)]
    slots = page + torch.randperm(T, device=DEVICE).int()

    again = qkv.clone()

    def stored(run: Callable[..., None], packed: Tensor, pair: list[Tensor]) -> list[Tensor]:
        run(packed, rotation, *pair, slots)
        return pair

    yield Case(
        "qk_norm_rope_store",
        f"{T}x({H}+2*{G})x{width}",
        lambda: stored(qk_norm_rope_store, qkv, caches[:2]),
        lambda: stored(qk_norm_rope_store_ref, again, caches[2:]),
        2 * qkv.nbytes,
    )
    lanes = torch.randperm(T, device=DEVICE).int()
    latest, ids = randint(151_936, T), torch.where(lanes % 2 == 0, -1 - lanes, lanes)
    wide = lanes.long()
    yield Case(
        "take_latest",
        f"{T}",
        lambda: take_latest(ids, latest),
        lambda: torch.where(ids < 0, latest[(-1 - ids).clamp_min(0)], ids),
        3 * ids.nbytes,
    )
    kept = [latest.clone(), latest.clone()]

    def keep() -> Tensor:
        keep_latest(ids, lanes, kept[0])
        return kept[0]

    yield Case("keep_latest", f"{T}", keep, lambda: kept[1].index_copy_(0, wide, ids.clamp_min(0)), 3 * ids.nbytes)


def codes(T: int) -> Iterator[Case]:
    scale = torch.full((1,), 0.02, device=DEVICE)
    gain, bias, x, residual = randn(D), randn(D), randn(1, T, D), randn(T, D)
    one = x.nbytes

    def layer_norm() -> tuple[Tensor, Tensor]:
        y = F.layer_norm(residual + x[0] + bias, (D,), gain, bias, EPS)
        return y, codes_of(y, scale)

    yield Case(
        "add_layer_norm_quantize",
        f"{T}x{D}",
        lambda: add_layer_norm_quantize(x, bias, residual, gain, bias, EPS, scale),
        layer_norm,
        3.5 * one,
    )

    def rms_norm() -> tuple[Tensor, Tensor]:
        stream = residual + x[0]
        return codes_of(F.rms_norm(stream, (D,), gain, EPS), scale), stream

    yield Case(
        "add_rms_norm_quantize",
        f"{T}x{D}",
        lambda: add_rms_norm_quantize(x, residual, gain, EPS, scale),
        rms_norm,
        3.5 * one,
    )
    yield Case(
        "rms_norm_quantize",
        f"{T}x{D}",
        lambda: rms_norm_quantize(residual, gain, EPS, scale),
        lambda: codes_of(F.rms_norm(residual, (D,), gain, EPS), scale),
        1.5 * one,
    )
    wide = randn(T, 2 * FFN)
    gate, up = wide.chunk(2, -1)
    yield Case(
        "activate_quantize",
        f"{T}x{2 * FFN} gelu",
        lambda: activate_quantize(wide, "gelu", scale),
        lambda: codes_of(activate(wide, "gelu"), scale),
        1.5 * wide.nbytes,
    )
    yield Case(
        "gated_activation_quantize",
        f"{T}x2x{FFN} silu",
        lambda: gated_activation_quantize(wide, "silu", scale),
        lambda: codes_of(F.silu(gate) * up, scale),
        1.25 * wide.nbytes,
    )
    row = residual
    yield Case(
        "quantize_static",
        f"{T}x{D}",
        lambda: quantize_static(row, scale),
        lambda: codes_of(row, scale),
        1.5 * one,
    )

    def grouped(size: int) -> tuple[Tensor, Tensor]:
        groups = row.float().unflatten(1, (-1, size))
        scales = groups.abs().amax(-1) / LARGEST
        return codes_of(groups, scales[..., None]).flatten(1), scales

    yield Case("quantize_token", f"{T}x{D}", lambda: quantize_token(row, FP8), lambda: grouped(D), 1.5 * one)
    yield Case("quantize_group", f"{T}x{D}", lambda: quantize_group(row, 128), lambda: grouped(128), 1.5 * one)


SECTIONS: dict[str, Callable[[int], Iterator[Case]]] = {
    "embedding": embedding,
    "gated_heads": gated_heads,
    "parts": parts,
    "decoding": decoding,
    "codes": codes,
}


def measure(report: Report, cases: Iterator[Case]) -> None:
    for case in cases:
        row: dict[str, object] = {"op": case.op, "shape": case.shape, "floor_us": floor_us(case.moved, 0)}
        for name, run in (("us", case.ours), ("rival_us", case.rival)):
            try:
                row[name] = graph_us(lambda run=run: [run() for _ in range(CALLS)], 20) / CALLS
            except Exception as error:
                row[f"{name}_error"] = f"{type(error).__name__}: {error}"[:200]
        report.row(**row)


def main() -> None:
    parser = out_argument("bench_fused.json")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[128, 16384])
    args = parser.parse_args()
    torch.manual_seed(0)
    report = Report(args.out / "bench_fused.json")
    for tokens in args.tokens:
        for name in args.only:
            report.section(f"{name} {tokens}", lambda name=name, T=tokens: measure(report, SECTIONS[name](T)))


if __name__ == "__main__":
    main()
