"""The gather and the norm behind it against both of torch, one after another."""

from __future__ import annotations

import pytest
import torch

from rose.kernels.add_norm import rms_norm_triton
from rose.kernels.embed_rms_norm import embed_rms_norm_ref, embed_rms_norm_triton


@pytest.mark.parametrize("run", [embed_rms_norm_ref, embed_rms_norm_triton])
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (7, 1024), (3, 2560), (5, 96)])
def test_rows_and_their_norm(place, close, run, tokens, width):
    table = place.randn(50, width, scale=3.0)
    table[49] = torch.nan  # a row that nobody asks for
    weight = place.randn(width)
    ids = [(17 * i) % 49 for i in range(tokens - 1)] + [48]
    out, stream = run(place.tensor(ids), table, weight, 1e-6)
    assert torch.equal(stream, table[ids])
    rows = table[ids].double()
    close(out, rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double())


def test_the_bits_of_the_norm_alone(place):
    table, weight = place.randn(50, 1024), place.randn(1024)
    out, stream = embed_rms_norm_triton(place.tensor([3, 3, 0, 49]), table, weight, 1e-6)
    assert torch.equal(out, rms_norm_triton(stream, weight, 1e-6))
    assert torch.equal(out[0], out[1])


def test_a_gain_in_fp32(place, close):
    """As norms have it whose weight is what the gain is above one."""
    table, gain = place.randn(9, 256), torch.randn(256, device=place.device)
    out, _ = embed_rms_norm_triton(place.tensor([8, 1]), table, gain, 1e-5)
    close(out, embed_rms_norm_ref(place.tensor([8, 1]), table.double(), gain.double(), 1e-5)[0])


def test_strided_ids_are_refused(place):
    with pytest.raises(ValueError, match="ids must be contiguous"):
        embed_rms_norm_triton(place.tensor([1, 2, 3, 4])[::2], place.randn(9, 64), place.randn(64), 1e-6)
