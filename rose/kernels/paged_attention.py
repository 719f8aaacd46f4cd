"""Attention over pages of keys and values: one new token a sequence (`paged_decode`), and chunks of prompts
(`paged_prefill`). The kernels are in paged_decode.py and paged_prefill.py; here is what they compute.

Knows pages and lengths; does not know which pages belong to whom.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from rose.batch import HeadRotation
from rose.kernels.launch import runs_triton
from rose.kernels.paged_decode import paged_decode_triton
from rose.kernels.paged_prefill import paged_prefill_triton
from rose.kernels.store_kv import rotate_heads_ref, store_kv_ref


def paged_attention_ref(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lengths: Tensor,
    lengths: Sequence[int],
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Every query of every sequence over what its pages hold, itself last: [T, H, head_dim]."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    group, page_size = q.shape[1] // k_cache.shape[2], k_cache.shape[1]
    spans = pairwise(accumulate(lengths, initial=0))
    for (start, stop), total, pages in zip(spans, kv_lengths.tolist(), page_table.long(), strict=True):
        used = pages[: -(-total // page_size)]
        keys, values = (
            cache[used].flatten(0, 1)[:total].float().transpose(0, 1).repeat_interleave(group, 0)
            for cache in (k_cache, v_cache)
        )
        scores = q[start:stop].float().transpose(0, 1) @ keys.transpose(1, 2) * scale
        index = torch.arange(total, device=q.device)
        ahead = index[None] - index[total - (stop - start) :, None]
        hidden = ahead > 0 if window is None else (ahead > 0) | (ahead < -window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[start:stop] = (weights @ values).transpose(0, 1).to(q.dtype)
    return out


def paged_decode_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lengths: Tensor,
    slots: Tensor,
    bound: int,
    scale: float,
    window: int | None = None,
    rotation: HeadRotation | None = None,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    if rotation is not None:
        H, G = q.shape[1], k.shape[1]
        packed = torch.cat([q, k, v], dim=1)
        rotate_heads_ref(packed.flatten(1), replace(rotation, positions=rotation.positions[: len(q)]), H, G)
        q, k, v = packed.split([H, G, G], dim=1)
    B = len(q)
    store_kv_ref(k, v, k_cache, v_cache, slots[:B])
    result = paged_attention_ref(q, k_cache, v_cache, page_table[:B], kv_lengths[:B], [1] * B, scale, window)
    return result if out is None else out.copy_(result)


def paged_prefill_ref(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lengths: Tensor,
    cu_seqlens: Tensor,
    decodes: int,
    scale: float,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    lengths = cu_seqlens[decodes:].diff().tolist()
    tables, totals = page_table[decodes:], kv_lengths[decodes:]
    rows = q[decodes : decodes + sum(lengths)]
    out[decodes : decodes + sum(lengths)] = paged_attention_ref(
        rows, k_cache, v_cache, tables, totals, lengths, scale, window
    )
    return out


def paged_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lengths: Tensor,
    slots: Tensor,
    bound: int,
    scale: float,
    window: int | None = None,
    rotation: HeadRotation | None = None,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """Store the new token of each sequence and attend over all its tokens.

    Args:
        q: [B, H, head_dim]; k, v: [B, G, head_dim], the last axis contiguous: one token a sequence.
        k_cache, v_cache: [pages, page size, G, head_dim], contiguous. Rows of a sequence's pages past its length may
            hold anything, NaN included.
        page_table: [B, M] int32, contiguous. kv_lengths: [B] int32, the new token included, 1 at least.
        slots: [B] int32: row of the cache each new token is stored in. That row is not read. These three, and the
            positions of the rotation, may have more rows, which are left alone.
        bound: no kv_length is larger; what is in a graph's key, as it decides how the keys are shared out.
        window: keys seen to the left, or None for all.
        rotation: what happens to q and k first, or None where it has happened.
        out: [B, H, head_dim], contiguous, to be written.
        scratch: at least `scratch_bytes` bytes for partial results.

    Returns:
        [B, H, head_dim] in q's dtype; softmax and sums in fp32.
    """
    run = paged_decode_triton if runs_triton(q) else paged_decode_ref
    return run(q, k, v, k_cache, v_cache, page_table, kv_lengths, slots, bound, scale, window, rotation, out, scratch)


def paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lengths: Tensor,
    cu_seqlens: Tensor,
    decodes: int,
    scale: float,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend with the tokens of the sequences after the first `decodes`, which have one token each and are left out.

    Args:
        q: [T, H, head_dim], the last axis contiguous.
        k_cache, v_cache: [pages, page size, G, head_dim], contiguous; keys and values of these tokens are stored.
        page_table: [B, M] int32. kv_lengths: [B] int32: tokens of each sequence stored, those of this batch included.
        cu_seqlens: [B + 1] int32. Rows past cu_seqlens[-1] are neither read nor written.
        window: keys seen to the left, or None for all.
        out: [T, H, head_dim], contiguous, to be written.

    Returns:
        [T, H, head_dim] in q's dtype; rows of other sequences are not set.
    """
    run = paged_prefill_triton if runs_triton(q) else paged_prefill_ref
    return run(q, k_cache, v_cache, page_table, kv_lengths, cu_seqlens, decodes, scale, window, out)
