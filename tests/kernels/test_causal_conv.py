"""Causal convolution of packed sequences against torch's conv1d on each sequence alone, in any chunking."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from rose.kernels.carried import Carried
from rose.kernels.causal_conv import (
    causal_conv_ref,
    causal_conv_step_ref,
    causal_conv_step_triton,
    causal_conv_triton,
)

# (lengths, channels, width); a sequence shorter than the reach, exactly a block, one more, and several blocks.
SHAPES = [([1], 8, 4), ([3, 1, 2], 160, 4), ([32, 33, 70, 1], 128, 4), ([5, 40], 24, 2), ([2, 9, 1], 16, 6)]


def one_by_one(x, weight, lengths):
    """torch's own convolution, each sequence alone: fp64 [T, C]."""
    parts = []
    for rows in x.double().split(lengths):
        W = weight.shape[-1]
        padded = F.pad(rows.T[None], (W - 1, 0))
        parts.append(F.silu(F.conv1d(padded, weight.double(), groups=weight.shape[0])[0].T))
    return torch.cat(parts)


def bounds_of(place, lengths):
    return place.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


def poisoned_pool(place, rows, channels, width, margin=3):
    """[rows, C, W - 1] of NaN, with more between its rows: what is not to be read shows."""
    memory = torch.full((rows, channels * (width - 1) + margin), torch.nan, dtype=place.dtype, device=place.device)
    return memory[:, : channels * (width - 1)].view(rows, channels, width - 1)


@pytest.mark.parametrize("run", [causal_conv_ref, causal_conv_triton])
@pytest.mark.parametrize(("lengths", "channels", "width"), SHAPES)
def test_whole_sequences(place, close, run, lengths, channels, width):
    """From strided rows, as they lie in a packed product."""
    x = place.randn(sum(lengths), channels + 5)[:, :channels]
    weight = place.randn(channels, 1, width)
    close(run(x, weight, bounds_of(place, lengths)), one_by_one(x, weight, lengths))


@pytest.mark.parametrize("run", [causal_conv_ref, causal_conv_triton])
@pytest.mark.parametrize("cuts", [[1, 1, 1, 1], [3, 37, 2], [40, 1, 1], [2, 2, 38]])
def test_any_chunking(place, close, run, cuts):
    """Three sequences of 42 tokens, cut alike and packed beside a fresh one of another length each time."""
    channels, width, total = 48, 4, sum(cuts)
    x, weight = place.randn(3, total, channels), place.randn(channels, 1, width)
    expected = one_by_one(x.flatten(0, 1), weight, [total] * 3).view(3, total, channels)
    pool = poisoned_pool(place, 9, channels, width)
    rows = place.tensor([5, 2, 7, 1])
    done = 0
    for index, (start, end) in enumerate(pairwise([0, *torch.tensor(cuts).cumsum(0).tolist()])):
        fresh = place.randn(index + 1, channels)
        packed = torch.cat([*x[:, start:end], fresh])
        lengths = [end - start] * 3 + [index + 1]
        carried = Carried(pool, rows, place.tensor([end] * 3 + [index + 1]))
        out = run(packed, weight, bounds_of(place, lengths), carried)
        close(out[: 3 * (end - start)].view(3, -1, channels), expected[:, start:end])
        close(out[3 * (end - start) :], one_by_one(fresh, weight, [index + 1]))
        done = end
    assert done == total
    latest = x[:, -3:].transpose(1, 2)
    assert torch.equal(pool[rows[:3].long()], latest[:, :, -3:]) or total < 3
    untouched = [r for r in range(9) if r not in rows.tolist()]
    assert pool[untouched].isnan().all()


@pytest.mark.parametrize("run", [causal_conv_step_ref, causal_conv_step_triton])
def test_one_token_each(place, close, run):
    """Steps after a prompt, and a sequence of one token that starts in the step, whatever its row holds."""
    channels, width = 300, 4
    x, weight = place.randn(2, 12, channels), place.randn(channels, 1, width)
    expected = one_by_one(x.flatten(0, 1), weight, [12, 12]).view(2, 12, channels)
    pool = poisoned_pool(place, 4, channels, width)
    rows = place.tensor([3, 1])
    causal_conv_ref(x[:, :2].flatten(0, 1), weight, bounds_of(place, [2, 2]), Carried(pool, rows, place.tensor([2, 2])))
    for at in range(2, 12):
        out = run(x[:, at], weight, Carried(pool, rows, place.tensor([at + 1] * 2)))
        close(out, expected[:, at])
    out = run(x[:, 0], weight, Carried(pool, rows, place.tensor([1, 1])))
    close(out, expected[:, 0])
    assert torch.equal(pool[rows.long(), :, -1], x[:, 0])
    assert not pool[rows.long(), :, :-1].any()


def test_step_and_chunk_give_the_same_bits(place):
    channels = 200
    x, weight = place.randn(3, channels), place.randn(channels, 1, 4)
    start = place.randn(5, channels, 3)
    rows, lengths = place.tensor([4, 0, 2]), place.tensor([9, 9, 1])
    pools = [start.clone(), start.clone()]
    step = causal_conv_step_triton(x, weight, Carried(pools[0], rows, lengths))
    chunk = causal_conv_triton(x, weight, bounds_of(place, [1, 1, 1]), Carried(pools[1], rows, lengths))
    assert torch.equal(step, chunk)
    assert torch.equal(*pools)


def test_layouts_that_are_not_served(place):
    x, weight = place.randn(4, 8), place.randn(8, 1, 4)
    bounds = bounds_of(place, [4])
    with pytest.raises(ValueError, match="x must have 8 neighbouring channels"):
        causal_conv_triton(place.randn(4, 9), weight, bounds)
    with pytest.raises(ValueError, match="the pool is"):
        causal_conv_triton(x, weight, bounds, Carried(place.randn(2, 8, 4), bounds[:1], bounds[:1]))
    with pytest.raises(ValueError, match="1 sequences have a row and a length each"):
        causal_conv_triton(x, weight, bounds, Carried(place.randn(2, 8, 3), bounds, bounds))
