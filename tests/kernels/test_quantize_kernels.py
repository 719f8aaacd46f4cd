"""Codes and scales against plain torch, bit for bit; products of codes against fp64."""

from __future__ import annotations

import pytest
import torch

from rose.kernels import add_norm_quantize as anq
from rose.kernels import quantize, scaled_mm
from rose.kernels.activation_quantize import (
    activate_quantize_ref,
    activate_quantize_triton,
    gated_activation_quantize_ref,
)
from rose.kernels.quantize import FP8, LARGEST, LEAST_SCALE, quantize_group, quantize_static, quantize_token
from rose.kernels.scaled_gemm import scaled_gemm, scaled_tile
from rose.kernels.scaled_mm import dequantize, scaled_linear, scaled_linear_ref, scaled_mm_ref
from tests.support.launched import Launched


def bits(x):
    return x.view(torch.uint8).cpu()


@pytest.mark.parametrize("width", [1, 64, 384, 1000])
def test_static_codes_are_torchs(place, width):
    x, scale = place.randn(5, width, scale=30.0), torch.tensor([0.05], device=place.device)
    codes = quantize.quantize_static_triton(x, scale)
    assert torch.equal(bits(codes), bits(quantize.quantize_static_ref(x, scale)))


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_codes_beside_a_tie_are_those_of_the_division(place, held):
    """Quotients within a few units of the last place of where two codes meet, of scales next to simple fractions."""
    if held == torch.bfloat16 and place.device.type == "cpu":
        pytest.skip("the interpreter has no bf16")
    torch.manual_seed(0)
    tie = torch.cat([torch.arange(17, 32, 2), torch.tensor([1, 3, 5, 7, 9, 11, 13])]).float()  # of 2**-10 and of e4m3
    steps = torch.arange(-3, 4)
    near = torch.tensor([1.0, 1.125, 1.25, 4 / 3, 1.375, 1.5, 1.625, 1.75, 1.875])
    scales = (near.view(torch.int32)[:, None] + steps.int()).flatten().view(torch.float32)
    scales = torch.cat([scales, torch.rand(40) * torch.tensor(2.0) ** torch.randint(-20, 3, (40,))])
    for scale in scales:
        v = tie[:, None] * torch.tensor(2.0) ** torch.arange(-12, 4) * scale
        v = (v.flatten().view(torch.int32)[:, None] + steps.int()).view(torch.float32)
        x, one = torch.cat([v, -v]).to(held).to(place.device), scale.view(1).to(place.device)
        assert torch.equal(bits(quantize.quantize_static_triton(x, one)), bits(quantize.quantize_static_ref(x, one)))


@pytest.mark.parametrize("place_of_odd", [0, 7])
def test_a_quotient_beyond_fp32_is_no_number(place, place_of_odd):
    x, scale = place.randn(2, 8), torch.tensor([2.0**-30], device=place.device)
    x[1, place_of_odd] = 60000.0 if place.dtype == torch.float16 else 3e38
    codes, ref = quantize.quantize_static_triton(x, scale), quantize.quantize_static_ref(x, scale)
    assert torch.equal(bits(codes), bits(ref))
    assert ref.float().isnan().sum() == (place.dtype != torch.float16)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "relu"])
def test_activations_against_fp64(place, activation):
    """Near zero, in the negative tail and where nothing is left of it; absolutely, and relative to the answer."""
    from rose.kernels.activation import activate_in_place_triton

    far = 80.0 if activation == "silu" else 6.5
    x = torch.cat([torch.linspace(-far, far, 30001), torch.logspace(-6, 2, 999), -torch.logspace(-6, 2, 999)])
    x = x.to(place.dtype).to(place.device).view(1, -1)
    wide = x.double().cpu()
    exact = {
        "gelu": wide * 0.5 * torch.special.erfc(-wide * 0.5**0.5),
        "gelu_tanh": torch.nn.functional.gelu(wide, approximate="tanh"),
        "silu": torch.nn.functional.silu(wide),
        "relu": wide.relu(),
    }[activation]
    out = activate_in_place_triton(x.clone(), activation).double().cpu()
    rounding = torch.finfo(place.dtype).eps / 2
    error = (out - exact).abs()
    assert (error <= exact.abs() * 1.01 * rounding + 1.5e-7 * (1 + 2 * exact.abs())).all()
    if activation == "gelu":
        tail = (wide > -7) & (exact.abs() > torch.finfo(place.dtype).tiny)
        assert (error / exact.abs())[tail].max() < 4e-5 + rounding
    if place.dtype != torch.float16:
        odd = torch.tensor([[float("nan"), float("inf"), -float("inf")]], device=place.device).to(place.dtype)
        assert not activate_in_place_triton(odd, activation)[0, 0].isfinite()
        assert not activate_in_place_triton(odd.clone()[:, 1:2].contiguous(), activation).isfinite().any()


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
@pytest.mark.parametrize("width", [1, 100, 384, 1536])
def test_a_scale_a_token(place, dtype, width):
    x = place.randn(4, width)
    x[2] = 0
    codes, scale = quantize.quantize_groups_triton(x, dtype, width)
    ref_codes, ref_scale = quantize.quantize_groups_ref(x, dtype, width)
    assert torch.equal(bits(codes), bits(ref_codes))
    assert torch.equal(scale.cpu(), ref_scale.cpu())


