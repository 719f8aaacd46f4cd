"""Pooling, the Dense chain and normalisation against their formulas, sequence by sequence."""

from __future__ import annotations

import pytest
import torch

from rose.layers.sentence_head import DenseHead, SentenceHead

LENGTHS = [3, 1, 6]
POOLED = {
    "cls": lambda rows: rows[0],
    "last": lambda rows: rows[-1],
    "mean": lambda rows: rows.mean(0),
    "max": lambda rows: rows.max(0).values,
    "mean_sqrt_len": lambda rows: rows.sum(0) / len(rows) ** 0.5,
    "weightedmean": lambda rows: (
        (rows * torch.arange(1.0, len(rows) + 1)[:, None]).sum(0) / sum(range(1, len(rows) + 1))
    ),
}


def hidden(dtype=torch.float32):
    return torch.randn(sum(LENGTHS), 8, generator=torch.Generator().manual_seed(0)).to(dtype)


def boundaries():
    return torch.tensor([0, 3, 4, 10], dtype=torch.int32)


def dense(in_features, out_features, **arguments):
    head = DenseHead(in_features, out_features, **{"bias": True, "activation": "tanh", "residual": False} | arguments)
    generator = torch.Generator().manual_seed(in_features)
    for parameter in head.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return head


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("mode", POOLED)
def test_one_mode(mode, normalize):
    x = hidden()
    expected = torch.stack([POOLED[mode](rows) for rows in x.split(LENGTHS)])
    if normalize:
        expected = torch.nn.functional.normalize(expected, dim=-1)
    out = SentenceHead([mode], [], normalize=normalize)(x, boundaries())
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


def test_several_modes_lie_side_by_side_in_their_order():
    x = hidden()
    out = SentenceHead(["max", "cls"], [], normalize=False)(x, boundaries())
    expected = torch.stack([torch.cat([POOLED["max"](r), POOLED["cls"](r)]) for r in x.split(LENGTHS)])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("tanh", torch.tanh),
        ("sigmoid", torch.sigmoid),
        ("relu", torch.relu),
        ("gelu", torch.nn.functional.gelu),
        ("silu", torch.nn.functional.silu),
        (None, lambda x: x),
    ],
)
def test_dense(activation, function):
    head = dense(8, 5, activation=activation)
    x = hidden()
    torch.testing.assert_close(head(x), function(x @ head.linear.weight.T + head.linear.bias), rtol=0, atol=1e-5)


def test_residual_same_width_and_projected():
    x = hidden()
    same = dense(8, 8, residual=True)
    assert same.residual is None
    torch.testing.assert_close(same(x), torch.tanh(x @ same.linear.weight.T + same.linear.bias) + x, rtol=0, atol=1e-5)
    other = dense(8, 5, residual=True)
    expected = torch.tanh(x @ other.linear.weight.T + other.linear.bias) + x @ other.residual.weight.T
    torch.testing.assert_close(other(x), expected, rtol=0, atol=1e-5)


def test_chain_is_applied_in_order_and_then_normalised():
    first, second = dense(8, 5), dense(5, 6, activation=None, bias=False)
    out = SentenceHead(["mean"], [first, second], normalize=True)(hidden(), boundaries())
    pooled = torch.stack([rows.mean(0) for rows in hidden().split(LENGTHS)])
    expected = torch.nn.functional.normalize(second(first(pooled)), dim=-1)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


def test_head_is_fp32_behind_a_bf16_backbone():
    x = hidden(torch.bfloat16)
    head = dense(8, 5)
    out = SentenceHead(["mean"], [head], normalize=False)(x, boundaries())
    assert out.dtype == torch.float32
    pooled = torch.stack([rows.float().mean(0) for rows in x.split(LENGTHS)])
    torch.testing.assert_close(out, head(pooled), rtol=0, atol=1e-5)
