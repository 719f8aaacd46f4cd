"""The output gate of attention, whose halves lie between the query heads."""

from __future__ import annotations

import pytest
import torch

from rose.kernels.sigmoid_gate import sigmoid_gate_ref, sigmoid_gate_triton


@pytest.mark.parametrize("run", [sigmoid_gate_ref, sigmoid_gate_triton])
@pytest.mark.parametrize(("heads", "head_dim"), [(16, 256), (3, 48), (1, 16)])
def test_numbers(place, close, run, heads, head_dim):
    packed = place.randn(3, 2 * heads * head_dim + 32) * 6
    x = place.randn(3, heads, head_dim)
    both = packed[:, : 2 * heads * head_dim].double().view(3, heads, 2 * head_dim)
    expected = x.double() * torch.sigmoid(both[:, :, head_dim:])
    close(run(x, packed), expected.flatten(1))


def test_rows_too_short_are_refused(place):
    with pytest.raises(ValueError, match="4 heads and gates of 32 do not fit"):
        sigmoid_gate_triton(place.randn(2, 4, 32), place.randn(2, 255))