@pytest.mark.parametrize("width", [64, 128, 300, 1024])
def test_a_scale_a_group(place, width):
    x = place.randn(3, width)
    codes, scale = quantize.quantize_groups_triton(x, FP8, 128)
    ref_codes, ref_scale = quantize.quantize_groups_ref(x, FP8, 128)
    assert torch.equal(bits(codes), bits(ref_codes))
    assert torch.equal(scale.cpu(), ref_scale.cpu())


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_a_kernel_hides_no_value_that_is_not_finite(place, dtype, odd):
    x = place.randn(3, 200)
    x[1, 7] = odd
    _codes, scale = quantize.quantize_groups_triton(x, dtype, 200)
    assert scale[:, 0].isfinite().tolist() == [True, False, True]
    if dtype == FP8:
        static = quantize.quantize_static_triton(x, torch.ones(1, device=place.device))
        assert static.float()[1, 7].isnan()
        assert static.float().isfinite().sum() == x.numel() - 1


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_the_reference_hides_none_either(odd):
    x = torch.randn(2, 8)
    x[0, 3] = odd
    assert quantize_static(x, torch.ones(1)).float().isnan().sum() == 1
    for dtype in (FP8, torch.int8):
        codes, scale = quantize_token(x, dtype)
        assert scale[:, 0].isnan().tolist() == [True, False]
        product = scaled_mm_ref(codes, scale, codes, torch.ones(1))
        assert product[0].isnan().all()
        assert product[1, 1].isfinite()


def test_codes_are_near_and_clamped():
    """e4m3 has 3 bits behind the point: half a step of the value or, near zero, of 2**-9 scales."""
    torch.manual_seed(0)
    x = torch.randn(64, 512) * 3
    codes, scale = quantize_token(x, FP8)
    assert torch.allclose(scale[:, 0] * 448, x.abs().amax(1))
    assert ((codes.float() * scale - x).abs() <= torch.maximum(x.abs() / 16, scale * 2.0**-10) * 1.0001).all()
    codes, scale = quantize_token(x, torch.int8)
    assert ((codes.float() * scale - x).abs() <= scale * 0.50001).all()
    assert codes.abs().max() == 127
    over = quantize_static(torch.tensor([[1e6, -1e6, 464.0, 448.0, 0.0]]), torch.ones(1))
    assert over.float().tolist() == [[448.0, -448.0, 448.0, 448.0, 0.0]]
    assert quantize_token(torch.zeros(1, 4), FP8)[1].item() == pytest.approx(LEAST_SCALE)


