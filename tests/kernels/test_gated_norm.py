"""Gated RMSNorm against transformers' Qwen3.5 module, in fp64 arithmetic of its own for the numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rose.kernels.gated_norm import gated_norm_ref, gated_norm_triton


@pytest.mark.parametrize("run", [gated_norm_ref, gated_norm_triton])
@pytest.mark.parametrize(("tokens", "heads", "size"), [(3, 16, 128), (5, 3, 48), (1, 1, 16), (2, 9, 256)])
def test_numbers(place, close, run, tokens, heads, size):
    """The gate's rows lie in a wider product."""
    x, weight = place.randn(tokens, heads, size), place.randn(size)
    gate = place.randn(tokens, heads * size + 7)[:, : heads * size]
    unit = F.rms_norm(x.double(), (size,), eps=1e-6)
    expected = unit * weight.double() * F.silu(gate.double().view(x.shape))
    close(run(x, gate, weight, 1e-6), expected.flatten(1), 2)


@pytest.mark.parametrize("run", [gated_norm_ref, gated_norm_triton])
def test_against_transformers(place, run):
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

    module = Qwen3_5RMSNormGated(64, eps=1e-5).to(place.device)
    module.weight.data.normal_()
    x, gate = place.randn(6, 4, 64), place.randn(6, 256)
    with torch.inference_mode():
        expected = module(x.reshape(-1, 64), gate.reshape(-1, 64)).view(6, 256)
    # The weight stays in fp32, as the release checkpoints store it.
    torch.testing.assert_close(
        run(x, gate, module.weight.data, 1e-5), expected, rtol=4 * place.tolerance, atol=4 * place.tolerance
    )


def test_zero_rows_stay_zero(place):
    out = gated_norm_triton(place.randn(2, 3, 32) * 0, place.randn(2, 96), place.randn(32), 1e-6)
    assert not out.any()


def test_layouts_that_are_not_served(place):
    with pytest.raises(ValueError, match=r"gate must be \(2, 96\)"):
        gated_norm_triton(place.randn(2, 3, 32), place.randn(2, 95), place.randn(32), 1e-6)
