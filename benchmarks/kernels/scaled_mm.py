"""Products of 8-bit codes against those of bf16, over the layers of the published shapes.

    PYTHONPATH=. python benchmarks/kernels/scaled_mm.py --out DIR [--tokens 16 128 1024 16384]

µs a call, eight weights in turn inside one graph (so that a weight is not found in the cache by luck alone). A product
that a layer leaves in pieces is timed with the add + RMSNorm that sums them. `bf16` is rose.kernels.linear; `fp8` rows
under a settled scale that arrive as codes; `fp8 token` rows that are quantised first, a scale each; `int8` likewise;
`block` with 128 x 128 scales; `error` the relative distance of `fp8` to fp64.

With `--codes` alone: products whose activation leaves e4m3 codes for the next, `apart` as the library's product and a
pass behind it, `product` the library's by itself, `epilogue` in one kernel as it is served, then other tilings of it
(rows x outputs of a tile, `pp` where two warpgroups take turns, programs that share a tile of weights or rows); µs and
TFLOP/s (`tflops`: of `apart` and of `epilogue`), `differ` the share of codes that are not those of `apart`.

    PYTHONPATH=. python benchmarks/kernels/scaled_mm.py --out DIR --codes --tokens 12800 25600

`served` is the kernel of `fp8`. `fp8_sm90`, `fp8_plain` and `fp8_library` are the same product by each kernel in turn;
None where it does not take it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from timing import Report, graph_us, out_argument, side_by_side
from torch import Tensor

from rose.kernels import gemm_epilogue, tiles
from rose.kernels.activation import activate_in_place, gated_activation
from rose.kernels.activation_quantize import activate_quantize, gated_activation_quantize
from rose.kernels.add_norm import add_rms_norm
from rose.kernels.gemm_epilogue import CodesTiling
from rose.kernels.linear import linear, linear_gated, linear_partial
from rose.kernels.quantize import FP8, quantize_group, quantize_static, quantize_token
from rose.kernels.scaled_gemm import scaled_tile
from rose.kernels.scaled_mm import _library as library_product
from rose.kernels.scaled_mm import dequantize, run_codes, scaled_linear, scaled_partial
from rose.kernels.tiles import Tile, choose_codes, halves


class Product(NamedTuple):
    """[T, k] x [n, k]; n: outputs, of one half where gated."""

    name: str
    op: tiles.Op
    n: int
    k: int
    activation: str | None = None

    @property
    def gated(self) -> bool:
        return self.op == "gated"


PRODUCTS = [
    Product("bge qkv", "linear", 3072, 1024),
    Product("bge o", "partial", 1024, 1024),
    Product("bge fc1", "linear", 4096, 1024, "gelu"),
    Product("bge fc2", "partial", 1024, 4096),
    Product("pplx qkv", "linear", 4096, 1024),
    Product("pplx o", "partial", 1024, 2048),
    Product("pplx gate_up", "gated", 3072, 1024, "silu"),
    Product("pplx down", "partial", 1024, 3072),
]
WEIGHTS = 8
Call = Callable[[], Tensor]
BF16 = torch.bfloat16


def in_turn(calls: Sequence[Call]) -> float:
    return graph_us(lambda: [call() for call in calls]) / len(calls)


class Calls:
    """One product of some tokens, every way it can be called."""

    def __init__(self, p: Product, tokens: int) -> None:
        self.p = p
        self.residual = torch.randn(tokens, p.n, device="cuda").to(BF16)
        self.gain = torch.ones(p.n, device="cuda", dtype=BF16)

    def summed(self, pieces: Tensor) -> Tensor:
        return add_rms_norm(pieces, self.residual, self.gain, 1e-6)[0]

    def bf16(self, x: Tensor, w: Tensor) -> Tensor:
        p = self.p
        if p.op == "partial":
            return self.summed(linear_partial(x, w))
        return linear_gated(x, w, p.activation or "silu") if p.gated else linear(x, w, None, p.activation)

    def served(self, x: Tensor, scale: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
        p = self.p
        if p.op == "partial":
            return self.summed(scaled_partial(x, scale, w, w_scale, BF16))
        return scaled_linear(x, scale, w, w_scale, None, p.activation, BF16, gated=p.gated)

    def tiled(self, tile: Tile, x: Tensor, scale: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
        p = self.p
        pieces = p.op == "partial"
        y = run_codes(x, scale, w, w_scale, None, p.activation, BF16, tile, pieces=pieces, gated=p.gated)
        return self.summed(y) if pieces else y

    def library(self, x: Tensor, scale: Tensor, w: Tensor, w_scale: Tensor) -> Tensor:
        p = self.p
        y = torch._scaled_mm(x, w.t(), scale_a=scale, scale_b=w_scale, out_dtype=BF16)
        if p.op == "partial":
            return self.summed(y.unsqueeze(0))
        return gated_activation(y, p.activation or "silu") if p.gated else activate_in_place(y, p.activation)


def main() -> None:
    parser = out_argument("scaled_mm.json")
    parser.add_argument("--tokens", nargs="+", type=int, default=[16, 128, 512, 1024, 2048, 16384])
    parser.add_argument("--codes", action="store_true", help="products whose activation leaves codes, and nothing else")
    options = parser.parse_args()
    report = Report(options.out / ("codes.json" if options.codes else "scaled_mm.json"))
    began = time.perf_counter()
    if options.codes:
        measure_codes(report, options.tokens)
        return
    cases = [(p, tokens) for tokens in options.tokens for p in PRODUCTS]
    for (p, tokens), reason in side_by_side(compile_one, cases, 120).items():
        if reason is not None:
            print("not compiled beforehand:", p.name, tokens, reason, flush=True)
    print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    torch.manual_seed(0)
    for p in PRODUCTS:
        for tokens in options.tokens:
            report.section(f"{p.name} {tokens}", partial(measure, report, p, tokens))


TILINGS = [
    CodesTiling(64, 192, True, 2, 1),
    CodesTiling(64, 192, True, 2, 1, dynamic=False),
    CodesTiling(64, 192, True, 4, 1),
    CodesTiling(64, 128, True, 4, 1),
    CodesTiling(128, 96, True, 2, 1),
    CodesTiling(128, 192, False, 2, 1),
    CodesTiling(128, 160, False, 2, 1),
    CodesTiling(128, 128, False, 2, 1),
    CodesTiling(192, 128, False, 2, 1),
]


def named(tiling: CodesTiling) -> str:
    kind = "pp" if tiling.pingpong else "coop"
    static = "" if tiling.dynamic else " static"
    return f"{tiling.tile_m}x{tiling.tile_n} {kind} {tiling.cluster_m}x{tiling.cluster_n}{static}"


class CodesCase:
    """A product with scales and bias as a checkpoint has them: one for all of fc1, one an output of gate and up."""

    def __init__(self, p: Product, tokens: int, weights: int) -> None:
        torch.manual_seed(0)
        n = p.n * halves(p.op)
        self.p, self.one = p, torch.tensor([4.5 / 448], device="cuda")
        self.x = quantize_static(torch.randn(tokens, p.k, device="cuda").to(BF16), self.one)
        self.w_scale = torch.full((n if p.gated else 1,), 0.2 / 448, device="cuda")
        plain = [(torch.randn(n, p.k, device="cuda") * 0.03).to(BF16) for _ in range(weights)]
        self.w = [quantize_static(w, self.w_scale[:1]) for w in plain]
        self.bias = None if p.gated else torch.randn(n, device="cuda").to(BF16)

    def product(self, w: Tensor) -> Tensor:
        return library_product(self.x, self.one, w, self.w_scale, self.bias, BF16)

    def apart(self, w: Tensor) -> Tensor:
        made = gated_activation_quantize if self.p.gated else activate_quantize
        return made(self.product(w), self.p.activation, self.one)

    def epilogue(self, w: Tensor, tiling: CodesTiling | None = None) -> Tensor:
        act = self.p.activation or "silu"
        assert self.p.gated or gemm_epilogue.serves_codes(self.x, self.one, w, self.w_scale, act, gated=self.p.gated)
        out = gemm_epilogue.codes_epilogue(
            self.x, self.one, w, self.w_scale, self.bias, act, self.one, gated=self.p.gated, tiling=tiling
        )
        if out is None:
            raise RuntimeError("quack failed; its reason is in the log")
        return out


def compile_codes(task: tuple[Product, CodesTiling]) -> str | None:
    """Into quack's cache on disk, in a process of its own; the reason if it cannot be."""
    try:
        case = CodesCase(task[0], 256, 1)
        case.epilogue(case.w[0], task[1])
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return None