def made(kind, rows, n, k, device):
    """Codes and scales of both sides by kind of scheme: (x, x_scale, w, w_scale)."""
    x, w = torch.randn(rows, k), torch.randn(n, k) * 0.05
    if kind == "block":
        codes, scale = quantize_group(x)
        ws = w.new_ones(-(-n // 128), -(-k // 128)).uniform_(0.5, 2.0) * 1e-3
        wc = (w * 100).to(FP8)
    elif kind == "int8":
        codes, scale = quantize_token(x, torch.int8)
        wc, ws = quantize_token(w, torch.int8)
        ws = ws.flatten()
    else:
        scale = torch.tensor([0.01])
        codes = quantize_static(x, scale)
        if kind == "token":
            codes, scale = quantize_token(x, FP8)
        wc, ws = quantize_token(w, FP8)
        ws = ws.flatten()
        if kind == "tensor":
            ws = torch.tensor([w.abs().max() / 448])
            wc = quantize_static(w, ws)
    return [t.to(device) for t in (codes, scale, wc, ws)]


KINDS = ["tensor", "static", "token", "block", "int8"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "n", "k"), [(3, 48, 128), (17, 200, 300), (70, 96, 512)])
def test_products(place, kind, rows, n, k):
    x, sx, w, sw = made(kind, rows, n, k, place.device)
    bias = place.randn(n)
    tile = scaled_tile("linear", n, k, rows, kind == "block")
    out = scaled_gemm(x, sx, w, sw, bias, "gelu", place.dtype, tile)
    wide = x.double() * (sx.double().repeat_interleave(128, 1)[:, :k] if kind == "block" else sx.double().view(-1, 1))
    exact = torch.nn.functional.gelu(wide @ dequantize(w, sw).double().T + bias.double())
    ref = scaled_linear_ref(x.cpu(), sx.cpu(), w.cpu(), sw.cpu(), bias.cpu(), "gelu", place.dtype)
    # The tensor cores' accumulator of e4m3 loses bits inside each 128 inputs.
    loose = 4 * place.tolerance if place.device.type == "cpu" else 6e-3
    assert float((out.double() - exact).norm() / exact.norm()) < loose
    assert float((ref.double() - exact.cpu()).norm() / exact.norm()) < 4 * place.tolerance


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_sum_to_the_product(place, kind):
    from dataclasses import replace

    x, sx, w, sw = made(kind, 9, 64, 512, place.device)
    tile = replace(scaled_tile("partial", 64, 512, 9, kind == "block"), split=2)
    pieces = scaled_gemm(x, sx, w, sw, None, None, place.dtype, tile, pieces=True)
    assert pieces.shape == (2, 9, 64)
    assert pieces.dtype == torch.float32
    ref = scaled_mm_ref(x.cpu(), sx.cpu(), w.cpu(), sw.cpu())
    assert float((pieces.sum(0).cpu() - ref).norm() / ref.norm()) < (5e-6 if place.device.type == "cpu" else 6e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_gated_pair(place, kind, with_bias):
    x, sx, w, sw = made(kind, 5, 256, 256, place.device)
    bias = place.randn(256) if with_bias else None
    tile = scaled_tile("gated", 128, 256, 5, kind == "block")
    out = scaled_gemm(x, sx, w, sw, bias, "silu", place.dtype, tile, gated=True)
    ref = scaled_linear_ref(
        x.cpu(), sx.cpu(), w.cpu(), sw.cpu(), None if bias is None else bias.cpu(), "silu", torch.float32, gated=True
    )
    assert out.shape == (5, 128)
    assert float((out.float().cpu() - ref).norm() / ref.norm()) < (
        max(4 * place.tolerance, 5e-6) if place.device.type == "cpu" else 6e-3
    )


def test_an_answer_in_codes_is_that_of_two_passes(place):
    x, sx, w, sw = made("static", 6, 96, 128, place.device)
    scale, tile = torch.tensor([0.004], device=place.device), scaled_tile("linear", 96, 128, 6, False)
    two = quantize.quantize_static_triton(scaled_gemm(x, sx, w, sw, None, "gelu", place.dtype, tile), scale)
    one = scaled_gemm(x, sx, w, sw, None, "gelu", place.dtype, tile, out_scale=scale)
    assert one.dtype == FP8
    assert torch.equal(bits(one), bits(two))


def test_activations_in_codes(place):
    from rose.kernels.activation import activate_in_place_triton, gated_activation_triton

    x, scale = place.randn(5, 640, scale=2.0), torch.tensor([0.01], device=place.device)
    two = quantize.quantize_static_triton(activate_in_place_triton(x.clone(), "gelu"), scale)
    assert torch.equal(bits(activate_quantize_triton(x, "gelu", scale)), bits(two))
    two = quantize.quantize_static_triton(gated_activation_triton(x, "silu"), scale)
    assert torch.equal(bits(activate_quantize_triton(x, "silu", scale, gated=True)), bits(two))
    close = activate_quantize_ref(x, "gelu", scale).float() - activate_quantize_triton(x, "gelu", scale).float()
    assert close.abs().mean() < 0.05 * 448 * 0.01
    assert gated_activation_quantize_ref(x, "silu", scale).shape == (5, 320)


@pytest.mark.parametrize("width", [64, 384, 1000])
@pytest.mark.parametrize("count", [1, 3])
def test_norms_in_codes(place, width, count):
    from rose.kernels import add_norm

    partial, residual = torch.randn(count, 4, width, device=place.device), place.randn(4, width)
    weight, bias, scale = place.randn(width), place.randn(width), torch.tensor([0.02], device=place.device)
    out, codes = anq.add_layer_norm_quantize_triton(partial, bias, residual, weight, bias, 1e-5, scale)
    plain = add_norm.add_layer_norm_triton(partial, bias, residual, weight, bias, 1e-5)
    assert torch.equal(out, plain)
    assert torch.equal(bits(codes), bits(quantize.quantize_static_triton(plain, scale)))
    codes, stream = anq.add_rms_norm_quantize_triton(partial, residual, weight, 1e-6, scale)
    plain, plain_stream = add_norm.add_rms_norm_triton(partial, residual, weight, 1e-6)
    assert torch.equal(stream, plain_stream)
    assert torch.equal(bits(codes), bits(quantize.quantize_static_triton(plain, scale)))
    codes, _ = anq.add_rms_norm_quantize_triton(None, residual, weight, 1e-6, scale)
    plain = add_norm.rms_norm_triton(residual, weight, 1e-6)
    assert torch.equal(bits(codes), bits(quantize.quantize_static_triton(plain, scale)))


@pytest.mark.parametrize("k", [1024, 1025, 2048, 3000])
def test_int8_sums_are_exact(k):
    """fp32 ends at 2**24, which 1024 products of the largest codes reach."""
    x = torch.randint(-128, 128, (3, k), dtype=torch.int8, generator=torch.Generator().manual_seed(k))
    w = torch.randint(-128, 128, (5, k), dtype=torch.int8, generator=torch.Generator().manual_seed(k + 1))
    x[0], w[0], w[1] = -128, -128, 127
    product = scaled_mm_ref(x, torch.ones(3, 1), w, torch.ones(5))
    assert torch.equal(product, (x.long() @ w.long().T).float())
    assert product[0, 0] == 128 * 128 * k


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [7, 1500])
def test_on_the_cpu_the_reference_serves(kind, rows):
    """int8 sums are whole numbers past 2**24; e4m3's are within fp32's reach of fp64."""
    torch.manual_seed(3)
    x, sx, w, sw = made(kind, rows, 128, 1024, "cpu")
    out = scaled_linear(x, sx, w, sw, None, None, torch.float32)
    wide = x.double() * (
        sx.double().repeat_interleave(128, 1)[:, :1024] if kind == "block" else sx.double().view(-1, 1)
    )
    exact = wide @ dequantize(w, sw).double().T
    assert float((out.double() - exact).norm() / exact.norm()) < (2e-7 if kind == "int8" else 1e-6)
    codes = scaled_linear(x, sx, w, sw, None, "relu", torch.float32, out_scale=torch.tensor([0.1]))
    assert codes.dtype == FP8
    assert torch.equal(bits(codes), bits(quantize_static(out.relu(), torch.tensor([0.1]))))
    assert LARGEST[FP8] == torch.finfo(FP8).max


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [False, True])
def test_many_tokens_on_the_device(kind, gated):
    torch.manual_seed(3)
    x, sx, w, sw = made(kind, 2048, 1024, 1024, "cuda")
    bias = torch.randn(1024, device="cuda").bfloat16()
    act = "silu" if gated else "gelu"
    out = scaled_linear(x, sx, w, sw, bias, act, torch.bfloat16, gated=gated)
    ref = scaled_linear_ref(x.cpu(), sx.cpu(), w.cpu(), sw.cpu(), bias.cpu().float(), act, torch.float32, gated=gated)
    assert float((out.float().cpu() - ref).norm() / ref.norm()) < 6e-3
    if kind == "int8":  # a layer takes codes under a settled scale where it is e4m3
        return
    scale = out.float().abs().max()[None] / LARGEST[FP8]  # nothing is beyond what the type holds
    codes = scaled_linear(x, sx, w, sw, bias, act, torch.bfloat16, gated=gated, out_scale=scale)
    assert codes.dtype == FP8
    # Half of three bits of fraction, and what the product was rounded to in between.
    assert ((codes.float() * scale - out.float()).abs() <= out.float().abs() / 14 + scale / 512).all()


