"""Products of many tokens with their activation: the library and a kernel after it, against one kernel for both.

    PYTHONPATH=. python benchmarks/kernels/large_gemm.py --out DIR [--tokens 4096 16384] [--own-tilings]

µs a call, four weights in turn inside one graph, and TFLOP/s; the floor is 784 TFLOP/s. `library` is cuBLAS alone,
`apart` with the activation after it, `epilogue` what rose/kernels/gemm_epilogue.py does, then other tilings of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from timing import Report, graph_us, out_argument, side_by_side
from torch import Tensor

from rose.kernels import gemm_epilogue
from rose.kernels.activation import activate, activate_in_place, gated_activation, gated_activation_ref

Product = tuple[str, int, int, str | None, bool]
Tiling = tuple[int, int, bool, int, int, bool]
# (name, output features a weight, input features, activation, gated)
PRODUCTS: list[Product] = [
    ("bge fc1", 4096, 1024, "gelu", False),
    ("bge qkv", 3072, 1024, None, False),
    ("bge o", 1024, 1024, None, False),
    ("bge fc2", 1024, 4096, None, False),
    ("pplx gate_up", 6144, 1024, "silu", True),
    ("pplx qkv", 4096, 1024, None, False),
    ("pplx o", 1024, 2048, None, False),
    ("pplx down", 1024, 3072, None, False),
]
# (tile_m, tile_n, pingpong, cluster_m, cluster_n, dynamic). quack's own choice is dynamic: tiles are handed out as
# programs come free, where the others know theirs from the start (8 % slower at 51,200 tokens).
TILINGS: list[Tiling] = [
    (128, 128, True, 2, 1, True),
    (128, 128, True, 2, 1, False),
    (128, 160, True, 2, 1, True),
    (128, 192, True, 1, 2, True),
    (128, 256, False, 2, 1, True),
    (256, 128, False, 2, 1, True),
]


def config(tiling: Tiling) -> Any:
    from quack.gemm_config import GemmConfig

    tile_m, tile_n, pingpong, cluster_m, cluster_n, dynamic = tiling
    return GemmConfig(
        tile_m=tile_m,
        tile_n=tile_n,
        pingpong=pingpong,
        cluster_m=cluster_m,
        cluster_n=cluster_n,
        is_dynamic_persistent=dynamic,
        device_capacity=9,
    )


def epilogue(
    x: Tensor, w: Tensor, bias: Tensor | None, activation: str | None, gated: bool, chosen: Any = None
) -> Tensor | None:
    if gated:
        return gemm_epilogue.linear_gated_epilogue(x, w, activation or "silu", chosen)
    return gemm_epilogue.linear_epilogue(x, w, bias, activation, chosen)


def apart(x: Tensor, w: Tensor, bias: Tensor | None, activation: str | None, gated: bool) -> Tensor:
    y = F.linear(x, w, bias)
    return gated_activation(y, activation or "silu") if gated else activate_in_place(y, activation)


def operands(tokens: int, n: int, k: int, gated: bool, count: int = 4) -> tuple[Tensor, list[Tensor], Tensor | None]:
    torch.manual_seed(0)
    x = torch.randn(tokens, k, device="cuda").to(torch.bfloat16)
    ws = [(torch.randn(n, k, device="cuda") * 0.02).to(torch.bfloat16) for _ in range(count)]
    return x, ws, None if gated else torch.randn(n, device="cuda").to(torch.bfloat16)


def compile_one(task: tuple[Product, Tiling | None]) -> str | None:
    """In a process of its own: into quack's cache on disk; the reason if it cannot be."""
    (_, n, k, activation, gated), tiling = task
    try:
        x, ws, bias = operands(256, n, k, gated, 1)
        if epilogue(x, ws[0], bias, activation, gated, None if tiling is None else config(tiling)) is None:
            return "quack failed; its reason is in the log"
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def relative_error(y: Tensor, reference: Tensor) -> float:
    return float((y.float() - reference).norm() / reference.norm())


def main() -> None:
    parser = out_argument("large_gemm.json")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument(
        "--own-tilings", action="store_true", help="only quack's own choice of tiles beside the library"
    )
    args = parser.parse_args()
    tilings: tuple[Tiling | None, ...] = (None,) if args.own_tilings else (None, *TILINGS)
    report = Report(args.out / "large_gemm.json")
    tasks = [(p, t) for p in PRODUCTS for t in tilings]
    began = time.perf_counter()
    reasons = side_by_side(compile_one, tasks, 120)
    print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    for (p, t), reason in reasons.items():
        if reason is not None:
            print("out:", p[0], t, reason, flush=True)
    for p in PRODUCTS:
        name, n, k, activation, gated = p
        for tokens in args.tokens:
            x, ws, bias = operands(tokens, n, k, gated)
            reference = F.linear(x[:512].float(), ws[0].float(), None if bias is None else bias.float())
            reference = gated_activation_ref(reference, "silu") if gated else activate(reference, activation)
            ways: dict[str, Callable[[Tensor], Tensor]] = {
                "library": lambda w, x=x, bias=bias: F.linear(x, w, bias),
            }
            if activation is not None:
                ways["apart"] = lambda w, x=x, bias=bias, a=activation, g=gated: apart(x, w, bias, a, g)
            for tiling in tilings:
                if reasons[p, tiling] is None:
                    chosen = None if tiling is None else config(tiling)
                    ways["epilogue" if tiling is None else f"epilogue {tiling}"] = (
                        lambda w, x=x, bias=bias, a=activation, g=gated, c=chosen: epilogue(x, w, bias, a, g, c)
                    )
            for way, run in ways.items():
                try:
                    error = 0.0 if way == "library" else relative_error(run(ws[0])[:512], reference)
                    us = graph_us(lambda run=run, ws=ws: [run(w) for w in ws], 10) / len(ws)
                except Exception as problem:
                    print("failed:", name, tokens, way, str(problem)[:200], flush=True)
                    continue
                tflops = 2 * tokens * n * k / us / 1e6
                report.row(product=name, tokens=tokens, way=way, us=us, tflops=tflops, relative_error=error)


if __name__ == "__main__":
    main()
