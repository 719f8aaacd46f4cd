"""Attention of chunks of prompts over the pages of their sequences, their own tokens included, which lie there already.

As rose/kernels/short_attention.py, a program takes a block of queries and a head and finds its sequence by itself; keys
and values come row by row through the page table. Nothing is planned: the grid comes from tokens and sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rose.kernels.launch import Ptr, constexpr, jit, launch, next_power_of_2, require_contiguous, tl
from rose.kernels.paged_decode import attend_block, page_rows
from rose.kernels.short_attention import sequence_of
from rose.kernels.store_kv import check_cache

# Boundaries looked at in one load.
_CHUNK = 1024
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """Queries a program, keys a block, warps, depth of the pipeline."""

    bm: int
    bn: int
    warps: int
    stages: int


def prefill_tile(tokens: int, head_dim: int) -> PrefillTile:
    """Few tokens take small blocks, so that more programs share them."""
    if head_dim > 128:
        return PrefillTile(64, 32, 4, 2)
    return PrefillTile(64, 64, 4, 3) if tokens <= 1024 else PrefillTile(128, 64, 8, 3)


@jit(do_not_specialize=["B", "decodes", "scale", "table_row"])
def _paged_prefill(
    q: Ptr,
    k_cache: Ptr,
    v_cache: Ptr,
    page_table: Ptr,
    kv_lengths: Ptr,
    cu_seqlens: Ptr,
    out: Ptr,
    B: Ptr,
    decodes: Ptr,
    scale: Ptr,
    table_row: Ptr,
    q_row: Ptr,
    q_head: Ptr,
    H: constexpr,
    G: constexpr,
    HEAD_DIM: constexpr,
    PAGE: constexpr,
    WINDOW: constexpr,
    BM: constexpr,
    BN: constexpr,
    CHUNK: constexpr,
    ONE_CHUNK: constexpr,
    PDL: constexpr,
) -> None:
    """Program (i, h): head h of a block of BM queries of one of the B sequences after the first `decodes`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    head = tl.program_id(1)
    sequence, start, stop = sequence_of(cu_seqlens + decodes, program, B, BM, CHUNK, ONE_CHUNK)
    length = stop - start
    first_query = (program - start // BM - sequence) * BM
    if PDL:
        tl.extra.cuda.gdc_wait()
    # No sequence is found (-1) for programs that belong to the tokens before the chunks.
    if (sequence >= 0) & (first_query < length):
        end = tl.load(kv_lengths + decodes + sequence)
        pages = page_table + (decodes + sequence).to(tl.int64) * table_row
        row = first_query + tl.arange(0, BM)
        query = end - length + row
        here = tl.cast(start, tl.int64) + row
        col = tl.arange(0, HEAD_DIM)
        block = tl.arange(0, BN)
        at = head // (H // G) * HEAD_DIM + col[None, :]
        inside = (row < length)[:, None]
        q_block = tl.load(q + here[:, None] * q_row + head * q_head + col[None, :], mask=inside, other=0.0)
        top = tl.full((BM,), float("-inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        acc = tl.zeros((BM, HEAD_DIM), tl.float32)
        first_position = end - length + first_query
        last = tl.minimum(end, first_position + BM)
        if WINDOW >= 0:
            whole = tl.maximum(first_position - WINDOW, 0) // BN * BN
        else:
            # Blocks that every query sees whole need no mask.
            whole = (first_position + 1) // BN * BN
            for begin in range(0, whole, BN):
                page = tl.load(pages + (begin + block) // PAGE).to(tl.int64)
                rows = (page * PAGE + (begin + block) % PAGE)[:, None] * (G * HEAD_DIM)
                k_block = tl.load(k_cache + rows + at)
                v_block = tl.load(v_cache + rows + at)
                top, total, acc = attend_block(q_block, k_block, v_block, inside, scale, top, total, acc, False, False)
        for begin in range(whole, last, BN):
            key = begin + block
            rows = page_rows(pages, key, end, PAGE)[:, None] * (G * HEAD_DIM)
            k_block = tl.load(k_cache + rows + at, mask=(key < end)[:, None], other=0.0)
            v_block = tl.load(v_cache + rows + at, mask=(key < end)[:, None], other=0.0)
            seen = (key[None, :] <= query[:, None]) & (key < end)[None, :]
            if WINDOW >= 0:
                seen = seen & (key[None, :] >= query[:, None] - WINDOW)
            top, total, acc = attend_block(q_block, k_block, v_block, seen, scale, top, total, acc, True, WINDOW >= 0)
        # Rows past the chunk may have seen nothing; they are not stored.
        result = (acc / tl.where(total > 0.0, total, 1.0)[:, None]).to(out.dtype.element_ty)
        tl.store(out + (here[:, None] * H + head) * HEAD_DIM + col[None, :], result, mask=inside)


def paged_prefill_triton(
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
    """See `paged_prefill` of paged_attention.py."""
    check_cache(k_cache, v_cache)
    require_contiguous(page_table=page_table, kv_lengths=kv_lengths, cu_seqlens=cu_seqlens, out=out)
    T, H, head_dim = q.shape
    page_size, G = k_cache.shape[1:3]
    sequences = cu_seqlens.shape[0] - 1 - decodes
    tile = prefill_tile(T - decodes, head_dim)
    out = torch.empty(T, H, head_dim, dtype=q.dtype, device=q.device) if out is None else out
    launch(
        _paged_prefill,
        (T // tile.bm + sequences, H),
        q,
        k_cache,
        v_cache,
        page_table,
        kv_lengths,
        cu_seqlens,
        out,
        sequences,
        decodes,
        scale * _LOG2_E,
        page_table.shape[1],
        q.stride(0),
        q.stride(1),
        H=H,
        G=G,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        WINDOW=-1 if window is None else window,
        BM=tile.bm,
        BN=tile.bn,
        CHUNK=min(_CHUNK, max(16, next_power_of_2(sequences))),
        ONE_CHUNK=sequences <= _CHUNK,
        device=q.device,
        warps=tile.warps,
        stages=tile.stages,
    )
    return out
