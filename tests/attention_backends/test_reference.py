"""The truth itself, against torch's own attention in float64."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from rose.attention_backends.reference import (
    even_split,
    greedy_split,
    poisoned_qkv,
    reference_attention,
    row_error,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("window", [None, 0, 5])
def test_agrees_with_torch(causal: bool, kv_heads: int, window: int | None) -> None:
    lengths = (1, 7, 30)
    q, k, v = poisoned_qkv(40, 8, kv_heads, 16, dtype=torch.float32, device=CPU)
    ours = reference_attention(q, k, v, lengths, causal=causal, scale=0.3, window=window)
    assert ours.dtype == torch.float64
    for start, end in pairwise(accumulate(lengths, initial=0)):
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)[None, :]
        seen = (distance <= (window if window is not None else 99)) & (distance >= (0 if causal else -99))
        if window is not None and not causal:
            seen &= distance >= -window
        qkv = [x[start:end].double().transpose(0, 1) for x in (q, k, v)]
        theirs = F.scaled_dot_product_attention(*qkv, attn_mask=seen, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(ours[start:end], theirs.transpose(0, 1), rtol=1e-12, atol=1e-12)


def test_row_error_is_that_of_the_worst_row() -> None:
    expected = torch.ones(3, 2, 4, dtype=torch.float64)
    out = expected.clone()
    assert row_error(out, expected) == 0
    out[1, 1, 0] += 0.2
    assert row_error(out, expected) == pytest.approx(0.1)
    assert row_error(torch.cat([out, torch.full((5, 2, 4), torch.nan)]), expected) == pytest.approx(0.1)
    out[2, 0, 3] = torch.nan
    assert row_error(out, expected) == float("inf")


def test_inputs_are_views_of_one_tensor_between_nan_rows() -> None:
    q, k, v = poisoned_qkv(10, 4, 2, 8, dtype=torch.bfloat16, device=CPU, margin=3)
    assert (q.shape, k.shape, v.shape) == ((10, 4, 8), (10, 2, 8), (10, 2, 8))
    assert q.stride() == k.stride() == (64, 8, 1)
    assert k.data_ptr() - q.data_ptr() == 4 * 8 * 2
    memory = torch.as_strided(q, (16, 8, 8), (64, 8, 1), 0)
    assert bool(memory[:3].isnan().all())
    assert bool(memory[13:].isnan().all())
    assert bool(memory[3:13].isfinite().all())


@given(st.integers(1, 50), st.integers(1, 64), st.data())
def test_splits_use_every_token(sequences: int, longest: int, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(sequences, sequences * longest))
    for split in (even_split(tokens, sequences), greedy_split(tokens, sequences, longest)):
        assert sum(split) == tokens
        assert len(split) == sequences
        assert min(split) >= 1
        assert max(split) <= longest
    with pytest.raises(ValueError, match="do not make"):
        greedy_split(sequences * longest + 1, sequences, longest)
