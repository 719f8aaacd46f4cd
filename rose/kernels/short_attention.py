"""Attention within packed sequences for short ones: one program a block of queries and a head.

Made for sequences of up to a few hundred tokens, where launch and wait are most of the time and dependent launch pays;
longer ones are right too (keys are walked through in blocks with a running softmax). The grid comes from tokens and
sequences, never from the longest length: each program finds its sequence in cu_seqlens itself.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from rose.kernels.launch import Ptr, cdiv, constexpr, jit, launch, next_power_of_2, require_contiguous, runs_triton, tl

# Boundaries looked at in one load.
_CHUNK = 1024
# Tokens from which blocks of 128 queries still fill the multiprocessors several times, with 16 heads.
_MANY = 4096
_LOG2_E = 1.4426950408889634


def short_attention_ref(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_length: int, causal: bool, scale: float
) -> Tensor:
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    group = q.shape[1] // k.shape[1]
    bounds = cu_seqlens.tolist()
    for start, end in pairwise(bounds):
        queries = q[start:end].float().transpose(0, 1)
        keys, values = (x[start:end].float().transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
        scores = queries @ keys.transpose(1, 2) * scale
        if causal:
            n = end - start
            future = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(future, -torch.inf)
        out[start:end] = (scores.softmax(-1) @ values).transpose(0, 1).to(q.dtype)
    return out


@jit
def sequence_of(cu_seqlens: Ptr, program: Ptr, B: Ptr, BM: constexpr, CHUNK: constexpr, ONE_CHUNK: constexpr) -> Ptr:
    """(sequence, start, end): the sequence whose block of BM queries this program takes.

    Sequence b's blocks start at program cu_seqlens[b] // BM + b: room for all of them whatever the lengths, and some
    programs without work. The numbers grow with b, so counting those that are not beyond `program` finds b.
    Where all boundaries fit one load, start and end are picked from it: a second load would depend on the first, and
    each costs half a microsecond that nothing overlaps.
    """
    if ONE_CHUNK:
        b = tl.arange(0, CHUNK)
        starts = tl.load(cu_seqlens + b, mask=b < B, other=0)
        ends = tl.load(cu_seqlens + b + 1, mask=b < B, other=0)
        sequence = tl.sum(((starts // BM + b <= program) & (b < B)).to(tl.int32), 0) - 1
        start = tl.sum(tl.where(b == sequence, starts, 0), 0)
        end = tl.sum(tl.where(b == sequence, ends, 0), 0)
    else:
        count = 0
        for first in range(0, B, CHUNK):
            b = first + tl.arange(0, CHUNK)
            begin = tl.load(cu_seqlens + b, mask=b < B, other=0) // BM + b
            count += tl.sum(((begin <= program) & (b < B)).to(tl.int32), 0)
        sequence = count - 1
        start = tl.load(cu_seqlens + sequence)
        end = tl.load(cu_seqlens + sequence + 1)
    return sequence, start, end


@jit
def _rows(base: Ptr, row: Ptr, stride: Ptr, col: Ptr, length: Ptr, FULL: constexpr) -> Ptr:
    """Rows of one head, zero past the end of the sequence: whatever lies there, it never reaches a product."""
    if FULL:
        return tl.load(base + row[:, None] * stride + col[None, :])
    at = base + row.to(tl.int64)[:, None] * stride + col[None, :]
    return tl.load(at, mask=(row < length)[:, None], other=0.0)


@jit
def _scores(q: Ptr, k: Ptr, query: Ptr, key: Ptr, length: Ptr, scale: Ptr, CAUSAL: constexpr, FULL: constexpr) -> Ptr:
    """q @ k.T * scale for one block of keys; -inf where a key is not to be seen."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if CAUSAL:
        seen = key[None, :] <= query[:, None]
        scores = tl.where(seen if FULL else seen & (key < length)[None, :], scores, float("-inf"))
    elif not FULL:
        scores = tl.where((key < length)[None, :], scores, float("-inf"))
    return scores


