"""Large products with their activation in the epilogue, against fp64; who comes here and who does not."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from rose.kernels import epilogue_functions, gemm_epilogue, linear, scaled_mm, tiles
from rose.kernels.activation_quantize import activate_quantize_ref
from rose.kernels.quantize import FP8, quantize_static, quantize_token
from rose.kernels.scaled_mm import dequantize, scaled_linear_ref

ACTIVATIONS = {
    None: lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def on_hopper_with_quack():
    x = torch.empty(1, 64, dtype=torch.bfloat16, device="cuda")
    if not gemm_epilogue.serves(x, 64, "gelu", gated=False):
        pytest.skip("needs Hopper and quack")


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("tokens", "n", "k"), [(1025, 384, 256), (4097, 4096, 1024)])
def test_activation(activation, tokens, n, k):
    on_hopper_with_quack()
    torch.manual_seed(0)
    x, w, bias = (torch.randn(*s, device="cuda").bfloat16() for s in ((tokens, k), (n, k), (n,)))
    w *= k**-0.5
    out = gemm_epilogue.linear_epilogue(x, w, bias, activation)
    expected = ACTIVATIONS[activation](x.double() @ w.double().t() + bias.double())
    assert out.shape == (tokens, n)
    assert (out.double() - expected).norm() / expected.norm() < 4e-3
    assert torch.equal(out, gemm_epilogue.linear_epilogue(x, w, bias, activation))


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "n", "k"), [(1025, 192, 256), (4097, 3072, 1024)])
def test_gated(tokens, n, k):
    on_hopper_with_quack()
    torch.manual_seed(0)
    x, w = (torch.randn(*s, device="cuda").bfloat16() for s in ((tokens, k), (2 * n, k)))
    w *= k**-0.5
    gate, up = (x.double() @ w.double().t()).chunk(2, -1)
    expected = F.silu(gate) * up
    out = gemm_epilogue.linear_gated_epilogue(x, w, "silu")
    assert (out.double() - expected).norm() / expected.norm() < 4e-3


def codes_of_a_layer(rows, n, k, device, whole):
    """(x, x_scale, weight, w_scale, bias): as a checkpoint with settled scales has them."""
    torch.manual_seed(0)
    x, w = torch.randn(rows, k) * (1 + torch.rand(rows, 1)), torch.randn(n, k) * (1 + torch.rand(n, 1)) * k**-0.5
    one, all_of_it = torch.tensor([0.02]), (w.abs().max() / 448).view(1)
    wc, ws = (quantize_static(w, all_of_it), all_of_it) if whole else quantize_token(w, FP8)
    made = quantize_static(x, one), one, wc, ws.flatten(), (torch.randn(n) * 0.2).bfloat16()
    return [t.to(device) for t in made]


def steps_apart(one, two):
    """How many codes lie between two, counted through zero."""

    def place(codes):
        bits = codes.cpu().view(torch.uint8).int()
        return torch.where(bits > 127, 128 - bits, bits)

    return (place(one) - place(two)).abs()


TILINGS = [None, gemm_epilogue.CodesTiling(64, 192, True), gemm_epilogue.CodesTiling(128, 128, False, dynamic=False)]


@pytest.mark.gpu
@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("activation", "gated", "with_bias"),
    [("gelu", False, True), ("gelu", False, False), ("silu", True, False), ("gelu_tanh", False, True)],
)
@pytest.mark.parametrize(("tokens", "n", "k"), [(1025, 384, 256), (4096, 4096, 1024), (2049, 6144, 1024)])
def test_codes(activation, gated, with_bias, whole, tokens, n, k, tiling):
    """The codes of the reference, but where its fp32 value lies so near to where two meet that the sums' last bits
    (tensor cores keep some 14 of each 128 inputs) and the activation's decide: never two steps, seldom one.

    What the sums leave out is up to 4e-3 here. Of a pair each half's counts as often as the other is large: a gate
    near zero beside an `up` of 20 is off by 20 times as much (silu is nowhere steeper than 1.1)."""
    on_hopper_with_quack()
    x, sx, w, sw, bias = codes_of_a_layer(tokens, n, k, "cuda", whole)
    given = bias if with_bias else None
    assert gemm_epilogue.serves_codes(x, sx, w, sw, activation, gated=gated)
    scale = torch.tensor([0.01], device="cuda")
    out = gemm_epilogue.codes_epilogue(x, sx, w, sw, given, activation, scale, gated=gated, tiling=tiling)
    wide = (x.double() * sx.double()) @ dequantize(w, sw).double().T + (bias.double() if with_bias else 0)
    sums = 4e-3
    if gated:
        gate, up = wide.chunk(2, -1)
        exact = ACTIVATIONS[activation](gate) * up
        sums *= 1.1 * up.abs() + ACTIVATIONS[activation](gate).abs()
    else:
        exact = ACTIVATIONS[activation](wide)
    ref = quantize_static(exact.float().bfloat16(), scale)
    assert out.dtype == FP8
    assert out.shape == ref.shape
    assert (out.float().abs() == 448).any()
    apart = steps_apart(out, ref)
    assert (apart > 0).float().mean() < 0.02
    # Near zero a step is 2**-9 of the scale, and what the sums left out is more.
    assert (((out.float() - ref.float()) * scale).abs() <= exact.abs() / 7 + scale / 256 + sums).all()
    clear = (exact.abs() > 25 * sums).cpu()
    assert clear.float().mean() > 0.2
    assert (apart[clear] <= 1).all()
    again = gemm_epilogue.codes_epilogue(x, sx, w, sw, given, activation, scale, gated=gated, tiling=tiling)
    assert torch.equal(out.view(torch.uint8), again.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("tiling", TILINGS)
def test_what_is_added_late_to_a_large_sum_of_codes_counts(tiling):
    """Beside 2**15 an accumulator of 14 bits does not see products of 2**-6."""
    on_hopper_with_quack()
    x, w = torch.ones(1024, 4096), torch.full((1024, 4096), 2.0**-6)
    x[:, :128] = w[:, :128] = 16.0
    one, bias = torch.ones(1, device="cuda"), torch.full((1024,), -(2.0**15)).bfloat16().cuda()
    out = gemm_epilogue.codes_epilogue(
        x.to(FP8).cuda(), one, w.to(FP8).cuda(), one, bias, "relu", one, gated=False, tiling=tiling
    )
    assert (out.float() == 64).all()  # 62 = 3968 / 64 lies between codes of 60 and 64


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_of_codes_that_is_no_number_stays_alone(gated):
    on_hopper_with_quack()
    x, sx, w, sw, _ = codes_of_a_layer(1500, 1024, 512, "cuda", whole=True)
    x.view(torch.uint8)[9, 5] = 0x7F
    act = "silu" if gated else "gelu"
    out = gemm_epilogue.codes_epilogue(x, sx, w, sw, None, act, torch.ones(1, device="cuda"), gated=gated)
    assert out[9].float().isnan().all()
    assert out.float().isnan().sum() == out.shape[1]


@pytest.mark.gpu
def test_the_epilogues_functions_are_those_of_the_kernels():
    """The bf16 product of the identity: GELU of every bf16 value, as `activate_block` has it."""
    on_hopper_with_quack()
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.abs() < 60]
    every = every[: every.numel() // 64 * 64].view(-1, 64).cuda()
    out = gemm_epilogue.linear_epilogue(every, torch.eye(64, device="cuda").bfloat16(), None, "gelu")
    exact = every.double() * 0.5 * torch.special.erfc(-every.double() * 0.5**0.5)
    assert ((out.double() - exact).abs() <= exact.abs() * 2.0**-8 * 1.02 + 2e-7).all()


@pytest.mark.parametrize(
    ("activation", "gated", "rows", "with_bias"),
    [
        ("gelu", False, True, True),
        ("gelu", False, False, True),
        ("silu", True, True, False),
        ("silu", True, False, False),
    ],
)
def test_codes_compile_for_hopper_without_a_gpu(activation, gated, rows, with_bias):
    """In a process of its own, since CuTe DSL reads its target once; registers are not spilled."""
    pytest.importorskip("quack.epilogue")
    program = COMPILING.format(activation=activation, gated=gated, rows=rows, bias=with_bias)
    target = {"QUACK_ARCH": "90", "CUTE_DSL_ARCH": "sm_90a", "QUACK_CACHE_ENABLED": "0", "CUTE_DSL_KEEP": "ptx"}
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, **target, "CUTE_DSL_DUMP_DIR": folder}
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        (ptx,) = Path(folder).glob("*.ptx")
        text = ptx.read_text()
    assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in text
    assert "cvt.rn.satfinite.e4m3x2.f32" in text
    assert text.count("rcp.rn.f32") + text.count("div.rn.f32") == 1  # the scale's, once a tile
    assert "setmaxnreg" in text


COMPILING = """
import torch
import quack.gemm_runtime.host as host
from quack.epilogue.ops import Scalar
from rose.kernels import gemm_epilogue
from rose.kernels.epilogue_functions import codes_epilogue
host.get_max_active_clusters = lambda *args, **more: 132
Scalar._validate_pointer_value = lambda self, value: None  # it asks for a CUDA tensor
T, N, K, gated, rows, bias = 2048, 1536, 512, {gated}, {rows}, {bias}
codes = lambda *shape: torch.empty(shape, dtype=torch.float8_e4m3fn)
out = codes(T, N // 2 if gated else N)
given = dict(x_scale=torch.empty(1), w_scale=torch.empty(1, N) if rows else torch.empty(1), out_scale=torch.empty(1))
given |= dict(bias=torch.empty(1, N, dtype=torch.bfloat16)) if bias else dict()
given |= dict(codes=out) if gated else dict()
tile = gemm_epilogue.CodesTiling()
codes_epilogue("{activation}", gated=gated, rows=rows, bias=bias).gemm(
    codes(T, K), codes(N, K), None if gated else out, epi_args=given, tile_M=tile.tile_m, tile_N=tile.tile_n,
    cluster_M=tile.cluster_m, cluster_N=tile.cluster_n, pingpong=tile.pingpong,
    is_dynamic_persistent=tile.dynamic, tile_count_semaphore=torch.zeros(1, dtype=torch.int32),
    concat_layout=(("B", "w_scale") if rows else ("B",)) if gated else None, _launch=False)
"""


def test_without_its_packages_the_functions_say_why(monkeypatch):
    """Then GELU is quack's own, should it be there without what ours needs."""
    monkeypatch.setattr(epilogue_functions, "MISSING", ImportError("no such package"))
    with pytest.raises(ImportError, match="no such package"):
        epilogue_functions.codes_epilogue.__wrapped__("gelu", gated=False, rows=True, bias=True)
    assert gemm_epilogue._gelu.__wrapped__() == "gelu_erf"


def test_rounding_the_product_first_moves_few_codes():
    """What the epilogue's single rounding changes beside the passes apart, which round the product to bf16 too."""
    x, sx, w, sw, bias = codes_of_a_layer(256, 512, 1024, "cpu", whole=False)
    scale = torch.tensor([0.01])
    one = scaled_linear_ref(x, sx, w, sw, bias, "gelu", torch.bfloat16, out_scale=scale)
    product = scaled_linear_ref(x, sx, w, sw, bias, None, torch.bfloat16)
    apart = steps_apart(one, activate_quantize_ref(product, "gelu", scale))
    # bf16's half step, 2**-9, beside the width of a code, 2**-3 to 2**-4: up to one in 24 lies so near to a border.
    assert (apart > 0).float().mean() < 0.04
    assert (apart[one.float().abs() > 8] <= 1).all()


@pytest.mark.parametrize(
    ("change", "served"),
    [
        ({}, True),
        ({"activation": None}, False),
        ({"x_scale": torch.ones(1500, 1)}, False),
        ({"w_scale": torch.ones(2, 1)}, False),
        ({"w_scale": torch.ones(256)}, True),
        ({"k": 64}, False),
        ({"n": 96}, False),
        ({"dtype": torch.int8}, False),
    ],
)
def test_which_codes_are_served(monkeypatch, change, served):
    monkeypatch.setattr(gemm_epilogue, "_on_hopper", lambda device: True)
    monkeypatch.setattr(gemm_epilogue, "_quack", lambda: object())
    given = {"k": 128, "n": 256, "dtype": FP8, "activation": "gelu", "x_scale": torch.ones(1), "w_scale": torch.ones(1)}
    given |= change
    x, w = (torch.zeros(rows, given["k"], dtype=given["dtype"]) for rows in (1500, given["n"]))
    found = gemm_epilogue.serves_codes(x, given["x_scale"], w, given["w_scale"], given["activation"], gated=False)
    assert found == served
    assert not gemm_epilogue.serves_codes(
        torch.zeros(5, 128).bfloat16(), torch.ones(1), w, torch.ones(1), "gelu", gated=True
    )


@pytest.mark.parametrize("fails", [False, True])
def test_layers_bring_codes_here(monkeypatch, fails):
    """With an activation and codes behind; what fails is made by the passes apart, and asked for once."""
    asked = []

    class Kernel:
        def gemm(self, x, weight, out, epi_args, **tiling):
            asked.append((sorted(epi_args), tiling["concat_layout"]))
            if fails:
                raise RuntimeError("no such instruction")
            (epi_args["codes"] if out is None else out).copy_(torch.ones(1))

    class Functions:
        @staticmethod
        def codes_epilogue(activation, gated, rows, bias):
            return Kernel()

    monkeypatch.setattr(gemm_epilogue, "_failed", set())
    monkeypatch.setattr(gemm_epilogue, "_on_hopper", lambda device: True)
    monkeypatch.setattr(gemm_epilogue, "_quack", lambda: object())
    monkeypatch.setattr(gemm_epilogue, "_functions", Functions)
    monkeypatch.setattr(scaled_mm, "runs_triton", lambda x: True)
    monkeypatch.setattr(scaled_mm, "_tile", lambda *args: None)
    x, sx, w, sw, bias = codes_of_a_layer(96, 256, 128, "cpu", whole=False)
    scale = torch.tensor([0.01])

    def linear_of(activation, bias, gated, out_scale=scale):
        return scaled_mm.scaled_linear(x, sx, w, sw, bias, activation, torch.bfloat16, gated=gated, out_scale=out_scale)

    for _ in range(2):
        out = linear_of("gelu", bias, False)
        product = scaled_mm._library(x, sx, w, sw, bias, torch.bfloat16)
        expected = activate_quantize_ref(product, "gelu", scale) if fails else torch.ones(96, 256).to(FP8)
        assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
    assert asked == [(["bias", "out_scale", "w_scale", "x_scale"], None)] * (1 if fails else 2)
    asked.clear()
    assert linear_of(None, None, True).shape == (96, 128)
    assert asked == [(["codes", "out_scale", "w_scale", "x_scale"], ("B", "w_scale"))]
    asked.clear()
    assert linear_of("gelu", bias, False, None).dtype == torch.bfloat16  # no codes behind
    assert linear_of(None, bias, False).dtype == FP8  # nothing to take along
    assert linear_of("silu", bias, True).dtype == FP8  # the bias of a pair
    assert not asked


def test_a_cpu_is_not_served():
    assert not gemm_epilogue.serves(torch.empty(2000, 64, dtype=torch.bfloat16), 64, "gelu", gated=False)


@pytest.mark.parametrize(
    ("n", "k", "activation", "gated"),
    [(63, 64, None, False), (63, 64, "gelu", False), (64, 64, "gelu", True), (64, 64, None, True)],
)
def test_what_it_cannot_do_stays_apart(monkeypatch, n, k, activation, gated):
    """None for shapes off its tiles, no gated pair of the erf form or of none."""
    monkeypatch.setattr(gemm_epilogue, "_on_hopper", lambda device: True)
    monkeypatch.setattr(gemm_epilogue, "_quack", lambda: object())
    x = torch.empty(2000, k, dtype=torch.bfloat16)
    assert gemm_epilogue.serves(x, 64, "silu", gated=True)
    assert not gemm_epilogue.serves(x, n, activation, gated=gated)


def test_what_fails_is_asked_for_once(monkeypatch):
    """A compiler that does not fit costs the epilogue, not the answer."""

    class Broken:
        calls = 0

        def gemm_act(self, *args, **kwargs):
            self.calls += 1
            raise RuntimeError("no such instruction")

    broken = Broken()
    monkeypatch.setattr(gemm_epilogue, "_failed", set())
    monkeypatch.setattr(gemm_epilogue, "_gelu", lambda: "ours")
    monkeypatch.setattr(gemm_epilogue, "_on_hopper", lambda device: True)
    monkeypatch.setattr(gemm_epilogue, "_quack", lambda: broken)
    monkeypatch.setattr(linear, "runs_onednn", lambda x: False)
    x, w, b = torch.randn(3, 64).bfloat16(), torch.randn(128, 64).bfloat16(), torch.randn(128).bfloat16()
    for _ in range(2):
        assert torch.equal(linear.linear(x, w, b, "gelu"), F.gelu(F.linear(x, w, b)))
    assert broken.calls == 1
    gate, up = F.linear(x, w).chunk(2, -1)
    assert torch.equal(linear.linear_gated(x, w, "silu"), F.silu(gate) * up)
    assert broken.calls == 2


def test_large_products_come_here(monkeypatch):
    """With its activation, to the one that serves it; without one, to the library."""
    called = []
    monkeypatch.setattr(gemm_epilogue, "serves", lambda x, n, activation, gated: activation is not None)
    monkeypatch.setattr(gemm_epilogue, "linear_epilogue", lambda *args: called.append("linear") or args[0])
    monkeypatch.setattr(gemm_epilogue, "linear_gated_epilogue", lambda *args: called.append("gated") or args[0])
    monkeypatch.setattr(linear, "runs_onednn", lambda x: False)
    x, w = torch.randn(3, 64), torch.randn(128, 64)
    linear.linear(x, w, None, "gelu")
    linear.linear_gated(x, w, "silu")
    assert called == ["linear", "gated"]
    assert torch.equal(linear.linear(x, w), F.linear(x, w))


def test_without_an_activation_only_where_that_was_measured(monkeypatch):
    asked = []

    def epilogue(x, weight, bias, activation):
        asked.append((tuple(weight.shape), bias is not None, activation))
        return F.linear(x, weight, bias)

    monkeypatch.setattr(gemm_epilogue, "_on_hopper", lambda device: True)
    monkeypatch.setattr(gemm_epilogue, "_quack", lambda: object())
    monkeypatch.setattr(gemm_epilogue, "linear_epilogue", epilogue)
    monkeypatch.setattr(linear, "runs_onednn", lambda x: False)
    x, w, bias = (torch.randn(*shape).bfloat16() for shape in ((1500, 64), (128, 64), (128,)))
    expected = F.linear(x, w, bias), F.linear(x, w)[None]
    for variant, calls in (("library", []), ("epilogue", [((128, 64), True, None), ((128, 64), False, None)])):
        asked.clear()
        with tiles.preferring("linear:128x64", "large", variant), tiles.preferring("partial:128x64", "large", variant):
            assert torch.equal(linear.linear(x, w, bias), expected[0])
            assert torch.equal(linear.linear_partial(x, w), expected[1])
        assert asked == calls


def test_the_table_gives_some_products_here_and_a_measurement_goes_first():
    """q, k and v of both published shapes, of many tokens alone."""
    for n in (3072, 4096):
        name = f"linear:{n}x1024"
        assert tiles.choose("linear", n, 1024, 8192) is None
        assert [tiles.prefers_epilogue("linear", n, 1024, tokens) for tokens in (512, 1024, 1025, 16384)] == [
            False,
            False,
            True,
            True,
        ]
        with tiles.preferring(name, "large", "library"):
            assert not tiles.prefers_epilogue("linear", n, 1024, 16384)
    assert not tiles.prefers_epilogue("partial", 1024, 4096, 16384)
