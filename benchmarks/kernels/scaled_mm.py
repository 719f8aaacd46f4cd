"""Products of 8-bit codes against those of bf16, over the layers of the published shapes.

    PYTHONPATH=. python benchmarks/kernels/scaled_mm.py --out DIR [--tokens 16 128 1024 16384]

µs a call, eight weights in turn inside one graph (so that a weight is not found in the cache by luck alone). `bf16` is
rose.kernels.linear; `fp8` rows under a settled scale that arrive as codes; `fp8 token` rows that are quantised first, a
scale each; `int8` likewise; `block` with 128 x 128 scales; `error` the relative distance of `fp8` to fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from timing import Report, graph_us, out_argument
from torch import Tensor

from rose.kernels.linear import linear, linear_gated
from rose.kernels.quantize import FP8, quantize_group, quantize_static, quantize_token
from rose.kernels.scaled_mm import dequantize, scaled_linear

# (name, output features of both halves, input features, activation, gated)
PRODUCTS = [
    ("bge qkv", 3072, 1024, None, False),
    ("bge fc1", 4096, 1024, "gelu", False),
    ("bge fc2", 1024, 4096, None, False),
    ("pplx gate_up", 6144, 1024, "silu", True),
    ("pplx down", 1024, 3072, None, False),
]
WEIGHTS = 8


def in_turn(calls: Sequence[Callable[[], Tensor]]) -> float:
    return graph_us(lambda: [call() for call in calls]) / len(calls)


def main() -> None:
    parser = out_argument("scaled_mm.json")
    parser.add_argument("--tokens", nargs="+", type=int, default=[16, 128, 512, 1024, 2048, 16384])
    options = parser.parse_args()
    report = Report(options.out / "scaled_mm.json")
    torch.manual_seed(0)
    for name, n, k, activation, gated in PRODUCTS:
        for tokens in options.tokens:
            report.section(f"{name} {tokens}", partial(measure, report, name, tokens, n, k, activation, gated))


def measure(report: Report, name: str, tokens: int, n: int, k: int, activation: str | None, gated: bool) -> None:
    x = torch.randn(tokens, k, device="cuda").bfloat16()
    plain = [(torch.randn(n, k, device="cuda") * 0.03).bfloat16() for _ in range(WEIGHTS)]
    one = torch.tensor([4.5 / 448], device="cuda")
    codes = quantize_static(x, one)
    fp8 = [quantize_token(w, FP8) for w in plain]
    int8 = [quantize_token(w, torch.int8) for w in plain]
    tensor = torch.tensor([0.2 / 448], device="cuda")
    whole = [quantize_static(w, tensor) for w in plain]
    blocks = torch.full((n // 128, k // 128), 0.2 / 448, device="cuda")

    def run(x: Tensor, scale: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
        return scaled_linear(x, scale, w, w_scale, None, activation, torch.bfloat16, gated=gated)

    def bf16(w: Tensor) -> Tensor:
        return linear_gated(x, w, activation or "silu") if gated else linear(x, w, None, activation)

    found = run(codes, one, whole[0], tensor)
    wide = codes.double() * one.double() @ dequantize(whole[0], tensor).double().T
    if gated:
        wide = torch.nn.functional.silu(wide[:, : n // 2]) * wide[:, n // 2 :]
    elif activation == "gelu":
        wide = torch.nn.functional.gelu(wide)
    report.row(
        name=name,
        tokens=tokens,
        bf16=in_turn([lambda w=w: bf16(w) for w in plain]),
        fp8=in_turn([lambda w=w: run(codes, one, w, tensor) for w in whole]),
        fp8_rows=in_turn([lambda w=w: run(codes, one, w[0], w[1].flatten()) for w in fp8]),
        fp8_token=in_turn([lambda w=w: run(*quantize_token(x, FP8), w[0], w[1].flatten()) for w in fp8]),
        int8=in_turn([lambda w=w: run(*quantize_token(x, torch.int8), w[0], w[1].flatten()) for w in int8]),
        block=in_turn([lambda w=w: run(*quantize_group(x), w, blocks) for w in whole]),
        error=float((found.double() - wide).norm() / wide.norm()),
    )


if __name__ == "__main__":
    main()
