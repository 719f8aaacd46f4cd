"""Attention on packed sequences against torch's own in fp64, on strided views with poison all around."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rose.kernels.short_attention import short_attention_ref, short_attention_triton


def packed_qkv(place, tokens, heads, kv_heads, head_dim, poison=7):
    """Strided q, k, v views; the rows past `tokens` hold NaN."""
    qkv = place.randn(tokens + poison, (heads + 2 * kv_heads) * head_dim)
    qkv[tokens:] = float("nan")
    split = qkv.view(tokens + poison, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    assert not split[0].is_contiguous()
    return split


def expected64(q, k, v, lengths, causal, scale):
    out, start = [], 0
    group = q.shape[1] // k.shape[1]
    for n in lengths:
        one = [x[start : start + n].double().transpose(0, 1)[None] for x in (q, k, v)]
        one[1:] = [x.repeat_interleave(group, 1) for x in one[1:]]
        out.append(F.scaled_dot_product_attention(*one, is_causal=causal, scale=scale)[0].transpose(0, 1))
        start += n
    return torch.cat(out)


def run(place, close, lengths, heads, kv_heads, head_dim, max_length, causal, scale=None):
    total = sum(lengths)
    scale = head_dim**-0.5 if scale is None else scale
    q, k, v = packed_qkv(place, total, heads, kv_heads, head_dim)
    cu_seqlens = place.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)])
    expected = expected64(q, k, v, lengths, causal, scale)
    out = short_attention_triton(q, k, v, cu_seqlens, max_length, causal, scale)
    assert out.is_contiguous()
    close(out[:total], expected, factor=2)
    close(short_attention_ref(q, k, v, cu_seqlens, max_length, causal, scale)[:total], expected, factor=2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[1], [37], [16, 1, 33, 2, 64], [128]])
def test_lengths(place, close, lengths, causal):
    run(place, close, lengths, 2, 2, 32, max(lengths), causal)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (2, 1, 128), (4, 1, 256), (3, 3, 16)])
def test_heads(place, close, heads, kv_heads, head_dim):
    run(place, close, [5, 1, 40], heads, kv_heads, head_dim, 64, causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_longer_than_one_block_of_keys(place, close, causal):
    """Head dim 256 holds 64 keys a block: the running softmax over several blocks, short sequences beside long ones."""
    run(place, close, [130, 3, 64, 65], 1, 1, 256, 130, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[300, 129, 5], [512, 1, 257], [128, 256]])
def test_whole_blocks_and_a_part_of_one(place, close, lengths, causal):
    """Several blocks of keys: the first by itself, those that need no mask, and the last."""
    run(place, close, lengths, 2, 1, 64, max(lengths), causal)


def test_many_tokens_take_wider_blocks(place, close):
    run(place, close, [512] * 8 + [37], 1, 1, 16, 512, causal=False)


def test_bound_may_be_larger_than_any_sequence(place, close):
    """A graph's bound is the bucket's, not this batch's."""
    for bound in (40, 256, 4096):
        run(place, close, [40, 3], 1, 1, 32, bound, causal=False)


def test_many_sequences(place, close):
    lengths = [1 + (7 * i) % 5 for i in range(40)]
    run(place, close, lengths, 1, 1, 16, 8, causal=False)


def test_scores_far_apart(place, close):
    run(place, close, [33, 20], 1, 1, 32, 64, causal=True, scale=5.0)


def test_neighbours_do_not_matter(place):
    """The same sequence gives the same bits alone in front of NaN, and between others (on a GPU; NumPy's vary)."""
    q, k, v = packed_qkv(place, 60, 2, 1, 32)
    alone = [x[20:45] for x in (q, k, v)]
    among = short_attention_triton(q, k, v, place.tensor([0, 20, 45, 60]), 32, False, 0.2)
    assert torch.isfinite(among[:60]).all()
    by_itself = short_attention_triton(*alone, place.tensor([0, 25]), 32, False, 0.2)
    if place.device.type == "cpu":
        torch.testing.assert_close(among[20:45], by_itself, rtol=1e-5 if place.dtype is torch.float32 else 2e-3, atol=0)
    else:
        assert torch.equal(among[20:45], by_itself)


def test_odd_head_dim_is_refused(place):
    q = place.randn(4, 2, 48)
    with pytest.raises(ValueError, match="power of two"):
        short_attention_triton(q, q, q, place.tensor([0, 4]), 4, False, 1.0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [2, 63, 64, 65, 128, 130])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 64), (4, 2, 128)])
def test_a_lone_sequence_of_all_tokens_looks_nothing_up(place, close, tokens, heads, kv_heads, head_dim, causal):
    """And, where it fills whole blocks (64 and 128 tokens), masks nothing."""
    q, k, v = packed_qkv(place, tokens, heads, kv_heads, head_dim, poison=0)
    scale = head_dim**-0.5
    out = short_attention_triton(q, k, v, place.tensor([0, tokens]), tokens, causal, scale, whole=True)
    close(out, expected64(q, k, v, [tokens], causal, scale), factor=2)