@jit
def _fold(acc: Ptr, total: Ptr, top: Ptr, scores: Ptr, v: Ptr) -> Ptr:
    """(acc, total, top) with one more block of keys: the running softmax."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    shrink = tl.exp2(top - new_top)
    p = tl.exp2(scores - new_top[:, None])
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, total * shrink + tl.sum(p, 1), new_top


@jit(do_not_specialize=["B", "T", "scale"])
def _short_attention(
    q: Ptr,
    k: Ptr,
    v: Ptr,
    out: Ptr,
    cu_seqlens: Ptr,
    B: Ptr,
    T: Ptr,
    scale: Ptr,
    q_row: Ptr,
    q_head: Ptr,
    k_row: Ptr,
    k_head: Ptr,
    v_row: Ptr,
    v_head: Ptr,
    H: constexpr,
    GROUP: constexpr,
    HEAD_DIM: constexpr,
    BM: constexpr,
    BN: constexpr,
    CHUNK: constexpr,
    CAUSAL: constexpr,
    ONE_BLOCK: constexpr,
    SINGLE: constexpr,
    FULL: constexpr,
    ONE_CHUNK: constexpr,
    PDL: constexpr,
) -> None:
    """Program (i, h): head h of a block of BM queries.

    ONE_BLOCK: no sequence is longer than BN. SINGLE: there is one sequence, of all T tokens. FULL: and it is exactly
    one block of keys and whole blocks of queries, so nothing needs a mask (a third of the instructions).
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    head = tl.program_id(1)
    if SINGLE:
        # One sequence takes all tokens: nothing to look up.
        start = 0
        length = T
        first_query = program * BM
    else:
        sequence, start, end = sequence_of(cu_seqlens, program, B, BM, CHUNK, ONE_CHUNK)
        length = end - start
        first_query = (program - start // BM - sequence) * BM
    if PDL:
        tl.extra.cuda.gdc_wait()
    if first_query < length:
        query = first_query + tl.arange(0, BM)
        col = tl.arange(0, HEAD_DIM)
        key = tl.arange(0, BN)
        row = tl.cast(start, tl.int64)
        k_base = k + row * k_row + (head // GROUP) * k_head
        v_base = v + row * v_row + (head // GROUP) * v_head
        q_block = _rows(q + row * q_row + head * q_head, query, q_row, col, length, FULL)
        # The first block by itself: for a short sequence it is all, and needs no running maximum.
        k_block = _rows(k_base, key, k_row, col, length, FULL)
        v_block = _rows(v_base, key, v_row, col, length, FULL)
        scores = _scores(q_block, k_block, query, key, length, scale, CAUSAL, FULL)
        top = tl.max(scores, 1)
        p = tl.exp2(scores - top[:, None])
        total = tl.sum(p, 1)
        acc = tl.dot(p.to(v_block.dtype), v_block, input_precision="ieee")
        if not ONE_BLOCK:
            # Keys that all queries of the block see need no mask, the last ones do.
            clear = tl.minimum(length, first_query + 1) // BN * BN if CAUSAL else length // BN * BN
            last = tl.minimum(length, first_query + BM) if CAUSAL else length
            for first in range(BN, clear, BN):
                keys = first + key
                k_block = _rows(k_base, keys, k_row, col, length, True)
                v_block = _rows(v_base, keys, v_row, col, length, True)
                scores = _scores(q_block, k_block, query, keys, length, scale, False, True)
                acc, total, top = _fold(acc, total, top, scores, v_block)
            for first in range(tl.maximum(clear, BN), last, BN):
                keys = first + key
                k_block = _rows(k_base, keys, k_row, col, length, FULL)
                v_block = _rows(v_base, keys, v_row, col, length, FULL)
                scores = _scores(q_block, k_block, query, keys, length, scale, CAUSAL, FULL)
                acc, total, top = _fold(acc, total, top, scores, v_block)
        out_at = out + ((row + query)[:, None] * H + head) * HEAD_DIM + col[None, :]
        value = (acc / total[:, None]).to(out.dtype.element_ty)
        if FULL:
            tl.store(out_at, value)
        else:
            tl.store(out_at, value, mask=(query < length)[:, None])


def block(tokens: int, head_dim: int, max_length: int) -> tuple[int, int, int]:
    """(queries a program, keys a block, warps); few tokens take small blocks, so that more programs share a sequence.

    Up to 256 tokens measured inside encoders of 24 and 28 layers on an H200 (benchmarks/kernels/tune_in_model.py);
    beyond 256 tokens not measured.
    """
    bn = min(max(16, next_power_of_2(max_length)), 128 if head_dim <= 128 else 64)
    if max_length <= 256 or head_dim > 128:
        return (64 if head_dim <= 64 else 16), bn, 4
    return (64, bn, 4) if tokens < _MANY or head_dim > 64 else (128, bn, 8)


def short_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    causal: bool,
    scale: float,
    whole: bool = False,
) -> Tensor:
    T, H, head_dim = q.shape
    G = k.shape[1]
    if head_dim != next_power_of_2(head_dim) or not 16 <= head_dim <= 256:
        raise ValueError(f"head dim must be a power of two from 16 to 256; it is {head_dim}")
    if H % G or v.shape != k.shape or k.shape[0] != T:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not belong together")
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        raise ValueError("q, k and v must be contiguous along the head dim")
    require_contiguous(cu_seqlens=cu_seqlens)
    B = cu_seqlens.shape[0] - 1
    out = torch.empty(T, H, head_dim, dtype=q.dtype, device=q.device)
    single = whole and B == 1
    bm, bn, warps = block(T, head_dim, max_length)
    launch(
        _short_attention,
        (cdiv(T, bm) if single else T // bm + B, H),
        q,
        k,
        v,
        out,
        cu_seqlens,
        B,
        T,
        scale * _LOG2_E,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        H=H,
        GROUP=H // G,
        HEAD_DIM=head_dim,
        BM=bm,
        BN=bn,
        CHUNK=min(_CHUNK, max(16, next_power_of_2(B))),
        SINGLE=single,
        FULL=single and bn == T and T % bm == 0,
        ONE_CHUNK=B <= _CHUNK,
        CAUSAL=causal,
        ONE_BLOCK=max_length <= bn,
        device=q.device,
        warps=warps,
        stages=2,
    )
    return out


def short_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    causal: bool,
    scale: float,
    whole: bool = False,
) -> Tensor:
    """softmax(q @ k.T * scale) @ v within each sequence.

    Args:
        q: [T, H, head_dim]; k, v: [T, G, head_dim], H a multiple of G: query head h uses key head h // (H // G).
            Views of one packed tensor are fine as long as the last axis is contiguous.
        cu_seqlens: [B + 1] int32. Rows past cu_seqlens[-1] are neither read nor written.
        max_length: no sequence is longer. Host side, so that it can be a graph's bound.
        causal: a token sees itself and the tokens before it.
        scale: usually head_dim ** -0.5.
        whole: the sequences take all T tokens; promised by the host, it saves a lone sequence from looking itself up.

    Returns:
        [T, H, head_dim], contiguous, in q's dtype; softmax in fp32. On a GPU the rows past cu_seqlens[-1] are not set.
    """
    if runs_triton(q):
        return short_attention_triton(q, k, v, cu_seqlens, max_length, causal, scale, whole)
    return short_attention_ref(q, k, v, cu_seqlens, max_length, causal, scale)
