"""Keys and values into the pages of a cache; for chunks of prompts together with QK norm and rotary embedding.

A layer's cache is two tensors [pages, page size, G, head_dim]; a slot is a row of [pages * page size, G, head_dim].
Knows rows and slots; does not know which pages belong to whom.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rose.batch import HeadRotation
from rose.kernels.add_norm import rms_norm_ref
from rose.kernels.launch import (
    Ptr,
    cdiv,
    constexpr,
    jit,
    launch,
    next_power_of_2,
    require_contiguous,
    runs_triton,
    tl,
)


def store_kv_ref(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, start: int = 0) -> None:
    rows = slots[start:].long()
    k_cache.view(-1, *k_cache.shape[2:])[rows] = k[start:]
    v_cache.view(-1, *v_cache.shape[2:])[rows] = v[start:]


def qk_norm_rope_store_ref(
    qkv: Tensor, rotation: HeadRotation, k_cache: Tensor, v_cache: Tensor, slots: Tensor, start: int = 0
) -> None:
    G, head_dim = k_cache.shape[2:]
    H = qkv.shape[1] // head_dim - 2 * G
    rotate_heads_ref(qkv[start:], replace(rotation, positions=rotation.positions[start:]), H, G)
    _, k, v = qkv.view(-1, H + 2 * G, head_dim).split([H, G, G], dim=1)
    store_kv_ref(k, v, k_cache, v_cache, slots, start)


def rotate_heads_ref(qkv: Tensor, rotation: HeadRotation, H: int, G: int) -> None:
    """In place on qkv [T, (H + 2 G) head_dim]."""
    heads = qkv.view(qkv.shape[0], H + 2 * G, -1)
    cos, sin = rotation.table[rotation.positions].unsqueeze(1).chunk(2, dim=-1)
    turned = rotation.table.shape[1]
    for part, weight in ((heads[:, :H], rotation.q_weight), (heads[:, H : H + G], rotation.k_weight)):
        rows = part if weight is None else rms_norm_ref(part, weight, rotation.eps)
        first, second = rows[..., :turned].float().chunk(2, dim=-1)
        part[..., turned:] = rows[..., turned:]
        part[..., :turned] = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(qkv.dtype)


@jit
def rotary_columns(positions: Ptr, token: Ptr, table: Ptr, col: Ptr, ROTARY: constexpr) -> tuple[Ptr, Ptr, Ptr]:
    """(cos, sin, partner): the head's column col becomes x[col] * cos + x[partner] * sin, at the token's position.

    Columns come in halves (NeoX order); those past the first ROTARY stay as they are.
    """
    HALF: tl.constexpr = ROTARY // 2
    turns = col < ROTARY
    row = table + tl.load(positions + token).to(tl.int64) * ROTARY + tl.where(col < HALF, col, col - HALF)
    cos = tl.load(row, mask=turns, other=1.0)
    sin = tl.load(row + HALF, mask=turns, other=0.0)
    partner = tl.where(turns, tl.where(col < HALF, col + HALF, col - HALF), col)
    return cos, tl.where(col < HALF, -sin, sin), partner


@jit
def norm_rope_rows(
    x: Ptr,
    partner: Ptr,
    weight: Ptr,
    partner_weight: Ptr,
    cos: Ptr,
    sin: Ptr,
    eps: Ptr,
    DTYPE: constexpr,
    HEAD_DIM: constexpr,
    NORM: constexpr,
) -> Ptr:
    """RMSNorm and rotary embedding of heads [N, HEAD_DIM] in fp32, not yet rounded.

    `partner` holds the same heads with their columns exchanged; columns past the head dim are zero.
    """
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        # Rounded to the stored type between norm and rotation, as the reference implementations do.
        x = (x * scale * weight).to(DTYPE).to(tl.float32)
        partner = (partner * scale * partner_weight).to(DTYPE).to(tl.float32)
    return x * cos + partner * sin


@jit(do_not_specialize=["start"])
def _store_kv(
    k: Ptr,
    v: Ptr,
    k_cache: Ptr,
    v_cache: Ptr,
    slots: Ptr,
    start: Ptr,
    k_row: Ptr,
    k_head: Ptr,
    v_row: Ptr,
    v_head: Ptr,
    G: constexpr,
    HEAD_DIM: constexpr,
    HEADS: constexpr,
    COLS: constexpr,
    PDL: constexpr,
) -> None:
    """One program: HEADS neighbouring key/value heads of one token."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = start + tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    col = tl.arange(0, COLS)
    mask = (head < G)[:, None] & (col < HEAD_DIM)[None, :]
    row = tl.load(slots + token).to(tl.int64) * (G * HEAD_DIM)
    to = row + head[:, None] * HEAD_DIM + col[None, :]
    at = tl.cast(token, tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
    keys = tl.load(k + at * k_row + head[:, None] * k_head + col[None, :], mask=mask)
    values = tl.load(v + at * v_row + head[:, None] * v_head + col[None, :], mask=mask)
    tl.store(k_cache + to, keys, mask=mask)
    tl.store(v_cache + to, values, mask=mask)


@jit(do_not_specialize=["eps", "start"])
def _qk_norm_rope_store(
    qkv: Ptr,
    positions: Ptr,
    table: Ptr,
    q_weight: Ptr,
    k_weight: Ptr,
    eps: Ptr,
    k_cache: Ptr,
    v_cache: Ptr,
    slots: Ptr,
    start: Ptr,
    H: constexpr,
    G: constexpr,
    HEAD_DIM: constexpr,
    ROTARY: constexpr,
    HEADS: constexpr,
    COLS: constexpr,
    NORM: constexpr,
    PDL: constexpr,
) -> None:
    """One program: HEADS neighbouring heads of one token, queries back to their place, keys and values to the cache."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = start + tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    col = tl.arange(0, COLS)
    inside = col < HEAD_DIM
    is_query = (head < H)[:, None]
    is_key = ((head >= H) & (head < H + G))[:, None]
    is_value = ((head >= H + G) & (head < H + 2 * G))[:, None]
    mask = (head < H + 2 * G)[:, None] & inside[None, :]
    cos, sin, swapped = rotary_columns(positions, token, table, col, ROTARY)
    weight = cos[None, :]
    partner_weight = cos[None, :]
    if NORM:
        wq = tl.load(q_weight + col, mask=inside, other=0.0).to(tl.float32)
        wk = tl.load(k_weight + col, mask=inside, other=0.0).to(tl.float32)
        weight = tl.where(is_query, wq[None, :], wk[None, :])
        wq = tl.load(q_weight + swapped, mask=inside, other=0.0).to(tl.float32)
        wk = tl.load(k_weight + swapped, mask=inside, other=0.0).to(tl.float32)
        partner_weight = tl.where(is_query, wq[None, :], wk[None, :])
    slot = tl.load(slots + token).to(tl.int64) * (G * HEAD_DIM)
    row = tl.cast(token, tl.int64) * ((H + 2 * G) * HEAD_DIM) + head[:, None] * HEAD_DIM
    if PDL:
        tl.extra.cuda.gdc_wait()
    plain = tl.load(qkv + row + col[None, :], mask=mask, other=0.0)
    partner = tl.load(qkv + row + swapped[None, :], mask=mask, other=0.0).to(tl.float32)
    turned = norm_rope_rows(
        plain.to(tl.float32),
        partner,
        weight,
        partner_weight,
        cos[None, :],
        sin[None, :],
        eps,
        qkv.dtype.element_ty,
        HEAD_DIM,
        NORM,
    ).to(qkv.dtype.element_ty)
    tl.store(qkv + row + col[None, :], turned, mask=mask & is_query)
    tl.store(k_cache + slot + (head - H)[:, None] * HEAD_DIM + col[None, :], turned, mask=mask & is_key)
    tl.store(v_cache + slot + (head - H - G)[:, None] * HEAD_DIM + col[None, :], plain, mask=mask & is_value)


def check_cache(k_cache: Tensor, v_cache: Tensor) -> None:
    """Raises ValueError: not two contiguous tensors [pages, page size, G, head_dim] of one shape and dtype."""
    require_contiguous(k_cache=k_cache, v_cache=v_cache)
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            f"a cache is two tensors [pages, page size, G, head_dim] of one dtype; these are {tuple(k_cache.shape)} "
            f"{k_cache.dtype} and {tuple(v_cache.shape)} {v_cache.dtype}"
        )


def store_kv_triton(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, start: int = 0) -> None:
    check_cache(k_cache, v_cache)
    require_contiguous(slots=slots)
    G, head_dim = k_cache.shape[2:]
    if k.shape != v.shape or k.shape[1:] != (G, head_dim) or k.stride(-1) != 1 or v.stride(-1) != 1:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} do not fit a cache of {G} heads of {head_dim}")
    heads = min(8, next_power_of_2(G))
    launch(
        _store_kv,
        (k.shape[0] - start, cdiv(G, heads)),
        k,
        v,
        k_cache,
        v_cache,
        slots,
        start,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        G=G,
        HEAD_DIM=head_dim,
        HEADS=heads,
        COLS=next_power_of_2(head_dim),
        device=k.device,
        warps=max(1, min(4, heads * head_dim // 512)),
    )


def qk_norm_rope_store_triton(
    qkv: Tensor, rotation: HeadRotation, k_cache: Tensor, v_cache: Tensor, slots: Tensor, start: int = 0
) -> None:
    check_cache(k_cache, v_cache)
    q_weight, k_weight = rotation.q_weight, rotation.k_weight
    positions, table = rotation.positions, rotation.table
    require_contiguous(qkv=qkv, positions=positions, table=table, q_weight=q_weight, k_weight=k_weight, slots=slots)
    G, head_dim = k_cache.shape[2:]
    H = qkv.shape[1] // head_dim - 2 * G
    # About 512 elements a warp: 8 heads of 128 in two warps.
    heads = min(8, next_power_of_2(H + 2 * G))
    norm = q_weight is not None and k_weight is not None
    launch(
        _qk_norm_rope_store,
        (qkv.shape[0] - start, cdiv(H + 2 * G, heads)),
        qkv,
        positions,
        table,
        q_weight if norm else table,
        k_weight if norm else table,
        rotation.eps,
        k_cache,
        v_cache,
        slots,
        start,
        H=H,
        G=G,
        HEAD_DIM=head_dim,
        ROTARY=table.shape[1],
        HEADS=heads,
        COLS=next_power_of_2(head_dim),
        NORM=norm,
        device=qkv.device,
        warps=max(1, min(4, heads * head_dim // 512)),
    )


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, start: int = 0) -> None:
    """Write each token's keys and values to its slot.

    Args:
        k, v: [T, G, head_dim], the last axis contiguous.
        k_cache, v_cache: [pages, page size, G, head_dim], contiguous.
        slots: [T] int32. Where several tokens share one, one of them stays.
        start: tokens before it are left out. (Views that begin there would be compiled for once more.)
    """
    (store_kv_triton if runs_triton(k) else store_kv_ref)(k, v, k_cache, v_cache, slots, start)


def qk_norm_rope_store(
    qkv: Tensor, rotation: HeadRotation, k_cache: Tensor, v_cache: Tensor, slots: Tensor, start: int = 0
) -> None:
    """QK norm, rotary embedding and `store_kv` in one pass.

    Args:
        qkv: [T, (H + 2 G) head_dim], heads in the order q, k, v. Queries are changed in place; what its keys hold
            afterwards is not said.
        k_cache, v_cache, slots, start: as in `store_kv`.
    """
    run = qk_norm_rope_store_triton if runs_triton(qkv) else qk_norm_rope_store_ref
    run(qkv, rotation, k_cache, v_cache, slots, start)
