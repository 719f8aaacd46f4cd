"""Keys and values into pages: every row of the cache that is no slot keeps its bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rose.batch import HeadRotation
from rose.kernels.qk_norm_rope import qk_norm_rope_ref, rope_table
from rose.kernels.store_kv import (
    qk_norm_rope_store_ref,
    qk_norm_rope_store_triton,
    store_kv_ref,
    store_kv_triton,
)


def caches(place, pages, page, kv_heads, head_dim):
    k_cache, v_cache = (place.randn(pages, page, kv_heads, head_dim) for _ in range(2))
    k_cache[3], v_cache[3] = torch.nan, torch.nan
    return k_cache, v_cache


def flat(cache):
    return cache.view(-1, *cache.shape[2:])


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(8, 128), (1, 64), (3, 16), (12, 80), (2, 256)])
def test_store_kv(place, kv_heads, head_dim):
    k_cache, v_cache = caches(place, 5, 16, kv_heads, head_dim)
    packed = place.randn(4, 2 * kv_heads + 3, head_dim)
    k, v = packed[:, 3 : 3 + kv_heads], packed[:, 3 + kv_heads :]
    slots = place.tensor([79, 16, 17, 0])
    expected = [flat(x).clone() for x in (k_cache, v_cache)]
    for want, new in zip(expected, (k, v), strict=True):
        want[slots.long()] = new
    for run in (store_kv_triton, store_kv_ref):
        stored = k_cache.clone(), v_cache.clone()
        run(k, v, *stored, slots)
        for got, want in zip(stored, expected, strict=True):
            assert torch.equal(flat(got).nan_to_num(9.0), want.nan_to_num(9.0))


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 8, 128), (3, 1, 64), (4, 2, 256), (5, 5, 32)])
@pytest.mark.parametrize("norm", [True, False])
def test_qk_norm_rope_store(place, close, heads, kv_heads, head_dim, norm):
    """Against the two kernels after one another, which transformers' functions vouch for."""
    qkv = place.randn(5, (heads + 2 * kv_heads) * head_dim)
    weights = [place.randn(head_dim) if norm else None for _ in range(2)]
    positions, table = place.tensor([0, 1, 2, 0, 511]), rope_table(512, head_dim, 1e4, place.device)
    k_cache, v_cache = caches(place, 4, 16, kv_heads, head_dim)
    slots = place.tensor([3, 2, 20, 63, 33])
    ready = qk_norm_rope_ref(qkv.clone(), positions, table, *weights, 1e-6, heads, kv_heads)
    q, k, v = ready.view(5, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    others = torch.ones(64, dtype=torch.bool, device=place.device)
    others[slots.long()] = False
    for run in (qk_norm_rope_store_triton, qk_norm_rope_store_ref):
        mine, stored = qkv.clone(), (k_cache.clone(), v_cache.clone())
        run(mine, HeadRotation(positions, table, *weights, 1e-6), *stored, slots)
        close(mine.view(5, -1, head_dim)[:, :heads], q)
        close(flat(stored[0])[slots.long()], k)
        assert torch.equal(flat(stored[1])[slots.long()], v)
        for got, before in zip(stored, (k_cache, v_cache), strict=True):
            assert torch.equal(flat(got)[others].nan_to_num(9.0), flat(before)[others].nan_to_num(9.0))


def test_partial_rotary(place, close):
    """64 of 256 dims turn, as in Qwen3.5; against transformers' functions."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import apply_rotary_pos_emb

    heads, kv_heads, head_dim, turned, tokens = 4, 2, 256, 64, 6
    qkv = place.randn(tokens, (heads + 2 * kv_heads) * head_dim)
    positions, table = place.tensor([0, 1, 2, 0, 77, 3000]), rope_table(3001, turned, 1e7, place.device)
    weights = [place.randn(head_dim) for _ in range(2)]
    k_cache, v_cache = caches(place, 4, 16, kv_heads, head_dim)
    slots = place.tensor([3, 2, 20, 63, 33, 5])
    q, k, v = qkv.double().view(tokens, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    q, k = (F.rms_norm(x, (head_dim,), w.double(), 1e-6) for x, w in zip((q, k), weights, strict=True))
    cos, sin = (x.double().repeat(1, 2)[None] for x in table[positions.long()].chunk(2, dim=-1))
    q, k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    for run in (qk_norm_rope_store_triton, qk_norm_rope_store_ref):
        mine = qkv.clone()
        run(mine, HeadRotation(positions, table, *weights, 1e-6), k_cache, v_cache, slots)
        close(mine.view(tokens, -1, head_dim)[:, :heads], q[0].transpose(0, 1), factor=3)
        close(flat(k_cache)[slots.long()], k[0].transpose(0, 1), factor=3)
        close(flat(v_cache)[slots.long()], v)


def test_tokens_before_the_start_are_left_alone(place, close):
    heads, kv_heads, head_dim = 4, 2, 32
    qkv = place.randn(7, (heads + 2 * kv_heads) * head_dim)
    rotation = HeadRotation(place.tensor([9, 8, 7, 0, 1, 2, 3]), rope_table(10, head_dim, 1e4, place.device))
    slots = place.tensor([5, 6, 7, 40, 41, 42, 43])
    k_cache, v_cache = caches(place, 4, 16, kv_heads, head_dim)
    whole, expected = qkv.clone(), (k_cache.clone(), v_cache.clone())
    qk_norm_rope_store_ref(whole, rotation, *expected, slots)
    for cache, before in zip(expected, (k_cache, v_cache), strict=True):
        cache[0] = before[0]
    for run in (qk_norm_rope_store_triton, qk_norm_rope_store_ref):
        mine, stored = qkv.clone(), (k_cache.clone(), v_cache.clone())
        run(mine, rotation, *stored, slots, 3)
        assert torch.equal(mine[:3], qkv[:3])
        close(mine[3:, : heads * head_dim], whole[3:, : heads * head_dim])
        for got, want in zip(stored, expected, strict=True):
            close(got.nan_to_num(9.0), want.nan_to_num(9.0))
    for run in (store_kv_triton, store_kv_ref):
        _, k, v = qkv.view(7, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
        stored = k_cache.clone(), v_cache.clone()
        run(k, v, *stored, slots, 3)
        assert torch.equal(stored[0][0], k_cache[0])
        assert torch.equal(flat(stored[0])[40:44], k[3:])
        assert torch.equal(flat(stored[1])[40:44], v[3:])


def test_what_does_not_fit_is_refused(place):
    k_cache, v_cache = caches(place, 4, 16, 2, 32)
    k = place.randn(1, 2, 32)
    slots = place.tensor([0])
    with pytest.raises(ValueError, match="do not fit a cache of 2 heads of 32"):
        store_kv_triton(k[:, :1], k[:, :1], k_cache, v_cache, slots)
    with pytest.raises(ValueError, match="v_cache must be contiguous"):
        store_kv_triton(k, k, k_cache, v_cache.transpose(0, 1), slots)
    with pytest.raises(ValueError, match="a cache is two tensors"):
        store_kv_triton(k, k, k_cache, v_cache.double(), slots)
