"""Products of e4m3 codes on Hopper: which kernel serves which, what is refused, and (on the device) the numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from rose.kernels import scaled_mm, tiles
from rose.kernels.gemm_sm90 import gluon, runs_sm90
from rose.kernels.quantize import FP8, quantize_static, quantize_static_triton, quantize_token
from rose.kernels.scaled_gemm import scaled_gemm, scaled_tile
from rose.kernels.scaled_gemm_sm90 import scaled_gemm_sm90, scaled_sm90_reason
from rose.kernels.scaled_mm import dequantize, run_codes, scaled_linear_ref
from rose.kernels.tiles import Tile, sm90_reason

# The products of a layer of BGE-M3 and of pplx-embed-0.6b (16 and 8 heads of 128).
LAYERS = [
    ("linear", 3072, 1024),
    ("partial", 1024, 1024),
    ("linear", 4096, 1024),
    ("partial", 1024, 4096),
    ("partial", 1024, 2048),
    ("gated", 3072, 1024),
    ("partial", 1024, 3072),
]
PLAIN = Tile(16, 16, 32, 1, 4, 4)
SM90 = Tile(64, 64, 256, 1, 4, 4, "sm90")
DEEP = replace(SM90, ahead=4)  # 4096 inputs of SM90 would all be on their way at once: more than shared memory holds


def codes(*shape):
    return torch.zeros(shape, dtype=FP8)


@pytest.fixture
def ran(monkeypatch):
    """The kernels that products on a Hopper would have launched, with their tiles."""
    found = []

    def kernel(name):
        def launched(x, x_scale, weight, w_scale, bias, activation, dtype, tile, *, pieces, gated, out_scale):
            found.append((name, tile))
            return torch.zeros(x.shape[0], weight.shape[0] // (2 if gated else 1))

        return launched

    def library(*args):
        found.append(("library", None))
        return torch.zeros(1)

    monkeypatch.setattr(scaled_mm, "runs_triton", lambda x: True)
    monkeypatch.setattr(scaled_mm, "runs_sm90", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(scaled_mm, "scaled_gemm", kernel("plain"))
    monkeypatch.setattr(scaled_mm, "scaled_gemm_sm90", kernel("sm90"))
    monkeypatch.setattr(scaled_mm, "_library", library)
    monkeypatch.setattr(scaled_mm, "activate_in_place", lambda y, activation: y)
    return found


def serve(op, tokens, n, k, dtype=FP8, blocks=False, out=torch.bfloat16):
    x, weight = torch.zeros(tokens, k, dtype=dtype), torch.zeros(n * tiles.halves(op), k, dtype=dtype)
    w_scale = torch.ones(-(-weight.shape[0] // 128), -(-k // 128)) if blocks else torch.ones(1)
    if op == "partial":
        scaled_mm.scaled_partial(x, torch.ones(1), weight, w_scale, out)
    else:
        scaled_mm.scaled_linear(x, torch.ones(1), weight, w_scale, None, None, out, gated=op == "gated")


@pytest.mark.parametrize("tokens", [1, 7, 64, 100, 128])
@pytest.mark.parametrize(("op", "n", "k"), LAYERS)
def test_few_tokens_of_the_layers_take_the_hopper_kernel(ran, op, n, k, tokens):
    serve(op, tokens, n, k)
    ((kernel, tile),) = ran
    assert kernel == "sm90"
    assert sm90_reason(tile, n, k, gated=op == "gated", size=1) is None
    assert tile.split == 1 or op == "partial"
    assert (tile.stages, tile.ahead or 8) >= (k // tile.split // tile.bk,) * 2  # no slot is filled twice


def test_whoever_is_no_hopper_takes_the_plain_kernel(ran, monkeypatch):
    monkeypatch.setattr(scaled_mm, "runs_sm90", lambda device: False)
    for op, n, k in LAYERS:
        serve(op, 128, n, k)
    assert [kernel for kernel, _ in ran] == ["plain"] * len(LAYERS)
    assert all(tile.kind == "plain" for _, tile in ran)


@pytest.mark.parametrize(
    ("more", "tokens"),
    [
        ({"dtype": torch.int8}, 128),
        ({"blocks": True}, 128),
        ({}, 129),
        ({}, 1024),
        ({"dtype": torch.int8}, 1025),
        ({"blocks": True}, 1025),
        ({"out": torch.float16}, 1025),
    ],
)
def test_what_stays_with_the_plain_kernel(ran, more, tokens):
    serve("linear", tokens, 1024, 1024, **more)
    serve("partial", tokens, 1024, 4096, **more)
    assert [kernel for kernel, _ in ran] == ["plain", "plain"]
    assert ran[0][1] == scaled_tile("linear", 1024, 1024, tokens, "blocks" in more)


def test_many_tokens_are_the_librarys(ran):
    serve("linear", 1025, 3072, 1024)
    serve("partial", 1025, 1024, 4096)
    assert [kernel for kernel, _ in ran] == ["library", "library"]


def test_shapes_that_bf16_leaves_to_others_are_as_before():
    """Not in the table, or there with tiles of 16 rows only, or beyond the tokens of a row."""
    assert tiles.choose_codes("linear", 384, 384, 16, PLAIN) == PLAIN
    assert tiles.choose_codes("gated", 12288, 4096, 16, PLAIN) == PLAIN
    assert tiles.choose_codes("gated", 12288, 4096, 128, PLAIN) == PLAIN
    assert tiles.choose_codes("partial", 1024, 1024, 512, PLAIN) == PLAIN
    assert tiles.choose_codes("partial", 1024, 1024, 1025, PLAIN) is None


def test_what_was_measured_for_codes_comes_first(monkeypatch):
    row = Tile(64, 32, 128, 1, 4, 4, "sm90")
    name = tiles.key("linear", 3072, 1024, codes=True)
    assert name == "fp8-linear:3072x1024"
    table = {**tiles._table(), name: {"64": row, "128": None, "large": row}}
    monkeypatch.setattr(tiles, "_table", lambda: table)
    tiles.choose_codes.cache_clear()
    try:
        found = [tiles.choose_codes("linear", 3072, 1024, tokens, PLAIN) for tokens in (5, 64, 128, 129, 4096)]
    finally:
        tiles.choose_codes.cache_clear()
    assert found == [row, row, None, PLAIN, row]


def test_what_the_hopper_kernel_does_not_take():
    x, w, one = codes(1, 1024), codes(3072, 1024), torch.ones(1)
    assert scaled_sm90_reason(x, w, one, SM90, gated=False) is None
    assert "not torch.int8" in scaled_sm90_reason(x.to(torch.int8), w, one, SM90, gated=False)
    assert "a scale for each block" in scaled_sm90_reason(x, w, torch.ones(24, 8), SM90, gated=False)
    assert "whole tiles of 64 x 256" in scaled_sm90_reason(codes(1, 384), codes(96, 384), one, SM90, gated=False)
    narrow = Tile(64, 64, 64, 1, 4, 4, "sm90")
    assert "128 columns" in scaled_sm90_reason(x, w, one, narrow, gated=False)
    assert sm90_reason(narrow, 3072, 1024, gated=False) is None
    assert "shared memory" in scaled_sm90_reason(codes(1, 4096), codes(1024, 4096), one, SM90, gated=False)
    assert scaled_sm90_reason(codes(1, 4096), codes(1024, 4096), one, DEEP, gated=False) is None
    assert "shared memory" in scaled_sm90_reason(x, w, one, Tile(128, 128, 256, 1, 8, 4, "sm90"), gated=False)
    assert "waited for empty" in scaled_sm90_reason(x, w, one, Tile(64, 64, 256, 1, 4, 1, "sm90"), gated=False)


@pytest.mark.skipif(gluon is None, reason="needs Triton's Gluon")
def test_it_refuses_what_it_does_not_take():
    x, w, one = codes(1, 1024), codes(3072, 1024), torch.ones(1)
    with pytest.raises(ValueError, match="a scale for each block"):
        scaled_gemm_sm90(x, torch.ones(1, 8), w, torch.ones(24, 8), None, None, torch.bfloat16, SM90)
    split = Tile(64, 64, 256, 2, 4, 4, "sm90")
    with pytest.raises(ValueError, match="no epilogue"):
        scaled_gemm_sm90(x, one, w, one, None, "gelu", torch.bfloat16, split, pieces=True)


# -- on the device

# Besides what serves: slots used again, steps of one part, one step, two warpgroups, 128 rows by four warps.
SHAPES = [
    (256, 1024, Tile(64, 64, 128, 1, 4, 4, "sm90", ahead=3)),
    (192, 2048, Tile(128, 64, 256, 1, 8, 2, "sm90", ahead=2, late_launch=True)),
    (64, 128, Tile(64, 32, 128, 1, 4, 4, "sm90")),
    (128, 512, Tile(128, 32, 256, 1, 4, 3, "sm90", ahead=2)),
]
SERVED = [(n, k, tiles.choose_codes(op, n, k, 128, PLAIN)) for op, n, k in LAYERS if op != "partial"]
KINDS = ["tensor", "static", "token"]
# As the plain kernel's: bf16's rounding of the answer, and sums of 128 inputs in an accumulator of some 14 bits.
WITHIN = 6e-3


def made(kind, rows, n, k, seed=0):
    """(x, x_scale, w, w_scale) on the device: a scale a side, one and one an output, one a token and an output."""
    torch.manual_seed(seed)
    x, w = torch.randn(rows, k) * (1 + torch.rand(rows, 1)), torch.randn(n, k) * (1 + torch.rand(n, 1)) * k**-0.5
    one, whole = torch.tensor([0.02]), torch.tensor([w.abs().max() / 448])
    xs = quantize_token(x, FP8) if kind == "token" else (quantize_static(x, one), one)
    wc, ws = (quantize_static(w, whole), whole) if kind == "tensor" else quantize_token(w, FP8)
    return [t.cuda() for t in (*xs, wc, ws.flatten())]


def exact(x, sx, w, sw):
    return (x.double() * sx.double().view(-1, 1)) @ dequantize(w, sw).double().T


def distance(out, ref):
    out, ref = out.double().cpu(), ref.double().cpu()
    assert out.shape == ref.shape
    return float((out - ref).norm() / ref.norm())


@pytest.fixture
def hopper():
    if not torch.cuda.is_available() or not runs_sm90(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("needs a Hopper")
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty is NaN: an element left out is found
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 7, 64, 100, 128])
@pytest.mark.parametrize(("n", "k", "tile"), [*SHAPES, *SERVED])
def test_products(hopper, n, k, tile, rows, kind):
    x, sx, w, sw = made(kind, rows, n, k)
    bias = torch.randn(n, device="cuda").bfloat16()
    product = exact(x, sx, w, sw)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert distance(run_codes(x, sx, w, sw, None, None, dtype, tile), product) < WITHIN
        out = run_codes(x, sx, w, sw, bias, "gelu", dtype, tile)
        assert out.dtype == dtype
        assert distance(out, F.gelu(product + bias.double())) < WITHIN


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 64, 100, 128])
def test_a_gated_pair(hopper, rows, with_bias, kind):
    served = [tiles.choose_codes("gated", 3072, 1024, tokens, PLAIN) for tokens in (64, 128)]
    x, sx, w, sw = made(kind, rows, 6144, 1024)
    bias = torch.randn(6144, device="cuda").bfloat16() if with_bias else None
    gate, up = (exact(x, sx, w, sw) + (0 if bias is None else bias.double())).chunk(2, -1)
    for tile in (*served, Tile(64, 64, 128, 1, 4, 3, "sm90", ahead=4, late_launch=True)):
        out = run_codes(x, sx, w, sw, bias, "silu", torch.bfloat16, tile, gated=True)
        assert distance(out, F.silu(gate) * up) < WITHIN


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 7, 64, 100, 128])
@pytest.mark.parametrize(("op", "n", "k"), [shape for shape in LAYERS if shape[0] == "partial"])
def test_pieces_sum_to_the_product(hopper, op, n, k, rows, kind):
    x, sx, w, sw = made(kind, rows, n, k)
    tile = tiles.choose_codes(op, n, k, rows, PLAIN)
    pieces = run_codes(x, sx, w, sw, None, None, torch.bfloat16, tile, pieces=True)
    assert pieces.shape == (tile.split, rows, n)
    assert pieces.dtype == torch.float32
    assert distance(pieces.sum(0), exact(x, sx, w, sw)) < WITHIN
    whole = run_codes(x, sx, w, sw, None, None, torch.bfloat16, Tile(64, 32, 256, 1, 4, 4, "sm90"), pieces=True)
    assert whole.shape == (1, rows, n)
    assert whole.dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 7, 64, 100, 128])
def test_an_answer_in_codes_is_that_of_two_passes(hopper, rows, dtype, gated):
    """Bit for bit, the values that e4m3 cannot hold included."""
    x, sx, w, sw = made("static", rows, 6144 if gated else 3072, 1024)
    tile = tiles.choose_codes("gated" if gated else "linear", 3072, 1024, rows, PLAIN)
    scale, act = torch.tensor([0.004], device="cuda"), "silu" if gated else "gelu"
    two = quantize_static_triton(run_codes(x, sx, w, sw, None, act, dtype, tile, gated=gated), scale)
    one = run_codes(x, sx, w, sw, None, act, dtype, tile, gated=gated, out_scale=scale)
    assert one.dtype == FP8
    assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))
    assert (one.float().abs() == 448).any()
    # As near to the plain kernel's as sums of codes are to each other: a code beside it, where it is one at all.
    plain_tile = scaled_tile("gated" if gated else "linear", 3072, 1024, rows, False)
    plain = scaled_gemm(x, sx, w, sw, None, act, dtype, plain_tile, gated=gated, out_scale=scale)
    assert (one.float() - plain.float()).norm() < 0.03 * plain.float().norm()


@pytest.mark.gpu
def test_a_rows_value_does_not_depend_on_its_place(hopper):
    x, sx, w, sw = made("token", 128, 1024, 4096)
    tile = tiles.choose_codes("partial", 1024, 4096, 128, PLAIN)
    out = run_codes(x, sx, w, sw, None, None, torch.bfloat16, tile, pieces=True)
    turned, scales = x.view(torch.uint8).roll(7, 0).view(FP8), sx.roll(7, 0)
    assert torch.equal(out.roll(7, 1), run_codes(turned, scales, w, sw, None, None, torch.bfloat16, tile, pieces=True))


@pytest.mark.gpu
def test_a_value_that_is_not_finite_stays_in_its_row(hopper):
    x, sx, w, sw = made("token", 64, 3072, 1024)
    sx[9] = torch.nan
    out = run_codes(x, sx, w, sw, None, None, torch.bfloat16, SM90)
    assert out[9].isnan().all()
    assert out.isnan().sum() == 3072


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 128])
def test_what_is_added_late_to_a_large_sum_counts(hopper, rows):
    """Beside 2**15 an accumulator of 14 bits does not see products of 2**-6; sums of 128 of them it is not asked to."""
    x, w = torch.ones(rows, 4096), torch.full((1024, 4096), 2.0**-6)
    x[:, :128] = w[:, :128] = 16.0
    one = torch.ones(1, device="cuda")
    out = run_codes(x.to(FP8).cuda(), one, w.to(FP8).cuda(), one, None, None, torch.float32, DEEP)
    assert (out == 2**15 + (4096 - 128) / 64).all()


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
def test_public_functions(hopper, gated):
    x, sx, w, sw = made("token", 100, 6144 if gated else 3072, 1024)
    act = "silu" if gated else "gelu"
    out = scaled_mm.scaled_linear(x, sx, w, sw, None, act, torch.bfloat16, gated=gated)
    args = [t.cpu() for t in (x, sx, w, sw)]
    assert distance(out, scaled_linear_ref(*args, None, act, torch.float32, gated=gated)) < WITHIN
    x, sx, w, sw = made("static", 100, 1024, 3072)
    pieces = scaled_mm.scaled_partial(x, sx, w, sw, torch.bfloat16)
    assert distance(pieces.float().sum(0), exact(x, sx, w, sw)) < WITHIN
