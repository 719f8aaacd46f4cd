"""Attention of one new token a sequence over the pages of its cache: the step of generating.

Few queries and many keys: programs take a share of a sequence's keys each (flash decoding), for all query heads of one
key/value head, and leave partial results that a second small kernel merges. How many shares there are comes from the
host, how long they are from the length on the device; shares without keys end at once.

The new token's keys and values come from this batch, not from the cache: the first share starts its softmax with them
and stores them, so that no kernel has to store before. QK norm and rotary embedding of the new token, where asked for,
happen on the way: a program's part of them is a few hundred numbers.

What lies in the cache was written by earlier batches, all of whose kernels have finished when this batch's first one
starts: it is at rest, and a program loads its first block of keys and values before it waits for the kernel before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rose.batch import HeadRotation
from rose.kernels.launch import Ptr, cdiv, constexpr, jit, launch, next_power_of_2, require_contiguous, tl
from rose.kernels.store_kv import check_cache, norm_rope_rows, rotary_columns

HEAD_DIMS = (16, 32, 64, 128, 256)
_LOG2_E = 1.4426950408889634
# Streaming multiprocessors of an H100 or H200.
_SMS = 132
_MOST_SPLITS = 64
# Keys a share may have at most at the bound of a graph, so that one long sequence among short ones is not left to a few
# programs.
_SHARE = 2048
# Up to so many keys so many programs are enough, and where the sequences alone make as many nothing is merged: the
# kernel that merges takes a place in the chain of dependent launches, more than the few blocks it would spare.
_FEW_KEYS, _FEW_PROGRAMS = 1024, 64


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """How a step is cut up: keys a block, shares of a sequence's keys, warps, depth of the pipeline."""

    bn: int
    splits: int
    warps: int
    stages: int


def decode_tile(sequences: int, num_kv_heads: int, head_dim: int, bound: int) -> DecodeTile:
    """Two programs a multiprocessor where the keys are many, a quarter of them where they are few. Depends on what a
    graph's key fixes, and nothing else."""
    bn = 64 if head_dim <= 128 else 32
    wanted = _FEW_PROGRAMS if bound <= _FEW_KEYS else 2 * _SMS
    splits = max(cdiv(wanted, sequences * num_kv_heads), cdiv(bound, _SHARE))
    # Some stages go to the page numbers, which addresses hang on; five leave two blocks of keys and values in flight.
    return DecodeTile(bn, max(1, min(splits, cdiv(bound, bn), _MOST_SPLITS)), 4, 5)


def scratch_bytes(sequences: int, num_heads: int, head_dim: int, splits: int) -> int:
    """Partial results of a step; none where sequences are not split."""
    return 0 if splits == 1 else 4 * sequences * num_heads * splits * (head_dim + 1)


@jit
def _share(kv_length: Ptr, split: Ptr, splits: Ptr, WINDOW: constexpr, BN: constexpr) -> tuple[Ptr, Ptr]:
    """(first, end): cached positions of share `split` of `splits`; the new token at kv_length - 1 is not among them."""
    end = kv_length - 1
    lo = tl.maximum(end - WINDOW, 0) if WINDOW >= 0 else 0
    # Whole blocks, so that a short sequence has one program that works and others that leave.
    length = (end - lo + splits * BN - 1) // (splits * BN) * BN
    first = lo + split * length
    return first, tl.minimum(first + length, end)