def measure_codes(report: Report, tokens: Sequence[int]) -> None:
    products = [p for p in PRODUCTS if p.activation is not None]
    for task, reason in side_by_side(compile_codes, [(p, t) for p in products for t in TILINGS], 120).items():
        if reason is not None:
            print("not compiled beforehand:", task[0].name, named(task[1]), reason, flush=True)
    for p in products:
        for count in tokens:
            report.section(f"{p.name} codes {count}", partial(measure_codes_of, report, p, count))


def measure_codes_of(report: Report, p: Product, tokens: int) -> None:
    case = CodesCase(p, tokens, WEIGHTS)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "product": case.product,
        "apart": case.apart,
        "epilogue": case.epilogue,
        **{named(t): partial(case.epilogue, tiling=t) for t in TILINGS},
    }
    us: dict[str, float | str] = {}
    for way, call in ways.items():
        try:
            us[way] = in_turn([partial(call, w) for w in case.w])
        except Exception as error:  # the others are still worth having
            us[way] = f"{type(error).__name__}: {error}"[:200]
            gemm_epilogue._failed.clear()
    flop = 2 * tokens * p.n * halves(p.op) * p.k
    rates = {way: flop / us[way] * 1e-6 for way in ("apart", "epilogue") if isinstance(us[way], float)}
    one, two = case.epilogue(case.w[0]).view(torch.uint8), case.apart(case.w[0]).view(torch.uint8)
    report.row(name=f"{p.name} codes", tokens=tokens, **us, tflops=rates, differ=float((one != two).float().mean()))


