"""Layers of 8-bit codes where the library multiplies: scales of every form, prepared once, anew when they change."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rose.convert.quantized.place import Part, build_layer
from rose.convert.quantized.reading import Coded
from rose.convert.quantized.schemes import Scheme
from rose.kernels import scaled_mm
from rose.kernels.quantize import FP8
from rose.layers.linear import Linear
from rose.layers.quantized import QuantizedLinear
from tests.support.launched import Launched

CUDA = torch.device("cuda")
TOKENS, WIDTH, ROWS = 300, 64, 48
FORMS = ["settled x tensor", "settled x rows", "settled x parts", "tokens x tensor", "tokens x rows", "tokens x parts"]


@pytest.fixture
def library(monkeypatch):
    """Layers take the way of many tokens on a GPU: `torch._scaled_mm` runs on the CPU too."""
    monkeypatch.setattr(scaled_mm, "runs_triton", lambda x: True)
    monkeypatch.setattr(scaled_mm, "_tile", lambda *args: None)
    monkeypatch.setattr(scaled_mm, "_ones", {})


def layer_of(form, device="cpu"):
    """As a checkpoint's weights are placed: one tensor, or three of own scales that became one product."""
    torch.manual_seed(0)
    of_x, of_w = form.split(" x ")
    settled = torch.tensor([0.05]) if of_x == "settled" else None
    scheme = Scheme(
        name="fp8",
        codes="F8_E4M3",
        weight="channel" if of_w == "rows" else "tensor",
        activations="token" if settled is None else "static",
    )
    counts = {"tensor": [ROWS], "rows": [ROWS], "parts": [16, 24, 8]}[of_w]
    parts = []
    for at, count in enumerate(counts):
        scale = torch.rand(count) + 0.1 if of_w == "rows" else torch.tensor([0.1 * (at + 1)])
        parts.append(Part(count, scheme, Coded(torch.randn(count, WIDTH).to(FP8), scale, settled)))
    layer = build_layer(Linear(WIDTH, ROWS), parts, torch.device(device), torch.bfloat16)
    assert isinstance(layer, QuantizedLinear)
    assert layer.weight_scale.numel() == (1 if of_w == "tensor" else ROWS)
    return layer


def made_each_time(layer, codes, x_scale):
    """The library's product with scales made from the layer's for this one call: [T, N]."""
    w_scale, n = layer.weight_scale, layer.weight.shape[0]
    if x_scale.numel() > 1 or w_scale.numel() > 1:
        if x_scale.dim() == 1:
            w_scale, x_scale = w_scale * x_scale, torch.ones(len(codes), 1)
        w_scale = w_scale.expand(n).reshape(1, n).contiguous()
    return torch._scaled_mm(
        codes, layer.weight.t(), scale_a=x_scale, scale_b=w_scale, bias=layer.bias, out_dtype=torch.bfloat16
    )


def inputs_of(layer, monkeypatch):
    """(codes [T, K], scales) that the layer is handed: quantising is its own kernel, and not counted here."""
    codes = torch.randn(TOKENS, WIDTH).to(FP8)
    x_scale = torch.rand(TOKENS, 1) + 0.5 if layer.input_scale is None else layer.input_scale
    monkeypatch.setattr(layer, "_codes", lambda x: (x, x_scale))
    return codes, x_scale


@pytest.mark.parametrize("form", FORMS)
def test_a_built_layer_launches_its_product_and_nothing_beside_it(library, monkeypatch, form):
    layer = layer_of(form)
    layer.build(CUDA)
    codes, x_scale = inputs_of(layer, monkeypatch)
    layer(codes)
    with Launched() as launched:
        whole, pieces = layer(codes), layer.partial(codes)
    assert launched.names == ["aten::_scaled_mm"] * 2
    expected = made_each_time(layer, codes, x_scale)
    assert torch.equal(whole, expected)
    assert torch.equal(pieces, expected.unsqueeze(0))
    wide = (codes.float() * x_scale.view(-1, 1)) @ (layer.weight.float() * layer.weight_scale.view(-1, 1)).T
    assert ((whole.float() - wide).abs() <= wide.abs() * 2**-8 + 1e-3).all()


def test_one_scale_a_side_needs_nothing(library, monkeypatch):
    layer = layer_of("settled x tensor")
    layer.build(CUDA)
    layer(inputs_of(layer, monkeypatch)[0])
    assert layer._columns is None
    assert scaled_mm._ones == {}


@pytest.mark.parametrize("form", [form for form in FORMS if form != "settled x tensor"])
@pytest.mark.parametrize("replaced", [False, True])
def test_scales_that_change_once_built(library, monkeypatch, form, replaced):
    """In place or for others: once built again the layer's answer is of the new ones, from where the old ones lay."""
    layer = layer_of(form)
    layer.build(CUDA)
    before, address = layer.weight_scale.clone(), layer._columns.data_ptr()
    old, new = layer.weight_scale, torch.rand_like(before) + 2.0
    if replaced:
        layer.weight_scale = nn.Parameter(new, requires_grad=False)
    else:
        layer.weight_scale.copy_(new)
    if layer.input_scale is not None:
        layer.input_scale.mul_(3.0)
    layer.build(CUDA)
    codes, x_scale = inputs_of(layer, monkeypatch)
    assert torch.equal(layer(codes), made_each_time(layer, codes, x_scale))
    assert layer._columns.data_ptr() == address
    assert torch.equal(old, before if replaced else new)  # nothing was written to what is not the layer's any more


def test_scales_that_change_before_building(library, monkeypatch):
    layer = layer_of("settled x rows")
    layer.load_state_dict(layer.state_dict() | {"weight_scale": torch.rand(ROWS) + 2.0})
    layer.build(CUDA)
    codes, x_scale = inputs_of(layer, monkeypatch)
    assert torch.equal(layer(codes), made_each_time(layer, codes, x_scale))
    assert set(layer.state_dict()) == {"weight", "weight_scale", "input_scale"}  # columns are in no checkpoint


@pytest.mark.gpu
def test_a_graph_goes_on_with_longer_ones_and_with_new_scales(monkeypatch):
    monkeypatch.setattr(scaled_mm, "_ones", {})
    torch.manual_seed(0)
    codes, weight = torch.randn(2048, 256, device="cuda").to(FP8), torch.randn(384, 256, device="cuda").to(FP8)
    w_scale, x_scale = torch.rand(384, device="cuda") + 0.1, torch.full((1,), 0.05, device="cuda")
    layer = QuantizedLinear(weight, w_scale, "static", dtype=torch.bfloat16, input_scale=x_scale)
    layer.build(CUDA)
    plain, graph = layer(codes), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(codes)
    (held,) = scaled_mm._ones.values()
    assert len(held) == 1  # the library served, and the capture made none
    scaled_mm._column_of_ones(1 << 15, codes.device)
    assert len(held) == 2
    graph.replay()
    assert torch.equal(out, plain)
    layer.weight_scale.mul_(2.0)
    layer.build(CUDA)
    graph.replay()
    assert torch.equal(out, plain * 2)  # a power of two, exact in bf16
