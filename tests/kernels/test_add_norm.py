"""Residual add + norm against torch in fp64, at odd widths, with and without bias, for several split counts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rose.kernels import add_norm

WIDTHS = [1, 17, 384, 1000]


def pieces(place, count, rows, width):
    """Split-K pieces are fp32; an unsplit product is in the model's dtype."""
    partial = torch.randn(count, rows, width, device=place.device)
    return partial if count > 1 else partial.to(place.dtype)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("count", "with_bias"), [(1, True), (3, True), (4, False)])
def test_add_layer_norm(place, close, width, count, with_bias):
    partial, residual = pieces(place, count, 5, width), place.randn(5, width)
    weight, norm_bias = place.randn(width), place.randn(width)
    bias = place.randn(width) if with_bias else None
    out = add_norm.add_layer_norm_triton(partial, bias, residual, weight, norm_bias, 1e-5)
    x = residual.double() + partial.double().sum(0) + (0 if bias is None else bias.double())
    expected = F.layer_norm(x, (width,), weight.double(), norm_bias.double(), 1e-5)
    close(out, expected)
    close(add_norm.add_layer_norm_ref(partial, bias, residual, weight, norm_bias, 1e-5), expected)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [1, 2, 8])
def test_add_rms_norm(place, close, width, count):
    partial, residual, weight = pieces(place, count, 5, width), place.randn(5, width), place.randn(width)
    out, stream = add_norm.add_rms_norm_triton(partial, residual, weight, 1e-6)
    expected_stream = residual.double() + partial.double().sum(0)
    close(stream, expected_stream)
    close(out, F.rms_norm(stream.double(), (width,), weight.double(), 1e-6))
    ref, ref_stream = add_norm.add_rms_norm_ref(partial, residual, weight, 1e-6)
    close(ref_stream, expected_stream)
    close(ref, F.rms_norm(ref_stream.double(), (width,), weight.double(), 1e-6))


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(place, close, width):
    x, weight = place.randn(3, width), place.randn(width)
    kept = x.clone()
    close(add_norm.rms_norm_triton(x, weight, 1e-6), F.rms_norm(x.double(), (width,), weight.double(), 1e-6))
    assert torch.equal(x, kept)


def test_mean_far_from_zero(place, close):
    """The variance is that of the centred row: a large common offset does not cancel it away."""
    residual = place.randn(4, 256) + 200
    partial = torch.zeros(1, 4, 256, device=place.device, dtype=place.dtype)
    one, zero = torch.ones_like(residual[0]), torch.zeros_like(residual[0])
    out = add_norm.add_layer_norm_triton(partial, None, residual, one, zero, 1e-5)
    close(out, F.layer_norm(residual.double(), (256,)), factor=40 if place.dtype is torch.float32 else 1)


def test_a_rows_value_does_not_depend_on_its_neighbours(place):
    partial, residual, weight = pieces(place, 3, 6, 384), place.randn(6, 384), place.randn(384)
    whole = add_norm.add_layer_norm_triton(partial, None, residual, weight, weight, 1e-5)
    part = add_norm.add_layer_norm_triton(partial[:, 2:3].contiguous(), None, residual[2:3], weight, weight, 1e-5)
    assert torch.equal(whole[2:3], part)


def test_no_rows(place):
    weight = place.randn(64)
    out, stream = add_norm.add_rms_norm_triton(place.randn(2, 0, 64), place.randn(0, 64), weight, 1e-6)
    assert out.shape == stream.shape == (0, 64)


def test_strided_input_is_refused(place):
    x = place.randn(4, 128)[:, :64]
    with pytest.raises(ValueError, match="residual must be contiguous"):
        add_norm.rms_norm_triton(x, place.randn(64), 1e-6)