@pytest.mark.parametrize("sides", ["tensor x tensor", "tensor x rows", "tokens x rows", "tokens x tensor"])
def test_the_librarys_product(sides):
    """`torch._scaled_mm` runs on the CPU too: every pair of scales it is called with, and the bias."""
    from rose.kernels.scaled_mm import _library

    torch.manual_seed(0)
    x, w, bias = torch.randn(64, 256), torch.randn(96, 256) * 0.05, torch.randn(96).bfloat16()
    of_x, of_w = sides.split(" x ")
    one = torch.tensor([0.01])
    codes, scale = (quantize_static(x, one), one) if of_x == "tensor" else quantize_token(x, FP8)
    weight, w_scale = (quantize_static(w, one / 10), one / 10) if of_w == "tensor" else quantize_token(w, FP8)
    out = _library(codes, scale, weight, w_scale.flatten(), bias, torch.bfloat16)
    ref = scaled_linear_ref(codes, scale, weight, w_scale.flatten(), bias, None, torch.float32)
    assert out.dtype == torch.bfloat16
    assert float((out.float() - ref).norm() / ref.norm()) < 2.5e-3  # bf16's own rounding


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_scales_of_a_layer_cost_its_products_nothing(monkeypatch, settled, whole):
    """From its second batch on a layer of many tokens launches the library's product and nothing beside it, with the
    scales that made by themselves would give the same bits."""
    torch.manual_seed(0)
    codes, w = torch.randn(300, 64).to(FP8), torch.randn(48, 64).to(FP8)
    x_scale = torch.tensor([0.5]) if settled else torch.rand(300, 1) + 0.5
    w_scale = torch.tensor([0.25]) if whole else torch.rand(48) + 0.1
    columns = scaled_mm.library_columns(w, w_scale, x_scale if settled else None)
    assert (columns is None) == (settled and whole)
    monkeypatch.setattr(scaled_mm, "_ones", {})
    out = scaled_mm._library(codes, x_scale, w, w_scale, None, torch.bfloat16, columns)
    assert torch.equal(out, scaled_mm._library(codes, x_scale, w, w_scale, None, torch.bfloat16))
    expected = (codes.float() * x_scale.view(-1, 1)) @ (w.float() * w_scale.view(-1, 1)).T
    assert ((out.float() - expected).abs() <= expected.abs() * 2**-8 + 1e-3).all()
    with Launched() as launched:
        again = scaled_mm._library(codes, x_scale, w, w_scale, None, torch.bfloat16, columns)
    assert torch.equal(out, again)
    assert launched.names == ["aten::_scaled_mm"]


