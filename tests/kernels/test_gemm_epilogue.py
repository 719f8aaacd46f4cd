"""Large products with their activation in the epilogue, against fp64; who comes here and who does not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rose.kernels import gemm_epilogue, linear, tiles

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
