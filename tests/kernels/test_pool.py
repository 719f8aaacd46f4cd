"""Pooling and the last step of every output kind against fp64 formulas, with poison behind the last sequence."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from rose.kernels import pool as rooms

LENGTHS = [1, 3, 86, 64, 10]
MODES = ["cls", "mean", "last", "max", "mean_sqrt_len", "weightedmean"]


def packed(place, width):
    """Rows of five sequences, then rows of NaN that belong to none."""
    bounds = [0]
    for n in LENGTHS:
        bounds.append(bounds[-1] + n)
    hidden = torch.full((bounds[-1] + 9, width), float("nan"), device=place.device, dtype=place.dtype)
    hidden[: bounds[-1]] = place.randn(bounds[-1], width)
    return hidden, place.tensor(bounds), bounds


def pooled64(hidden, bounds, mode):
    rows = []
    for start, end in pairwise(bounds):
        x = hidden[start:end].double()
        n = end - start
        weights = torch.arange(1, n + 1, dtype=torch.float64, device=x.device)[:, None]
        rows.append(
            {
                "cls": lambda x=x: x[0],
                "last": lambda x=x: x[-1],
                "max": lambda x=x: x.max(0).values,
                "mean": lambda x=x: x.mean(0),
                "mean_sqrt_len": lambda x=x, n=n: x.sum(0) / n**0.5,
                "weightedmean": lambda x=x, w=weights: (x * w).sum(0) / w.sum(),
            }[mode]()
        )
    return torch.stack(rows)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", [72, 384])
def test_pool(place, mode, width):
    hidden, cu_seqlens, bounds = packed(place, width)
    expected = pooled64(hidden, bounds, mode)
    for out in (rooms.pool_finish_triton(hidden, cu_seqlens, mode, "none"), rooms.pool_ref(hidden, cu_seqlens, mode)):
        assert out.dtype == torch.float32
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["l2", "tanh_int8", "sign_bits"])
def test_pool_finish(place, mode, how):
    hidden, cu_seqlens, bounds = packed(place, 72)
    x = pooled64(hidden, bounds, mode)
    out = rooms.pool_finish_triton(hidden, cu_seqlens, mode, how)
    if how == "l2":
        torch.testing.assert_close(out.double(), x / x.norm(dim=1, keepdim=True), rtol=1e-5, atol=1e-6)
    elif how == "tanh_int8":
        assert out.dtype == torch.int8
        exact = x.tanh() * 127
        assert ((out.double() - exact).abs() <= 0.5 + 1e-4).all()
    else:
        assert out.dtype == torch.uint8
        bits = (out[:, :, None] >> torch.arange(8, device=out.device)) & 1
        wrong = bits.flatten(1).bool() != (x >= 0)
        assert (x[wrong].abs() < 1e-6).all()


SPANS = [(0, 1), (1, 4), (4, 90), (3, 3), (4, 5), (90, 154), (2, 163), (154, 164), (0, 0)]


@pytest.mark.parametrize("width", [72, 384])
def test_pool_spans(place, width):
    """Spans that touch, overlap, cross sequences or are empty; the rows of NaN behind them are never read."""
    hidden, _, bounds = packed(place, width)
    assert bounds[-1] == 164
    spans = torch.tensor(SPANS, dtype=torch.int32, device=place.device)
    rows = [hidden[a:b].double().mean(0) if b > a else hidden.new_zeros(width).double() for a, b in SPANS]
    for out in (rooms.pool_spans_triton(hidden, spans), rooms.pool_spans_ref(hidden, spans)):
        assert out.dtype == torch.float32
        torch.testing.assert_close(out.double(), torch.stack(rows), rtol=1e-5, atol=1e-6)
        assert not out[[3, 8]].any()


def test_no_span_at_all(place):
    hidden, _, _ = packed(place, 72)
    spans = torch.empty(0, 2, dtype=torch.int32, device=place.device)
    for out in (rooms.pool_spans_triton(hidden, spans), rooms.pool_spans_ref(hidden, spans)):
        assert out.shape == (0, 72)
        assert rooms.finish_triton(out, "sign_bits").shape == rooms.finish_ref(out, "sign_bits").shape == (0, 9)


def test_pool_spans_on_this_machine():
    """The plain form, which is what the CPU runs: a large neighbour does not cost a small span its digits."""
    hidden = torch.randn(164, 40)
    hidden[:3] *= 1e8
    spans = torch.tensor(SPANS, dtype=torch.int32)
    rows = [hidden[a:b].double().mean(0) if b > a else torch.zeros(40).double() for a, b in SPANS]
    out = rooms.pool_spans(hidden, spans).double()
    apart = [i for i, (a, _) in enumerate(SPANS) if a > 2]
    torch.testing.assert_close(out[apart], torch.stack(rows)[apart], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out, torch.stack(rows), rtol=1e-5, atol=1e2)


@pytest.mark.parametrize("how", ["l2", "tanh_int8", "sign_bits"])
def test_finish(place, how):
    pooled = torch.randn(6, 200, device=place.device) * 2
    pooled[1] = 0
    pooled[2] *= 1e-30
    pooled[3, :4] = torch.tensor([40.0, -40.0, 200.0, -200.0])
    out, ref = rooms.finish_triton(pooled, how), rooms.finish_ref(pooled.double().cpu(), how)
    if how == "l2":
        torch.testing.assert_close(out.double().cpu()[[0, 3, 4, 5]], ref[[0, 3, 4, 5]], rtol=1e-6, atol=0)
        assert (out[1] == 0).all()
    elif how == "tanh_int8":
        assert (out.cpu().int() - ref.int()).abs().max() <= 1
        assert (out.cpu() != ref).double().mean() < 1e-3
        assert out[3, :4].tolist() == [127, -127, 127, -127]
    else:
        assert torch.equal(out.cpu(), ref)


def test_rounds_halves_to_even_like_torch(place):
    """x = atanh(c / 127) lands next to c, never a code away; zero stays zero."""
    codes = torch.arange(-126, 127, dtype=torch.float64)
    pooled = torch.atanh(codes / 127).float()[None].to(place.device)
    assert rooms.finish_triton(pooled, "tanh_int8")[0].cpu().tolist() == codes.int().tolist()


def test_sign_of_zero_counts_as_positive(place):
    pooled = torch.zeros(1, 8, device=place.device)
    pooled[0, 3] = -1.0
    assert rooms.finish_triton(pooled, "sign_bits").tolist() == [[0b11110111]]


def test_not_a_number_is_seen_in_every_mode(place):
    """A bad row must show in the answer of its own sequence, so that it can be refused; not in any other."""
    hidden, cu_seqlens, bounds = packed(place, 72)
    for mode in MODES:
        x = hidden.clone()
        x[bounds[2] if mode != "last" else bounds[3] - 1, 5] = float("nan")
        out = rooms.pool_finish_triton(x, cu_seqlens, mode, "none")
        assert torch.isnan(out[2, 5]), mode
        assert torch.isnan(out).sum() == 1, mode


def test_sign_bits_of_an_odd_width_are_refused(place):
    with pytest.raises(ValueError, match="not a multiple of 8"):
        rooms.finish_triton(torch.zeros(1, 12, device=place.device), "sign_bits")
