"""Whole encoders from the public kernels, random weights, one graph: total time, where it goes, and how right it is.

    PYTHONPATH=. python benchmarks/kernels/encoder_probe.py --out DIR [--tokens 128 256 512] [--tiles FILE]

Shares are measured by leaving an operation out (dependent launch overlaps neighbours, so a profiler's kernel times add
up to more than the whole) and by running it alone in a chain.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import Report, capture, floor_us, graph_us, out_argument, replay_us
from torch import Tensor

from rose.kernels import launch, tiles
from rose.kernels.add_norm import add_layer_norm, add_rms_norm, rms_norm
from rose.kernels.embed_layer_norm import embed_layer_norm
from rose.kernels.linear import linear, linear_gated, linear_partial
from rose.kernels.pool import pool_finish
from rose.kernels.qk_norm_rope import qk_norm_rope, rope_table
from rose.kernels.short_attention import short_attention

DEVICE = "cuda"
DTYPE = torch.bfloat16
NONE: frozenset[str] = frozenset()


def weight(*shape: int) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * 0.02).to(DTYPE)


def gain(n: int) -> Tensor:
    return (1 + 0.1 * torch.randn(n, device=DEVICE)).to(DTYPE)


class Probe:
    """Shared: inputs of one sequence, and ops that can be left out."""

    def __init__(self, tokens: int) -> None:
        self.T = tokens
        self.ids = torch.randint(0, 30000, (tokens,), device=DEVICE, dtype=torch.int32)
        self.positions = torch.arange(tokens, device=DEVICE, dtype=torch.int32)
        self.cu_seqlens = torch.tensor([0, tokens], device=DEVICE, dtype=torch.int32)
        self.stand_ins: dict[str, Tensor | tuple[Tensor, ...]] = {}

    def op(self, name: str, skip: frozenset[str], run: Callable[[], Tensor]) -> Tensor:
        """`run`, or where left out what it gave the first time."""
        if name in skip:
            return self.stand_ins[name]
        out = run()
        if name not in self.stand_ins:
            self.stand_ins[name] = tuple(o.clone() for o in out) if isinstance(out, tuple) else out.clone()
        return out


class Bge(Probe):
    """BGE-M3: post-norm, 24 layers of 1024, 16 heads of 64, erf GELU 4096."""

    name, L, D, H, I = "bge-m3", 24, 1024, 16, 4096  # noqa: E741
    ops = ("qkv", "attention", "o", "norm1", "fc1", "fc2", "norm2")

    def __init__(self, tokens: int) -> None:
        super().__init__(tokens)
        D, I = self.D, self.I  # noqa: E741
        self.word, self.position, self.types = weight(30000, D), weight(8194, D), weight(1, D)
        self.norm0 = (gain(D), weight(D))
        self.layers = [
            {
                "qkv": (weight(3 * D, D), weight(3 * D)),
                "o": (weight(D, D), weight(D)),
                "norm1": (gain(D), weight(D)),
                "fc1": (weight(I, D), weight(I)),
                "fc2": (weight(D, I), weight(D)),
                "norm2": (gain(D), weight(D)),
            }
            for _ in range(self.L)
        ]

    def forward(self, skip: frozenset[str] = NONE) -> Tensor:
        x = embed_layer_norm(self.ids, self.positions, None, self.word, self.position, self.types, *self.norm0, 1e-5, 2)
        for layer in self.layers:
            x = self.layer(layer, x, skip)
        return pool_finish(x, self.cu_seqlens, "cls", "l2")

    def layer(self, w, x: Tensor, skip: frozenset[str]) -> Tensor:
        T, D, H = self.T, self.D, self.H
        qkv = self.op("qkv", skip, lambda: linear(x, *w["qkv"]))
        q, k, v = qkv.view(T, 3, H, D // H).unbind(1)
        a = self.op("attention", skip, lambda: short_attention(q, k, v, self.cu_seqlens, T, False, 0.125, True))
        o = self.op("o", skip, lambda: linear_partial(a.view(T, D), w["o"][0]))
        x1 = self.op("norm1", skip, lambda: add_layer_norm(o, w["o"][1], x, *w["norm1"], 1e-5))
        h = self.op("fc1", skip, lambda: linear(x1, *w["fc1"], "gelu"))
        p = self.op("fc2", skip, lambda: linear_partial(h, w["fc2"][0]))
        return self.op("norm2", skip, lambda: add_layer_norm(p, w["fc2"][1], x1, *w["norm2"], 1e-5))

    def alone(self, name: str) -> Callable[[], object]:
        """All layers' `name`, nothing else."""
        seen = self.stand_ins
        keep = frozenset(self.ops) - {name}
        return lambda: [self.layer(layer, seen["norm2"], keep) for layer in self.layers]

    def plain(self, dtype: torch.dtype) -> Tensor:
        """The same encoder in plain torch."""
        c = lambda t: t.to(dtype)  # noqa: E731
        D, H, T = self.D, self.H, self.T
        x = c(self.word)[self.ids.long()] + c(self.position)[self.positions.long() + 2] + c(self.types)[0]
        x = F.layer_norm(x, (D,), c(self.norm0[0]), c(self.norm0[1]), 1e-5)
        for w in self.layers:
            lin = lambda x, n, w=w: F.linear(x, c(w[n][0]), c(w[n][1]))  # noqa: E731
            q, k, v = lin(x, "qkv").view(1, T, 3, H, D // H).permute(2, 0, 3, 1, 4)
            a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(T, D)
            x = F.layer_norm(x + lin(a, "o"), (D,), c(w["norm1"][0]), c(w["norm1"][1]), 1e-5)
            y = lin(F.gelu(lin(x, "fc1")), "fc2")
            x = F.layer_norm(x + y, (D,), c(w["norm2"][0]), c(w["norm2"][1]), 1e-5)
        return F.normalize(x[:1].float(), dim=-1)

    def floor(self) -> float:
        params = self.L * (4 * self.D**2 + 2 * self.D * self.I)
        return floor_us(2 * params, 2 * params * self.T + 4 * self.L * self.T**2 * self.D)


class Pplx(Probe):
    """Qwen3-0.6B / pplx-embed 0.6b: pre-norm, 28 layers of 1024, 16/8 heads of 128, SwiGLU 3072, bidirectional."""

    name, L, D, H, G, dh, I = "pplx-embed-0.6b", 28, 1024, 16, 8, 128, 3072  # noqa: E741
    ops = ("qkv", "rope", "attention", "o", "norm1", "gate_up", "down", "norm2")

    def __init__(self, tokens: int) -> None:
        super().__init__(tokens)
        D, I, H, G, dh = self.D, self.I, self.H, self.G, self.dh  # noqa: E741
        self.word, self.table = weight(30000, D) * 50, rope_table(4096, dh, 1e6, DEVICE)
        self.first, self.last = gain(D), gain(D)
        self.layers = [
            {
                "qkv": weight((H + 2 * G) * dh, D),
                "qk": (gain(dh), gain(dh)),
                "o": weight(D, H * dh),
                "norm1": gain(D),
                "gate_up": weight(2 * I, D),
                "down": weight(D, I),
                "norm2": gain(D),
            }
            for _ in range(self.L)
        ]

    def forward(self, skip: frozenset[str] = NONE) -> Tensor:
        stream = F.embedding(self.ids, self.word)
        x = rms_norm(stream, self.first, 1e-6)
        for layer in self.layers:
            x, stream = self.layer(layer, x, stream, skip)
        return pool_finish(x, self.cu_seqlens, "mean", "none")

    def layer(self, w, x: Tensor, stream: Tensor, skip: frozenset[str]) -> tuple[Tensor, Tensor]:
        T, H, G, dh = self.T, self.H, self.G, self.dh
        qkv = self.op("qkv", skip, lambda: linear(x, w["qkv"]))
        qkv = self.op(
            "rope", skip, lambda: qk_norm_rope(qkv, self.positions, self.table, *w["qk"], 1e-6, self.H, self.G)
        )
        heads = qkv.view(T, H + 2 * G, dh)
        q, k, v = heads[:, :H], heads[:, H : H + G], heads[:, H + G :]
        a = self.op("attention", skip, lambda: short_attention(q, k, v, self.cu_seqlens, T, False, dh**-0.5, True))
        o = self.op("o", skip, lambda: linear_partial(a.view(T, H * dh), w["o"]))
        x, stream = self.op("norm1", skip, lambda: add_rms_norm(o, stream, w["norm1"], 1e-6))
        h = self.op("gate_up", skip, lambda: linear_gated(x, w["gate_up"]))
        p = self.op("down", skip, lambda: linear_partial(h, w["down"]))
        return self.op("norm2", skip, lambda: add_rms_norm(p, stream, w["norm2"], 1e-6))

    def alone(self, name: str) -> Callable[[], object]:
        x, stream = self.stand_ins["norm2"]
        keep = frozenset(self.ops) - {name}
        return lambda: [self.layer(layer, x, stream, keep) for layer in self.layers]

    def plain(self, dtype: torch.dtype) -> Tensor:
        c = lambda t: t.to(dtype)  # noqa: E731
        T, H, G, dh = self.T, self.H, self.G, self.dh

        def rms(x: Tensor, w: Tensor) -> Tensor:
            return F.rms_norm(x.float(), w.shape, w.float(), 1e-6).to(dtype)

        def rope(x: Tensor) -> Tensor:
            cos, sin = (t.repeat(1, 2) for t in self.table[:T].chunk(2, -1))
            a, b = x.float().chunk(2, -1)
            return (x.float() * cos + torch.cat([-b, a], -1) * sin).to(dtype)

        stream = c(self.word)[self.ids.long()]
        x = rms(stream, self.first)
        for w in self.layers:
            q, k, v = F.linear(x, c(w["qkv"])).view(T, H + 2 * G, dh).transpose(0, 1).split([H, G, G])
            q, k = rope(rms(q, w["qk"][0])), rope(rms(k, w["qk"][1]))
            k, v = (t.repeat_interleave(H // G, 0) for t in (k, v))
            a = F.scaled_dot_product_attention(q[None], k[None], v[None])[0].transpose(0, 1).reshape(T, H * dh)
            stream = stream + F.linear(a, c(w["o"]))
            gate, up = F.linear(rms(stream, w["norm1"]), c(w["gate_up"])).chunk(2, -1)
            stream = stream + F.linear(F.silu(gate) * up, c(w["down"]))
            x = rms(stream, w["norm2"])
        return x.float().mean(0, keepdim=True)

    def floor(self) -> float:
        params = self.L * (self.D * self.dh * (2 * self.H + 2 * self.G) + 3 * self.D * self.I)
        return floor_us(2 * params, 2 * params * self.T + 4 * self.L * self.T**2 * self.H * self.dh)


def cosine(a: Tensor, b: Tensor) -> float:
    return float(F.cosine_similarity(a.double(), b.double(), dim=-1).min())


def totals(report: Report, probe: Bge | Pplx) -> None:
    graph, out = capture(probe.forward)
    out.fill_(torch.nan)
    us = replay_us(graph)
    graph.replay()
    torch.cuda.synchronize()
    first = out.clone()
    plain_run = probe.forward()
    torch.cuda.synchronize()
    report.row(
        model=probe.name,
        tokens=probe.T,
        op="total",
        us=us,
        floor_us=probe.floor(),
        cosine_fp32=cosine(first, probe.plain(torch.float32)),
        cosine_bf16=cosine(first, probe.plain(DTYPE)),
        replay_is_plain_run=bool(torch.equal(first, plain_run)),
    )


def without_dependent_launch(report: Report, probe: Bge | Pplx) -> None:
    kept = launch.has_dependent_launch
    launch.has_dependent_launch = lambda device: False  # prefetch off as well: gemm has its own name for it
    try:
        report.row(model=probe.name, tokens=probe.T, op="total, no dependent launch", us=graph_us(probe.forward))
    finally:
        launch.has_dependent_launch = kept


def torch_graph(report: Report, probe: Bge | Pplx) -> None:
    report.row(model=probe.name, tokens=probe.T, op="total, torch ops", us=graph_us(lambda: probe.plain(DTYPE), 20))


def shares(report: Report, probe: Bge | Pplx) -> None:
    whole = graph_us(probe.forward)
    for op in probe.ops:
        without = graph_us(lambda op=op: probe.forward(frozenset({op})))
        alone = graph_us(probe.alone(op))
        report.row(
            model=probe.name,
            tokens=probe.T,
            op=op,
            us_left_out=(whole - without) / probe.L,
            us_alone=alone / probe.L,
        )


def main() -> None:
    parser = out_argument("encoder_probe.json")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--models", nargs="+", default=["bge-m3", "pplx-embed-0.6b"])
    parser.add_argument("--tiles", type=Path, help="a table to use in place of the committed one")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    if args.tiles:
        tiles._TABLE = args.tiles
    report = Report(args.out / "encoder_probe.json")
    for kind in (k for k in (Bge, Pplx) if k.name in args.models):
        for tokens in args.tokens:
            probe = kind(tokens)
            name = f"{probe.name} {tokens}"
            report.section(f"{name} total", lambda p=probe: totals(report, p))
            report.section(f"{name} no dependent launch", lambda p=probe: without_dependent_launch(report, p))
            report.section(f"{name} torch", lambda p=probe: torch_graph(report, p))
            report.section(f"{name} shares", lambda p=probe: shares(report, p))
            for op, n, k in products(probe):
                tile = tiles.choose(op, n, k, tokens)
                print(f"   tile {op} {n}x{k}: {tile and tile}", flush=True)


def products(probe: Bge | Pplx) -> list[tuple[tiles.Op, int, int]]:
    if isinstance(probe, Bge):
        return [("linear", 3072, 1024), ("partial", 1024, 1024), ("linear", 4096, 1024), ("partial", 1024, 4096)]
    return [("linear", 4096, 1024), ("partial", 1024, 2048), ("gated", 3072, 1024), ("partial", 1024, 3072)]


if __name__ == "__main__":
    main()