@jit
def page_rows(pages: Ptr, position: Ptr, end: Ptr, PAGE: constexpr) -> Ptr:
    """Rows of the cache that hold these positions of one sequence; past the end some row of page 0."""
    page = tl.load(pages + position // PAGE, mask=position < end, other=0)
    return page.to(tl.int64) * PAGE + position % PAGE


@jit
def _head_rows(
    x: Ptr,
    mask: Ptr,
    norm_weight: Ptr,
    cos: Ptr,
    sin: Ptr,
    swapped: Ptr,
    col: Ptr,
    eps: Ptr,
    HEAD_DIM: constexpr,
    ROTARY: constexpr,
    NORM: constexpr,
) -> Ptr:
    """Heads [N, HEAD_DIM] as attention takes them: normalised and turned where asked for, in the stored type."""
    rows = tl.load(x + col[None, :], mask=mask, other=0.0)
    if ROTARY > 0:
        partner = tl.load(x + swapped[None, :], mask=mask, other=0.0)
        weight = cos
        partner_weight = cos
        if NORM:
            weight = tl.load(norm_weight + col).to(tl.float32)
            partner_weight = tl.load(norm_weight + swapped).to(tl.float32)
        dtype: tl.constexpr = x.dtype.element_ty
        rows = norm_rope_rows(
            rows.to(tl.float32),
            partner.to(tl.float32),
            weight[None, :],
            partner_weight[None, :],
            cos[None, :],
            sin[None, :],
            eps,
            dtype,
            HEAD_DIM,
            NORM,
        ).to(dtype)
    return rows


@jit
def attend_block(
    q: Ptr, k: Ptr, v: Ptr, seen: Ptr, scale: Ptr, top: Ptr, total: Ptr, acc: Ptr, MASKED: constexpr, BLIND: constexpr
) -> tuple[Ptr, Ptr, Ptr]:
    """One block of keys of a running softmax in base 2: (largest score, sum of weights, weighted values).

    MASKED: only the keys that are `seen` count. BLIND: a query may have seen nothing yet.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top) if BLIND else new_top
    shrink = tl.exp2(top - base)
    p = tl.exp2(scores - base[:, None])
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new_top, total, acc


@jit(do_not_specialize=["scale", "eps", "table_row", "splits"])
def _paged_decode(
    q: Ptr,
    k: Ptr,
    v: Ptr,
    k_cache: Ptr,
    v_cache: Ptr,
    page_table: Ptr,
    kv_lengths: Ptr,
    slots: Ptr,
    positions: Ptr,
    table: Ptr,
    q_weight: Ptr,
    k_weight: Ptr,
    out: Ptr,
    part: Ptr,
    logs: Ptr,
    scale: Ptr,
    eps: Ptr,
    table_row: Ptr,
    splits: Ptr,
    q_row: Ptr,
    q_head: Ptr,
    k_row: Ptr,
    k_head: Ptr,
    v_row: Ptr,
    v_head: Ptr,
    G: constexpr,
    GROUP: constexpr,
    HEAD_DIM: constexpr,
    ROTARY: constexpr,
    NORM: constexpr,
    PAGE: constexpr,
    WINDOW: constexpr,
    BM: constexpr,
    BN: constexpr,
    SHARED: constexpr,
    PDL: constexpr,
) -> None:
    """Program (b * G + g, s): the query heads of key/value head g over share s of sequence b's keys.

    ROTARY: 0 if q and k come as they are to be used. WINDOW: -1 for none. SHARED: there are other shares to merge with.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    sequence = tl.program_id(0) // G
    kv_head = tl.program_id(0) % G
    split = tl.program_id(1)
    first, end = _share(tl.load(kv_lengths + sequence), split, splits, WINDOW, BN)
    pages = page_table + sequence.to(tl.int64) * table_row
    col = tl.arange(0, HEAD_DIM)
    block = tl.arange(0, BN)
    at = kv_head * HEAD_DIM + col[None, :]
    rows = page_rows(pages, first + block, end, PAGE)[:, None] * (G * HEAD_DIM)
    seen = first + block < end
    k_block = tl.load(k_cache + rows + at, mask=seen[:, None], other=0.0)
    v_block = tl.load(v_cache + rows + at, mask=seen[:, None], other=0.0)
    slot = tl.load(slots + sequence).to(tl.int64) * (G * HEAD_DIM)
    cos, sin, swapped = col, col, col
    if ROTARY > 0:
        cos, sin, swapped = rotary_columns(positions, sequence, table, col, ROTARY)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if (first < end) | (split == 0):
        member = tl.arange(0, BM)
        head = kv_head * GROUP + member
        here = sequence.to(tl.int64)
        mask = (member < GROUP)[:, None]
        q_at = q + here * q_row + head[:, None] * q_head
        q_block = _head_rows(q_at, mask, q_weight, cos, sin, swapped, col, eps, HEAD_DIM, ROTARY, NORM)
        top = tl.full((BM,), float("-inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        acc = tl.zeros((BM, HEAD_DIM), tl.float32)
        if split == 0:
            one = tl.arange(0, 1)[:, None]
            k_at = k + here * k_row + kv_head * k_head + one
            new_k = _head_rows(k_at, one == 0, k_weight, cos, sin, swapped, col, eps, HEAD_DIM, ROTARY, NORM)
            new_v = tl.load(v + here * v_row + kv_head * v_head + one + col[None, :])
            tl.store(k_cache + slot + one + at, new_k)
            tl.store(v_cache + slot + one + at, new_v)
            top = tl.sum(q_block.to(tl.float32) * new_k.to(tl.float32), 1) * scale
            total += 1.0
            acc += new_v.to(tl.float32)
        top, total, acc = attend_block(q_block, k_block, v_block, seen[None, :], scale, top, total, acc, True, False)
        for start in range(first + BN, end, BN):
            rows = page_rows(pages, start + block, end, PAGE)[:, None] * (G * HEAD_DIM)
            seen = start + block < end
            k_block = tl.load(k_cache + rows + at, mask=seen[:, None], other=0.0)
            v_block = tl.load(v_cache + rows + at, mask=seen[:, None], other=0.0)
            top, total, acc = attend_block(
                q_block, k_block, v_block, seen[None, :], scale, top, total, acc, True, False
            )
        result = acc / total[:, None]
        row = sequence * (G * GROUP) + head
        if SHARED:
            piece = row * splits + split
            tl.store(part + piece[:, None] * HEAD_DIM + col[None, :], result, mask=mask)
            tl.store(logs + piece, top + tl.log2(total), mask=member < GROUP)
        else:
            tl.store(out + row[:, None] * HEAD_DIM + col[None, :], result.to(out.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["splits"])
def _merge(
    part: Ptr,
    logs: Ptr,
    kv_lengths: Ptr,
    out: Ptr,
    splits: Ptr,
    H: constexpr,
    HEAD_DIM: constexpr,
    WINDOW: constexpr,
    BN: constexpr,
    SPLIT_LANES: constexpr,
    PDL: constexpr,
) -> None:
    """Program (b, h): the shares of one head, weighted by their sums, in a fixed order."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    sequence = tl.program_id(0)
    split = tl.arange(0, SPLIT_LANES)
    first, end = _share(tl.load(kv_lengths + sequence), split, splits, WINDOW, BN)
    filled = (split == 0) | ((first < end) & (split < splits))
    row = sequence * H + tl.program_id(1)
    col = tl.arange(0, HEAD_DIM)
    piece = row * splits + split
    if PDL:
        tl.extra.cuda.gdc_wait()
    log = tl.load(logs + piece, mask=filled, other=float("-inf"))
    values = tl.load(part + piece[:, None] * HEAD_DIM + col[None, :], mask=filled[:, None], other=0.0)
    weight = tl.exp2(log - tl.max(log, 0))
    result = tl.sum(weight[:, None] * values, 0) / tl.sum(weight, 0)
    tl.store(out + row * HEAD_DIM + col, result.to(out.dtype.element_ty))


def check_heads(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor) -> None:
    """Raises ValueError: heads these kernels do not take, or that do not belong together."""
    (T, H, head_dim), G = q.shape, k_cache.shape[2]
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head dim must be a power of two from 16 to 256; it is {head_dim}")
    if H % G or k.shape != (T, G, k_cache.shape[3]) or v.shape != k.shape or k_cache.shape[3] != head_dim:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} and a cache of {G} heads of "
            f"{k_cache.shape[3]} do not belong together"
        )
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        raise ValueError("q, k and v must be contiguous along the head dim")


def paged_decode_triton(
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
    """See `paged_decode` of paged_attention.py."""
    check_cache(k_cache, v_cache)
    require_contiguous(kv_lengths=kv_lengths, slots=slots, out=out, page_table=page_table)
    check_heads(q, k, v, k_cache)
    B, H, head_dim = q.shape
    page_size, G = k_cache.shape[1:3]
    tile = decode_tile(B, G, head_dim, bound)
    out = torch.empty(B, H, head_dim, dtype=q.dtype, device=q.device) if out is None else out
    need = scratch_bytes(B, H, head_dim, tile.splits)
    if scratch is None:
        scratch = torch.empty(need, dtype=torch.uint8, device=q.device)
    if scratch.numel() < need:
        raise ValueError(f"{tile.splits} shares of {B} x {H} heads of {head_dim} need {need} bytes of scratch")
    numbers = scratch[:need].view(torch.float32)
    part, logs = (numbers, numbers[B * H * tile.splits * head_dim :]) if need else (out, out)
    norm = rotation is not None and rotation.q_weight is not None and rotation.k_weight is not None
    launch(
        _paged_decode,
        (B * G, tile.splits),
        q,
        k,
        v,
        k_cache,
        v_cache,
        page_table,
        kv_lengths,
        slots,
        slots if rotation is None else rotation.positions,
        slots if rotation is None else rotation.table,
        rotation.q_weight if rotation is not None and norm else slots,
        rotation.k_weight if rotation is not None and norm else slots,
        out,
        part,
        logs,
        scale * _LOG2_E,
        0.0 if rotation is None else rotation.eps,
        page_table.shape[1],
        tile.splits,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        G=G,
        GROUP=H // G,
        HEAD_DIM=head_dim,
        ROTARY=0 if rotation is None else rotation.table.shape[1],
        NORM=norm,
        PAGE=page_size,
        WINDOW=-1 if window is None else window,
        BM=max(16, next_power_of_2(H // G)),
        BN=tile.bn,
        SHARED=tile.splits > 1,
        device=q.device,
        warps=tile.warps,
        stages=tile.stages,
    )
    if tile.splits > 1:
        launch(
            _merge,
            (B, H),
            part,
            logs,
            kv_lengths,
            out,
            tile.splits,
            H=H,
            HEAD_DIM=head_dim,
            WINDOW=-1 if window is None else window,
            BN=tile.bn,
            SPLIT_LANES=next_power_of_2(tile.splits),
            device=q.device,
            warps=4,
        )
    return out
