"""Choosing tokens with the kernels: the same tokens as the torch reference, whatever is left out."""

from __future__ import annotations

import pytest
import torch

from rose.kernels.greedy import greedy_triton
from rose.kernels.sample import MIN_TEMPERATURE, NOT_FINITE, greedy_ref, sample_ref
from rose.kernels.sample_triton import sample_triton

# (temperature, top_k, top_p, min_p)
SETTINGS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 20, 0.95, 0.0),
    (0.6, 20, 0.8, 0.02),
    (1.3, 1, 1.0, 0.0),
    (0.0, 20, 0.5, 0.0),
    (1.0, 64, 0.3, 0.0),
    (1.0, 65, 1.0, 0.0),
    (1.5, 200, 0.9, 0.0),
    (0.8, 0, 0.9, 0.0),
    (2.0, 0, 0.4, 0.01),
    (1.0, 0, 1.0, 0.1),
    (1.0, 0, 0.0, 0.0),
    (1.0, 30, 1.0, 1.0),
    (1e-6, 0, 0.9, 0.0),
    (1.0, 10_000_000, 1.0, 0.0),
]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, place):
    """Logits are fp32 wherever they come from: the place's dtype does not matter."""
    if place.dtype is not torch.float32 or place.device.type != request.param:
        pytest.skip("one dtype a device is enough")
    return torch.device(request.param)


def rows_of(settings, device, seed=0, steps=0):
    columns = list(zip(*settings, strict=True))
    count = len(settings)
    kinds = (torch.float32, torch.int32, torch.float32, torch.float32)
    rows = [torch.tensor(column, dtype=kind, device=device) for column, kind in zip(columns, kinds, strict=True)]
    seeds = torch.arange(count, device=device) * 12345678901234567 + seed
    return (*rows, seeds, torch.arange(count, dtype=torch.int32, device=device) + steps)


def same_tokens(logits, rows, limit):
    drawn = sample_triton(logits, *rows, limit, MIN_TEMPERATURE)
    assert drawn.dtype is torch.int32
    expected = sample_ref(logits.cpu(), *(x.cpu() for x in rows), limit)
    assert drawn.tolist() == expected.tolist()
    return drawn


@pytest.mark.parametrize("vocabulary", [3, 100, 5000, 20_001])
def test_the_same_token_as_the_reference(device, vocabulary):
    for number in range(3 if vocabulary < 5000 else 1):
        logits = (torch.randn(len(SETTINGS), vocabulary) * (1 + number)).to(device)
        same_tokens(logits, rows_of(SETTINGS, device, number, 7 * number), vocabulary)


def test_equal_logits_are_cut_by_id(device):
    """Rounded as bf16 heads round them, many logits tie: which of them are kept is still exact."""
    logits = torch.randn(len(SETTINGS), 9000).mul(2).round().to(device)
    same_tokens(logits, rows_of(SETTINGS, device, 3), 9000)
    same_tokens(torch.zeros_like(logits), rows_of(SETTINGS, device, 4), 9000)


def test_beyond_the_limit_and_banned_tokens(device):
    logits = torch.randn(len(SETTINGS), 5100)
    logits[:, 5000:] = 50.0
    logits[:, ::3] = -torch.inf
    logits = logits.to(device)
    drawn = same_tokens(logits, rows_of(SETTINGS, device), 5000)
    assert int(drawn.max()) < 5000
    assert (drawn % 3 != 0).all()
    view = torch.zeros(len(SETTINGS), 6000, device=device)[:, :5100].copy_(logits)
    assert torch.equal(sample_triton(view, *rows_of(SETTINGS, device), 5000, MIN_TEMPERATURE), drawn)
    few = torch.full((len(SETTINGS), 3000), -torch.inf)
    few[:, [70, 2050, 2999]] = torch.tensor([0.5, 1.0, 0.0])
    assert set(same_tokens(few.to(device), rows_of(SETTINGS, device), 3000).tolist()) <= {70, 2050, 2999}


def test_a_row_draws_the_same_whatever_the_company(device):
    logits = torch.randn(len(SETTINGS), 4500).to(device)
    rows = rows_of(SETTINGS, device)
    together = sample_triton(logits, *rows, 4500, MIN_TEMPERATURE)
    for at in (1, 8):
        alone = sample_triton(logits[at : at + 1], *(x[at : at + 1] for x in rows), 4500, MIN_TEMPERATURE)
        assert int(alone[0]) == int(together[at])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_that_are_not_finite(device, bad):
    logits = torch.randn(len(SETTINGS), 4500).to(device)
    rows = rows_of(SETTINGS, device)
    expected = sample_triton(logits, *rows, 4500, MIN_TEMPERATURE)
    logits[2, 4400] = logits[8, 0] = bad
    logits[9] = -torch.inf
    drawn = sample_triton(logits, *rows, 4500, MIN_TEMPERATURE)
    for row in (2, 8, 9):
        assert drawn[row] == NOT_FINITE
        assert greedy_triton(logits, 4500)[row] == NOT_FINITE
        expected[row] = NOT_FINITE
    assert torch.equal(drawn, expected)


@pytest.mark.parametrize("vocabulary", [1, 1024, 1025, 5000])
def test_greedy(device, vocabulary):
    logits = torch.randn(5, vocabulary + 9).mul(3).round().to(device)
    for limit in (vocabulary, vocabulary + 9):
        assert torch.equal(greedy_triton(logits, limit).cpu(), greedy_ref(logits.cpu(), limit))
    logits[:, 0] = 100.0
    logits[1, vocabulary - 1] = 100.0
    assert (greedy_triton(logits, vocabulary) == 0).all()


def test_what_does_not_fit_is_refused(device):
    logits = torch.randn(2, 50).to(device)
    rows = rows_of(SETTINGS[:2], device)
    with pytest.raises(ValueError, match="at least 51 values"):
        greedy_triton(logits, 51)
    with pytest.raises(ValueError, match="must be fp32"):
        greedy_triton(logits.double(), 50)
    with pytest.raises(ValueError, match="top_p must have a value for each of 2 rows"):
        sample_triton(logits, *rows[:2], rows[2][:1], *rows[3:], 50, MIN_TEMPERATURE)
