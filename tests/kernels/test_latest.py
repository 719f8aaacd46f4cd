"""Tokens that wait on the device for the batch that goes on from them."""

from __future__ import annotations

import pytest
import torch

from rose.kernels.latest import keep_latest_ref, keep_latest_triton, take_latest_ref, take_latest_triton


@pytest.mark.parametrize("take", [take_latest_ref, take_latest_triton])
@pytest.mark.parametrize("tokens", [1, 64, 1500])
def test_negative_ids_are_lanes(place, take, tokens):
    latest = place.tensor([1000 + lane for lane in range(40)])
    ids = [(-1 - i % 40) if i % 3 else i for i in range(1, tokens + 1)]
    expected = [i if i >= 0 else 1000 - 1 - i for i in ids]
    assert take(place.tensor(ids), latest).tolist() == expected


@pytest.mark.parametrize("keep", [keep_latest_ref, keep_latest_triton])
@pytest.mark.parametrize("columns", [1, 12])
def test_the_latest_of_each_lane(place, keep, columns):
    """The first column of a wider matrix; lane 0 is everybody's."""
    latest = place.tensor([7] * 70)
    drawn = torch.full((66, columns), 5, dtype=torch.int32, device=place.device)
    drawn[:, 0] = place.tensor([100 + i if i != 9 else -1 for i in range(66)])
    lanes = [66 - i for i in range(64)] + [0, 0]
    keep(drawn[:, 0], place.tensor(lanes), latest)
    found = latest.tolist()
    assert found[0] in (164, 165)
    assert [found[lane] for lane in lanes[:64]] == [100 + i if i != 9 else 0 for i in range(64)]
    assert (found[1], found[2], found[67:]) == (7, 7, [7, 7, 7])


def test_strided_ids_are_refused(place):
    with pytest.raises(ValueError, match="ids must be contiguous"):
        take_latest_triton(place.tensor([1, 2, 3, 4])[::2], place.tensor([1]))
