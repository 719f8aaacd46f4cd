"""Sampling as written in torch: its random numbers against published ones, what is left out against transformers, what
is drawn against the probabilities."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rose.kernels.philox import exponential_ref, philox
from rose.kernels.sample import NOT_FINITE, greedy_ref, kept_ref, logprobs_ref, sample_ref
from tests.kernels.conftest import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="torch alone: the plain run has it")
# The 99.9 % points of chi-square by degrees of freedom.
CHI_SQUARE = {3: 16.27, 5: 20.52, 15: 37.70, 63: 103.4}


def draw(logits, count, seed=0, vocab_limit=None, **settings):
    """`count` draws from one row of logits, a step each."""

    def full(name, default, dtype):
        return torch.full((count,), settings.get(name, default), dtype=dtype)

    return sample_ref(
        logits.expand(count, -1),
        full("temperature", 1.0, torch.float32),
        full("top_k", 0, torch.int32),
        full("top_p", 1.0, torch.float32),
        full("min_p", 0.0, torch.float32),
        full("seed", seed, torch.int64),
        torch.arange(count, dtype=torch.int32),
        vocab_limit or logits.shape[-1],
    )


def chi_square(ids, expected):
    """Of the draws against the probabilities `expected`; every draw must be possible."""
    counts = torch.bincount(ids.long(), minlength=len(expected)).double()
    assert (counts[expected == 0] == 0).all()
    possible = expected > 0
    wanted = expected[possible].double() * len(ids)
    assert wanted.min() > 5
    return float(((counts[possible] - wanted).square() / wanted).sum()), int(possible.sum()) - 1


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, expected):
    """The known-answer vectors of Random123, where Philox comes from."""
    words = philox(tuple(torch.tensor([c]) for c in counter), key)
    assert tuple(int(w) for w in words) == expected


def test_exponential_numbers_are_exponential_and_belong_to_their_ids():
    ids = torch.arange(150_000)
    e = exponential_ref(-(2**63) + 12345, 7, ids)
    assert torch.equal(exponential_ref(-(2**63) + 12345, 7, ids[70_001:70_005]), e[70_001:70_005])
    assert abs(float(e.mean()) - 1) < 0.01
    # Kolmogorov and Smirnov's distance, at 99.9 %.
    distance = (-torch.expm1(-e.double().sort().values) - (ids + 0.5) / len(ids)).abs().max()
    assert float(distance) < 1.95 / len(ids) ** 0.5
    assert len(e.unique()) > 0.99 * len(e)
    for other in (exponential_ref(-(2**63) + 12346, 7, ids), exponential_ref(-(2**63) + 12345, 8, ids)):
        assert (other == e).float().mean() < 1e-3


def test_small_exponential_numbers_keep_their_precision():
    """Tokens of probability 1e-7 win by numbers of 1e-7: their low bits must not all be the same."""
    e = exponential_ref(3, 0, torch.arange(1 << 22))
    small = e[e < 1e-5]
    assert 20 < len(small) < 70
    assert len(small.unique()) == len(small)


def test_greedy_takes_the_lowest_of_equal_ones_below_the_limit():
    logits = torch.tensor([[0.0, 3.0, 3.0, 9.0], [-torch.inf, -5.0, -torch.inf, 0.0], [1.0, 1.0, 1.0, 2.0]])
    assert greedy_ref(logits, 3).tolist() == [1, 1, 0]
    assert greedy_ref(logits, 4).tolist() == [3, 3, 3]
    assert greedy_ref(logits, 4).dtype is torch.int32


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_say_so_and_spoil_no_other(bad):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    expected = draw(logits[0], 3)
    logits[1, 20] = bad
    assert greedy_ref(logits, 50).tolist() == [int(logits[0].argmax()), NOT_FINITE, int(logits[2].argmax())]
    for _ in range(2):
        one = torch.ones(3)
        ids = sample_ref(logits, one, one.int() * 0, one, one * 0, one.long() * 0, torch.arange(3).int(), 50)
        assert ids[1] == NOT_FINITE
        assert ids[0] == expected[0]
    assert greedy_ref(logits, 20)[1] >= 0  # it lies beyond the limit
    assert greedy_ref(torch.full((1, 9), -torch.inf), 9).tolist() == [NOT_FINITE]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 5, 50, 5000])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.4, 0.0])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.5, 1.0])
def test_what_is_kept_is_what_transformers_keeps(temperature, top_k, top_p, min_p):
    row = torch.randn(1, 2000, generator=torch.Generator().manual_seed(top_k)) * 3
    scores = TemperatureLogitsWarper(temperature)(None, row)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    kept = kept_ref(row[0], temperature, top_k, top_p, min_p)
    assert sorted(kept.tolist()) == scores[0].isfinite().nonzero().squeeze(1).tolist()


def test_equal_logits_are_cut_by_id():
    row = torch.tensor([1.0, 5.0, 5.0, 0.0, 5.0, 5.0])
    assert kept_ref(row, 1.0, 1, 1.0, 0.0).tolist() == [1]
    assert kept_ref(row, 1.0, 3, 1.0, 0.0).tolist() == [1, 2, 4]
    assert kept_ref(row, 1.0, 0, 0.5, 0.0).tolist() == [1, 2, 4]
    assert kept_ref(row, 1.0, 0, 1.0, 1.0).tolist() == [1, 2, 4, 5]
    assert set(draw(row, 200, top_k=1).tolist()) == {1}


@pytest.mark.parametrize(("seed", "temperature"), [(0, 0.5), (17, 1.0), (-5, 2.0), (2**63 - 1, 1.0)])
def test_draws_follow_the_probabilities(seed, temperature):
    row = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5])
    statistic, freedom = chi_square(draw(row, 4000, seed, temperature=temperature), (row / temperature).softmax(-1))
    assert statistic < CHI_SQUARE[freedom]


def test_draws_follow_the_probabilities_of_what_is_kept():
    row = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -3.0, 1.9])
    expected = row.clone()
    expected[row < row.topk(4).values[-1]] = -torch.inf
    statistic, freedom = chi_square(draw(row, 4000, 1, top_k=4), expected.softmax(-1))
    assert statistic < CHI_SQUARE[freedom]
    statistic, freedom = chi_square(draw(row, 4000, 2, top_p=0.8), expected.softmax(-1))  # three weigh 0.76, four 0.87
    assert freedom in CHI_SQUARE
    assert statistic < CHI_SQUARE[freedom]


def test_tokens_of_one_counter_are_drawn_independently():
    """Ids 1024 apart share a counter and differ by word; neighbours differ by counter."""
    row = torch.full((5000,), -torch.inf)
    at = torch.cat([torch.arange(8) + 1024 * i for i in range(2)])
    row[at] = 0.0
    row[4096 + 3] = row[3] = -torch.inf
    statistic, freedom = chi_square(draw(row, 6000, 5), row.softmax(-1))
    assert freedom == 14
    assert statistic < 36.1


def test_a_row_draws_the_same_whatever_the_company():
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(3))
    temperature = torch.tensor([1.0, 0.0, 0.7, 1.0, 1e-9, 2.0])
    top_k, top_p = torch.tensor([0, 5, 20, 0, 0, 3000]).int(), torch.tensor([1.0, 0.9, 0.9, 0.5, 0.5, 1.0])
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.05])
    seeds, steps = torch.tensor([1, 2, 3, -4, 5, 6]), torch.arange(6).int() * 1000
    everything = (logits, temperature, top_k, top_p, min_p, seeds, steps)
    together = sample_ref(*everything, 3000)
    alone = torch.cat([sample_ref(*(x[i : i + 1] for x in everything), 3000) for i in range(6)])
    assert torch.equal(together, alone)
    assert torch.equal(sample_ref(*(x.flip(0) for x in everything), 3000), together.flip(0))
    greedy = greedy_ref(logits, 3000)
    assert together[1] == greedy[1]
    assert together[4] == greedy[4]


def test_nothing_beyond_the_limit_is_drawn_and_banned_tokens_never():
    row = torch.zeros(40)
    row[32:] = 50.0
    row[5] = -torch.inf
    ids = draw(row, 500, vocab_limit=32, temperature=5.0)
    assert int(ids.max()) < 32
    assert len(ids.unique()) == 31
    assert not (ids == 5).any()


@pytest.mark.parametrize("k", [0, 1, 4, 50])
def test_logprobs(k):
    logits = torch.randn(3, 60, generator=torch.Generator().manual_seed(0)) * 4
    logits[:, 40:] = 99.0
    logits[1, 3] = logits[1, 30] = logits[1, :40].max() + 1
    logits[2, 7], logits[2, 2] = 0.0, -0.0
    ids = torch.tensor([5, 3, 39]).int()
    own, top_ids, top = logprobs_ref(logits, ids, k, 40)
    expected = logits[:, :40].double().log_softmax(-1)
    torch.testing.assert_close(own.double(), expected[torch.arange(3), ids.long()], rtol=1e-5, atol=1e-6)
    assert top_ids.shape == top.shape == (3, min(k, 40))
    for row in range(3):
        ranked = sorted(range(40), key=lambda i: (-float(logits[row, i]), i))[:k]
        assert top_ids[row].tolist() == ranked
        torch.testing.assert_close(top[row].double(), expected[row, ranked], rtol=1e-5, atol=1e-6)