def exact(p: Product, x: Tensor, one: Tensor, w: Tensor, tensor: Tensor, calls: Calls) -> Tensor:
    wide = x.double() * one.double() @ dequantize(w, tensor).double().T
    if p.gated:
        return torch.nn.functional.silu(wide[:, : p.n]) * wide[:, p.n :]
    if p.op == "partial":
        stream = wide + calls.residual.double()
        return stream / (stream.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return torch.nn.functional.gelu(wide) if p.activation == "gelu" else wide


class Case:
    """One product of some tokens: its operands, and every way to run it with each of the weights."""

    def __init__(self, p: Product, tokens: int, weights: int) -> None:
        n, k = p.n * halves(p.op), p.k
        x = torch.randn(tokens, k, device="cuda").to(BF16)
        plain = [(torch.randn(n, k, device="cuda") * 0.03).to(BF16) for _ in range(weights)]
        self.one = one = torch.tensor([4.5 / 448], device="cuda")
        self.codes = codes = quantize_static(x, one)
        fp8 = [quantize_token(w, FP8) for w in plain]
        int8 = [quantize_token(w, torch.int8) for w in plain]
        self.tensor = tensor = torch.tensor([0.2 / 448], device="cuda")
        self.whole = whole = [quantize_static(w, tensor) for w in plain]
        blocks = torch.full((n // 128, k // 128), 0.2 / 448, device="cuda")
        self.calls = calls = Calls(p, tokens)
        run = calls.served
        rule = scaled_tile(p.op, p.n, k, tokens, False)
        self.tile = tile = choose_codes(p.op, p.n, k, tokens, rule)
        hopper = tile if tile is not None and tile.kind == "sm90" else None

        def tiled(tile: Tile | None) -> list[Call]:
            return [] if tile is None else [lambda w=w: calls.tiled(tile, codes, one, w, tensor) for w in whole]

        self.ways: dict[str, list[Call]] = {
            "bf16": [lambda w=w: calls.bf16(x, w) for w in plain],
            "fp8": [lambda w=w: run(codes, one, w, tensor) for w in whole],
            "fp8_sm90": tiled(hopper),
            "fp8_plain": tiled(rule),
            "fp8_library": [lambda w=w: calls.library(codes, one, w, tensor) for w in whole],
            "fp8_rows": [lambda w=w: run(codes, one, w[0], w[1].flatten()) for w in fp8],
            "fp8_token": [lambda w=w: run(*quantize_token(x, FP8), w[0], w[1].flatten()) for w in fp8],
            "int8": [lambda w=w: run(*quantize_token(x, torch.int8), w[0], w[1].flatten()) for w in int8],
            "block": [lambda w=w: run(*quantize_group(x), w, blocks) for w in whole],
        }


def compile_one(case: tuple[Product, int]) -> str | None:
    """Every way once, in a process of its own; the reasons of those that fail."""
    made, reasons = Case(*case, 1), []
    for way, calls in made.ways.items():
        try:
            for call in calls:
                call()
            torch.cuda.synchronize()
        except Exception as error:
            reasons.append(f"{way}: {type(error).__name__}: {error}"[:200])
    return "; ".join(reasons) or None


def measure(report: Report, p: Product, tokens: int) -> None:
    case = Case(p, tokens, WEIGHTS)
    found = case.calls.served(case.codes, case.one, case.whole[0], case.tensor)
    wide = exact(p, case.codes, case.one, case.whole[0], case.tensor, case.calls)
    us: dict[str, float | str | None] = {}
    for way, calls in case.ways.items():
        try:
            us[way] = in_turn(calls) if calls else None
        except Exception as error:  # the others are still worth having
            us[way] = f"{type(error).__name__}: {error}"[:200]
    report.row(
        name=p.name,
        tokens=tokens,
        served="library" if case.tile is None else case.tile.kind,
        **us,
        error=float((found.double() - wide).norm() / wide.norm()),
    )


if __name__ == "__main__":
    main()
