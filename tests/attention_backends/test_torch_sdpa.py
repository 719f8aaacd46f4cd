"""torch's attention behind the plan surface, against a softmax written out in float64."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from torch import Tensor

from rose.attention_backends import AttentionSpec, load_backend
from rose.batch import Batch
from rose.errors import StartupError

CPU = torch.device("cpu")
SPEC = AttentionSpec(
    num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32, device=CPU, causal=False, scale=8**-0.5
)
LENGTHS = [
    [1],
    [9],
    [5, 5, 5],  # equal lengths: no padding anywhere
    [3, 3, 7, 7, 7, 1],
    [4, 1, 6, 4, 12, 1],
]


def packed(lengths: list[int], spec: AttentionSpec, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as strided views of one packed tensor, which is how the models hand them over."""
    heads = spec.num_heads + 2 * spec.num_kv_heads
    qkv = torch.randn(sum(lengths), heads, spec.head_dim, generator=torch.Generator().manual_seed(seed))
    return torch.split(qkv.to(spec.dtype), [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)


def written_out(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """One sequence, position by position, in float64."""
    group = spec.num_heads // spec.num_kv_heads
    out = torch.empty(q.shape, dtype=torch.float64)
    for head in range(spec.num_heads):
        keys, values = k[:, head // group].double(), v[:, head // group].double()
        for i in range(len(q)):
            first = 0 if spec.window is None else max(0, i - spec.window)
            last = len(q) - 1 if spec.window is None else min(len(q) - 1, i + spec.window)
            seen = slice(first, (i if spec.causal else last) + 1)
            weights = (keys[seen] @ q[i, head].double() * spec.scale).softmax(0)
            out[i, head] = weights @ values[seen]
    return out


def run(lengths: list[int], spec: AttentionSpec, qkv: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    batch = Batch.pack([[0] * length for length in lengths])
    return load_backend("torch_sdpa", spec).plan(batch).run(*qkv, layer=0)


@pytest.mark.parametrize("window", [None, 0, 2, 50])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_sequence_is_attended_to_alone(lengths, causal, window):
    spec = dataclasses.replace(SPEC, causal=causal, window=window)
    qkv = packed(lengths, spec)
    out = run(lengths, spec, qkv)
    assert out.is_contiguous()
    expected = torch.cat([written_out(*rows, spec) for rows in zip(*(x.split(lengths) for x in qkv), strict=True)])
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_heads(kv_heads):
    spec = dataclasses.replace(SPEC, num_kv_heads=kv_heads, causal=True, scale=0.3)
    qkv = packed([6, 2], spec)
    expected = torch.cat([written_out(*rows, spec) for rows in zip(*(x.split([6, 2]) for x in qkv), strict=True)])
    torch.testing.assert_close(run([6, 2], spec, qkv).double(), expected, rtol=0, atol=2e-6)


def test_bfloat16():
    spec = dataclasses.replace(SPEC, dtype=torch.bfloat16)
    qkv = packed([7, 7, 3], spec)
    out = run([7, 7, 3], spec, qkv)
    assert out.dtype == torch.bfloat16
    expected = torch.cat([written_out(*rows, spec) for rows in zip(*(x.split([7, 7, 3]) for x in qkv), strict=True)])
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-2)  # eight bits of mantissa on values up to 3


@pytest.mark.parametrize("causal", [False, True])
def test_alone_and_in_company_are_the_same(causal):
    """To fp32 rounding, in any order, beside others of its length or not."""
    spec = dataclasses.replace(SPEC, causal=causal)
    lengths = [8, 3, 8, 8, 1, 30, 3]
    rows = [packed([length], spec, seed) for seed, length in enumerate(lengths)]
    alone = [run([length], spec, row) for length, row in zip(lengths, rows, strict=True)]
    for seed in range(5):
        order = random.Random(seed).sample(range(len(lengths)), k=len(lengths) - seed % 3)
        company = run(
            [lengths[i] for i in order], spec, tuple(torch.cat([rows[i][part] for i in order]) for part in range(3))
        )
        for i, out in zip(order, company.split([lengths[i] for i in order]), strict=True):
            torch.testing.assert_close(out, alone[i], rtol=0, atol=5e-7)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[6], [6, 6, 6], [6, 4, 6]], ids=str)
def test_what_the_first_token_sees(lengths, causal):
    """Report C01 (tei#882): causality was a mask that only padding brought along. Report C05 (llm2vec#74): a single
    sequence had no mask at all, and went causal."""
    spec = dataclasses.replace(SPEC, causal=causal)
    q, k, v = packed(lengths, spec)
    before = run(lengths, spec, (q, k, v))
    k, v = k.clone(), v.clone()
    last = lengths[0] - 1
    k[last] += 1
    v[last] += 1
    after = run(lengths, spec, (q, k, v))
    first_changed = not torch.equal(before[0], after[0])
    assert first_changed is not causal
    assert not torch.equal(before[last], after[last])
    torch.testing.assert_close(before[lengths[0] :], after[lengths[0] :], rtol=0, atol=0)


def test_rows_behind_the_last_sequence_are_zero():
    qkv = packed([4, 5], SPEC)
    batch = Batch.pack([[0] * 4])
    out = load_backend("torch_sdpa", SPEC).plan(batch).run(*qkv, layer=0)
    torch.testing.assert_close(out[:4], run([4], SPEC, tuple(x[:4] for x in qkv)))
    assert bool((out[4:] == 0).all())


def test_refusals_are_in_words():
    with pytest.raises(StartupError, match="it knows no paged cache"):
        load_backend("torch_sdpa", dataclasses.replace(SPEC, layout="paged"))
    with pytest.raises(StartupError, match="4 query heads do not share 3 key heads evenly"):
        load_backend("torch_sdpa", dataclasses.replace(SPEC, num_kv_heads=3))
