"""The chunked gated delta rule and its one-token step against the recurrence itself, token by token in fp64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from rose.kernels.carried import Carried
from rose.kernels.delta_heads import DeltaHeads, Gates
from rose.kernels.gated_delta_rule import gated_delta_rule, gated_delta_rule_ref, gated_delta_rule_triton
from rose.kernels.gated_delta_step import gated_delta_step_ref, gated_delta_step_triton

CHUNKED = pytest.mark.parametrize("run", [gated_delta_rule_ref, gated_delta_rule_triton])
# Grouped heads, one head, value dim unlike key dim; lengths below, at and above one chunk and several.
HEADS = [DeltaHeads(2, 4, 16, 32), DeltaHeads(1, 1, 32, 16), DeltaHeads(2, 2, 16, 16)]
PUBLISHED = DeltaHeads(1, 2, 128, 128)
LENGTHS = [[1, 63, 64], [65, 7], [130, 1, 5], [2]]


def recurrence(qkv, gates, heads, lengths, states=None):
    """(o [T, Hv, dv], last states), all in fp64 and one token after another, as arXiv:2412.06464 writes it."""
    HK, HV, DK, DV = heads
    x = qkv.double().cpu()
    q, k, v = x.split([HK * DK, HK * DK, HV * DV], dim=1)
    group = torch.arange(HV) // (HV // HK)
    q, k = (F.normalize(y.view(-1, HK, DK)[:, group], dim=-1, eps=1e-9) for y in (q, k))
    v = v.view(-1, HV, DV)
    b, a = gates.logits.double().cpu().chunk(2, dim=1)
    beta = b.sigmoid()
    decay = torch.exp(-gates.a_log.double().cpu().exp() * F.softplus(a + gates.dt_bias.double().cpu()))
    out, last = torch.zeros(len(x), HV, DV, dtype=torch.float64), []
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    for n, (start, end) in enumerate(pairwise(bounds)):
        state = torch.zeros(HV, DK, DV, dtype=torch.float64) if states is None else states[n].double().cpu()
        for t in range(start, end):
            state = state * decay[t][:, None, None]
            error = (v[t] - torch.einsum("hkv,hk->hv", state, k[t])) * beta[t][:, None]
            state = state + torch.einsum("hk,hv->hkv", k[t], error)
            out[t] = torch.einsum("hkv,hk->hv", state, q[t]) / DK**0.5
        last.append(state)
    return out, torch.stack(last)


def fitted(place, heads):
    """Heads that the chunked kernel serves in this dtype here."""
    if place.device.type == "cuda" and place.dtype is not torch.float32:
        return heads._replace(key_dim=max(64, heads.key_dim), value_dim=max(64, heads.value_dim))
    return heads


def inputs(place, tokens, heads):
    """As the model has them: q, k and v as the convolution wrote them, gates as columns of a wider product."""
    qkv = place.randn(tokens, heads.channels)
    logits = place.randn(tokens, 2 * heads.value_heads + 3)[:, : 2 * heads.value_heads]
    a_log = torch.rand(heads.value_heads, device=place.device).mul(8).add(0.05).log()
    return qkv, Gates(logits, a_log, torch.randn(heads.value_heads, device=place.device) - 3)


def bounds_of(place, lengths):
    return place.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


def factor(place):
    """fp32: sums over a chunk and its triangular system. 16 bits: inputs of five products, each rounded once."""
    return 10 if place.dtype is torch.float32 else 4


@CHUNKED
@pytest.mark.parametrize("heads", [*HEADS, PUBLISHED])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_whole_sequences(place, close, run, heads, lengths):
    heads = fitted(place, heads)
    qkv, gates = inputs(place, sum(lengths), heads)
    out = run(qkv, gates, bounds_of(place, lengths), heads)
    assert (out.dtype, out.shape) == (place.dtype, (sum(lengths), heads.value_heads, heads.value_dim))
    close(out, recurrence(qkv, gates, heads, lengths)[0], factor(place))


@CHUNKED
@pytest.mark.parametrize("heads", [DeltaHeads(1, 2, 16, 16), PUBLISHED])
@pytest.mark.parametrize("cuts", [[70, 1, 59], [64, 64, 2], [1, 128, 1]])
def test_any_chunking(place, close, run, cuts, heads):
    """Two sequences through three batches, beside one that starts in each; states lie in rows of a pool of NaN."""
    heads, total = fitted(place, heads), sum(cuts)
    pairs = [inputs(place, total, heads) for _ in range(2)]
    gate = pairs[0][1]
    expected = [recurrence(qkv, Gates(g.logits, gate.a_log, gate.dt_bias), heads, [total]) for qkv, g in pairs]
    pool = torch.full((5, 2, heads.key_dim, heads.value_dim), torch.nan, device=place.device)
    rows = place.tensor([3, 1, 4])
    found, done = [[], []], 0
    for cut in cuts:
        end = done + cut
        fresh, own = inputs(place, 5, heads)
        qkv = torch.cat([*(x[done:end] for x, _ in pairs), fresh])
        logits = torch.cat([*(g.logits[done:end] for _, g in pairs), own.logits])
        lengths = [cut, cut, 5]
        gates = Gates(logits, gate.a_log, gate.dt_bias)
        carried = Carried(pool, rows, place.tensor([end, end, 5]))
        out = run(qkv, gates, bounds_of(place, lengths), heads, carried)
        for n in range(2):
            found[n].append(out[n * cut : (n + 1) * cut])
        alone, last = recurrence(fresh, Gates(own.logits, gate.a_log, gate.dt_bias), heads, [5])
        close(out[2 * cut :], alone, factor(place))
        close(pool[4], last[0], factor(place))
        done = end
    for n in range(2):
        # Against the whole: a first token's answer alone may be the small rest of a sum of 128.
        close(torch.cat(found[n]), expected[n][0], factor(place))
        close(pool[rows[n].long()], expected[n][1][0], factor(place))
    assert pool[[0, 2]].isnan().all()


@pytest.mark.gpu
def test_narrow_heads_of_16_bits_are_the_references():
    heads, device = HEADS[0], torch.device("cuda")
    qkv = torch.randn(65, heads.channels, device=device).bfloat16()
    logits = torch.randn(65, 2 * heads.value_heads, device=device).bfloat16()
    gates = Gates(logits, torch.zeros(4, device=device), torch.zeros(4, device=device))
    bounds = torch.tensor([0, 65], dtype=torch.int32, device=device)
    assert torch.equal(gated_delta_rule(qkv, gates, bounds, heads), gated_delta_rule_ref(qkv, gates, bounds, heads))


@pytest.mark.parametrize("run", [gated_delta_step_ref, gated_delta_step_triton])
@pytest.mark.parametrize("heads", [*HEADS, DeltaHeads(1, 2, 64, 64)])
def test_one_token_each(place, close, run, heads):
    """Twenty steps of three sequences; one of them starts in its step, whatever its row holds."""
    qkv, gates = inputs(place, 60, heads)
    order = torch.arange(60).view(3, 20)
    pool = torch.full((6, heads.value_heads, heads.key_dim, heads.value_dim), torch.nan, device=place.device)
    rows = place.tensor([5, 2, 3])
    expected, last = recurrence(qkv, gates, heads, [20] * 3)
    for at in range(20):
        picked = order[:, at].to(place.device)
        step = Gates(gates.logits[picked], gates.a_log, gates.dt_bias)
        out = run(qkv[picked], step, heads, Carried(pool, rows, place.tensor([at + 1] * 3)))
        close(out, expected[order[:, at]], factor(place))
    close(pool[rows.long()], last, factor(place))
    assert pool[[0, 1, 4]].isnan().all()


@CHUNKED
@pytest.mark.parametrize("heads", [DeltaHeads(1, 2, 16, 16), PUBLISHED])
@pytest.mark.parametrize("case", ["alike", "forgetful", "lasting"])
def test_hard_inputs(place, close, run, case, heads):
    """One token repeated (keys all alike, so that powers of the chunk's matrix reach 10^18), decays that overflow when
    taken backwards, and none at all."""
    heads, tokens = fitted(place, heads), 150
    qkv, gates = inputs(place, tokens, heads)
    if case == "alike":
        qkv = qkv[:1].expand(tokens, -1).contiguous()
        qkv[:, 2 * heads.key_dim :] = place.randn(tokens, 2 * heads.value_dim)
    logits = gates.logits.clone()
    logits[:, :2] = 8.0 if case == "alike" else 0.0
    logits[:, 2:] = {"alike": -9.0, "forgetful": 60.0, "lasting": -40.0}[case]
    gates = Gates(logits, gates.a_log, gates.dt_bias)
    out = run(qkv, gates, bounds_of(place, [tokens]), heads)
    # Where keys are alike an answer is the sum of up to 64 updates, each rounded, of which all but one cancel.
    more = 8**0.5 if case == "alike" and place.dtype is not torch.float32 else 1
    close(out, recurrence(qkv, gates, heads, [tokens])[0], factor(place) * more)


@CHUNKED
@pytest.mark.parametrize("heads", [DeltaHeads(1, 2, 16, 16), PUBLISHED])
def test_a_sequence_does_not_depend_on_its_company(place, run, heads):
    heads = fitted(place, heads)
    qkv, gates = inputs(place, 200, heads)
    together = run(qkv, gates, bounds_of(place, [70, 100, 30]), heads)[70:170]
    qkv2 = torch.cat([place.randn(9, heads.channels), qkv[70:170]])
    logits = torch.cat([place.randn(9, 4), gates.logits[70:170]])
    beside = run(qkv2, Gates(logits, gates.a_log, gates.dt_bias), bounds_of(place, [9, 100]), heads)[9:]
    torch.testing.assert_close(together, beside, rtol=1e-5, atol=1e-6)
    if run is gated_delta_rule_triton:
        assert torch.equal(together, beside)


def test_layouts_that_are_not_served(place):
    heads = HEADS[0]
    qkv, gates = inputs(place, 4, heads)
    bounds = bounds_of(place, [4])
    with pytest.raises(ValueError, match="qkv must have 192 neighbours a row"):
        gated_delta_rule_triton(qkv[:, 1:], gates, bounds, heads)
    apart = place.randn(4, heads.channels + 11)[:, : heads.channels]
    with pytest.raises(ValueError, match="rows of qkv must lie a multiple of 16 values apart; they are 203"):
        gated_delta_rule_triton(apart, gates, bounds, heads)
    with pytest.raises(ValueError, match=r"gate logits must be \(4, 8\)"):
        gated_delta_rule_triton(qkv, Gates(gates.logits[:, 1:], *gates[1:]), bounds, heads)
    with pytest.raises(ValueError, match="a row of the pool must be"):
        gated_delta_step_triton(qkv, gates, heads, Carried(place.randn(4, 4, 32, 16), bounds, bounds))
    odd = DeltaHeads(1, 1, 24, 16)
    with pytest.raises(ValueError, match="key dim must be a power of two"):
        gated_delta_rule_triton(place.randn(4, odd.channels), Gates(place.randn(4, 2), *gates[1:]), bounds, odd)
