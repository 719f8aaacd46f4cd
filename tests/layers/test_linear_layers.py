"""Linear layers against torch.nn, before and after their weights are laid out for the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rose.kernels.onednn_linear import pack_weight, runs_onednn
from rose.layers.linear import GatedLinear, Linear, pack_linears

REFERENCE = {None: lambda x: x, "gelu": F.gelu, "relu": F.relu, "silu": F.silu}
REFERENCE["gelu_tanh"] = lambda x: F.gelu(x, approximate="tanh")


def filled(module, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        parameter.data = (torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5).to(dtype)
    return module


def rows(count, size, dtype=torch.float32):
    return torch.randn(count, size, generator=torch.Generator().manual_seed(4)).to(dtype)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", REFERENCE)
@pytest.mark.parametrize("tokens", [1, 7, 130])
def test_linear(tokens, activation, bias, packed):
    layer = filled(Linear(48, 80, bias=bias, activation=activation))
    x = rows(tokens, 48)
    plain = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    expected, whole = REFERENCE[activation](plain), layer.weight.double()
    if packed:
        pack_linears(layer)
    torch.testing.assert_close(layer(x).double(), expected, rtol=0, atol=3e-6)
    pieces = layer.partial(x)
    assert pieces.shape[1:] == (tokens, 80)
    torch.testing.assert_close(pieces.double().sum(0), x.double() @ whole.T, rtol=0, atol=3e-6)
    if activation is None:
        torch.testing.assert_close(layer.pieces(x).double().sum(0), expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_gated(packed):
    layer = filled(GatedLinear(48, 80, "silu"))
    x = rows(7, 48)
    gate, up = (x.double() @ layer.weight.double().T).chunk(2, dim=-1)
    if packed:
        pack_linears(layer)
    torch.testing.assert_close(layer(x).double(), F.silu(gate) * up, rtol=0, atol=3e-6)


def test_packing_keeps_every_bit():
    weight = rows(33, 70)
    assert torch.equal(pack_weight(weight).to_dense(), weight)


def test_packing_leaves_half_precision_alone():
    layer = filled(Linear(48, 80, bias=True), torch.bfloat16)
    weight = layer.weight.data.clone()
    pack_linears(layer)
    assert torch.equal(layer.weight, weight)
    x = rows(5, 48, torch.bfloat16)
    assert not runs_onednn(x)
    expected = F.linear(x.double(), weight.double(), layer.bias.double())
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-2, atol=1e-2)


def test_layers_are_not_trained():
    assert not any(p.requires_grad for p in Linear(4, 4, bias=True).parameters())
