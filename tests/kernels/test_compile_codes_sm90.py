"""Kernels of 8-bit codes compile for sm_90 with dependent launch, without a GPU, from their own launch code."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from rose.kernels import tiles
from rose.kernels.launch import triton
from rose.kernels.tiles import Tile
from tests.support.compiled_kernels import bf16, check

pytestmark = pytest.mark.skipif(
    triton is None or triton.knobs.runtime.interpret, reason="needs Triton's compiler, not its interpreter"
)


def test_quantising(compiled):
    from rose.kernels import activation_quantize, add_norm_quantize, quantize

    x, w, scale = bf16(5, 1024), bf16(1024), torch.empty(1)
    quantize.quantize_static_triton(x, scale)
    quantize.quantize_groups_triton(x, torch.int8, 1024)
    quantize.quantize_groups_triton(x, torch.float8_e4m3fn, 128)
    activation_quantize.activate_quantize_triton(x, "gelu", scale)
    activation_quantize.activate_quantize_triton(x, "silu", scale, gated=True)
    add_norm_quantize.add_layer_norm_quantize_triton(torch.empty(4, 5, 1024), w, x, w, w, 1e-5, scale)
    add_norm_quantize.add_rms_norm_quantize_triton(torch.empty(2, 5, 1024), x, w, 1e-6, scale)
    check(compiled, 7)
    # The conversion is the hardware's.
    assert all("e4m3x2" in compiled[at].asm["ptx"] for at in (0, 2, 3, 4, 5, 6))


@pytest.mark.parametrize("kind", ["static", "token", "block", "int8"])
@pytest.mark.parametrize("tokens", [16, 128, 1024, 4096])
def test_products_of_codes(compiled, kind, tokens):
    from rose.kernels.scaled_gemm import scaled_gemm, scaled_tile

    dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    x, w = torch.empty(tokens, 1024, dtype=dtype), torch.empty(3072, 1024, dtype=dtype)
    x_scale = {"static": torch.empty(1), "block": torch.empty(tokens, 8)}.get(kind, torch.empty(tokens, 1))
    w_scale = torch.empty(24, 8) if kind == "block" else torch.empty(1 if kind == "static" else 3072)
    block = kind == "block"
    for op, codes, gated in (("linear", kind == "static", False), ("gated", False, True), ("partial", False, False)):
        n = 1536 if gated else 3072
        bias, act = (None, None) if op == "partial" else (bf16(3072), "silu")
        tile = scaled_tile(op, n, 1024, tokens, block)
        out_scale = torch.empty(1) if codes else None
        scaled_gemm(
            x,
            x_scale,
            w,
            w_scale,
            bias,
            act,
            torch.bfloat16,
            tile,
            pieces=op == "partial",
            gated=gated,
            out_scale=out_scale,
        )
    check(compiled, 3)
    wide = "wgmma" if tokens >= 128 else "mma"
    assert all(wide in kernel.asm["ptx"] for kernel in compiled)


def _code_cases():
    """Every distinct tile of the Hopper kernel that serves codes of a shape of the table, and what else it can do."""
    found = {}
    for name in tiles._table():
        op, shape = name.removeprefix("fp8-").split(":")
        n, k = map(int, shape.split("x"))
        for tokens in tiles.BUCKETS:
            tile = tiles.choose_codes(op, n, k, tokens, Tile(16, 16, 32, 1, 4, 4))
            if tile is not None and tile.kind == "sm90":
                found[op, n, k, tile] = tokens
    yield from ((op, n, k, tokens, tile) for (op, n, k, tile), tokens in found.items())
    # Slots used again, of steps of one part and of two; one step; two warpgroups.
    yield "linear", 3072, 1024, 128, Tile(64, 64, 128, 1, 4, 4, "sm90", ahead=6, late_launch=True)
    yield "linear", 4096, 1024, 128, Tile(128, 64, 256, 1, 8, 2, "sm90", ahead=3)
    yield "gated", 3072, 1024, 128, Tile(64, 32, 128, 1, 4, 3, "sm90", ahead=4)
    yield "partial", 1024, 4096, 100, Tile(64, 128, 256, 4, 4, 4, "sm90")
    yield "linear", 128, 512, 100, Tile(128, 32, 256, 1, 4, 3, "sm90", ahead=2)


def codes_of(*shape):
    return torch.empty(*shape, dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize("kind", ["tensor", "static", "token"])
@pytest.mark.parametrize(("op", "n", "k", "tokens", "tile"), list(_code_cases()))
def test_products_of_codes_on_hopper(compiled, kind, op, n, k, tokens, tile):
    from rose.kernels.scaled_mm import run_codes

    gated, rows = op == "gated", 2 * n if op == "gated" else n
    x_scale = torch.empty(tokens, 1) if kind == "token" else torch.empty(1)
    w_scale = torch.empty(1 if kind == "tensor" else rows)
    whole = op != "partial"
    bias, act = (bf16(rows), "silu" if gated else "gelu") if whole else (None, None)
    out_scale = torch.empty(1) if whole and kind != "token" else None
    run_codes(
        codes_of(tokens, k),
        x_scale,
        codes_of(rows, k),
        w_scale,
        bias,
        act,
        torch.bfloat16,
        tile,
        pieces=not whole,
        gated=gated,
        out_scale=out_scale,
    )
    check(compiled, 1)
    text = compiled[0].asm["ptx"]
    wait = text.index("griddepcontrol.wait")
    asked = [m.start() < wait for m in re.finditer(r"cp\.async\.bulk\.tensor", text)]
    steps = k // tile.split // tile.bk
    ahead = min(tile.ahead or steps, steps) * (2 if gated else 1)
    assert asked[:ahead] == [True] * ahead, "weights wait for the activations"
    assert not any(asked[ahead:]), "activations do not wait for the kernel before"
    # Scales and biases are parameters, but for a token's scale, which the kernel before has made.
    early = [m.start() < wait for m in re.finditer(r"ld\.global", text)]
    assert all(early) if kind != "token" else not all(early)
    # Four products of 32 inputs each, and the sum begins anew: the accumulator keeps 14 bits.
    products = re.findall(
        rf"wgmma\.mma_async\S*m64n{tile.bn}k32\.f32\.e4m3\.e4m3 [^;]*\}}, %rd\d+, %rd\d+, (\S+),", text
    )
    parts = k // tile.split // 128 * (2 if gated else 1)
    assert len(products) == 4 * parts * (tile.bm // 16 // tile.warps)
    falls = dict(re.findall(r"mov\.pred\s+(%p\d+), (-?\d)", text))
    anew = [falls.get(flag, flag) == "0" for flag in products]
    assert anew == [True, False, False, False] * (len(anew) // 4)
    assert "e4m3x2.f32" in text or out_scale is None


def test_sums_of_codes_stay_in_registers(compiled):
    """All additions put off to the end once held every product at a time: 255 registers and spills."""
    from rose.kernels.scaled_gemm_sm90 import scaled_gemm_sm90

    tile = tiles.choose_codes("gated", 3072, 1024, 128, Tile(16, 16, 32, 1, 4, 4))
    x_scale, w_scale = torch.empty(128, 1), torch.empty(6144)
    scaled_gemm_sm90(
        codes_of(128, 1024),
        x_scale,
        codes_of(6144, 1024),
        w_scale,
        bf16(6144),
        "silu",
        torch.bfloat16,
        tile,
        gated=True,
    )
    text = compiled[0].asm["ptx"]
    waits = [m.start() for m in re.finditer(r"wgmma\.wait_group", text)]
    between = [text[a:b].count("add.f32") + text[a:b].count("add.rn.f32") for a, b in itertools.pairwise(waits)]
    assert len(between) == 15
    # The last of either half may come after the last wait.
    assert between[:-2] == [64 * 64 // 128] * 13