def test_ones_that_a_graph_may_read_are_kept(monkeypatch):
    monkeypatch.setattr(scaled_mm, "_ones", {})
    cpu = torch.device("cpu")
    first = scaled_mm._column_of_ones(5, cpu)
    assert first.shape == (5, 1)
    assert first.is_contiguous()
    assert scaled_mm._column_of_ones(7, cpu).data_ptr() == first.data_ptr()
    large = scaled_mm._column_of_ones(1 << 15, cpu)
    assert large.shape == (1 << 15, 1)
    assert [held.data_ptr() for held in scaled_mm._ones[cpu]] == [first.data_ptr(), large.data_ptr()]
    assert bool((scaled_mm._column_of_ones(20000, cpu) == 1).all())


def test_ones_made_within_a_capture_are_its_graphs_alone(monkeypatch):
    monkeypatch.setattr(scaled_mm, "_ones", {})
    cpu = torch.device("cpu")
    held = scaled_mm._column_of_ones(5, cpu)
    monkeypatch.setattr(scaled_mm, "_captures", lambda device: True)
    assert scaled_mm._column_of_ones(6, cpu).data_ptr() == held.data_ptr()  # large enough: nothing is made
    large = scaled_mm._column_of_ones(1 << 15, cpu)
    assert large.shape == (1 << 15, 1)
    assert bool((large == 1).all())
    assert [one.data_ptr() for one in scaled_mm._ones[cpu]] == [held.data_ptr()]
