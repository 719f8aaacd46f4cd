"""Per-head RMSNorm of queries and keys and rotary embedding, in place on the packed QKV."""

from __future__ import annotations

import torch
from torch import Tensor

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


def rope_table(max_positions: int, head_dim: int, theta: float, device: torch.device | str = "cpu") -> Tensor:
    """cos then sin of every position (arXiv:2104.09864): fp32 [max_positions, head_dim], a half each."""
    # As transformers writes it: theta ** (-i / head_dim) rounds otherwise, which is 4e-3 in cos at position 40,000.
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    angles = torch.arange(max_positions, dtype=torch.float32, device=device)[:, None] * inverse
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def qk_norm_rope_ref(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> Tensor:
    tokens = qkv.shape[0]
    head_dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    heads = qkv.view(tokens, num_heads + 2 * num_kv_heads, head_dim)
    cos, sin = table[positions].unsqueeze(1).chunk(2, dim=-1)
    q, k = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm_ref(q, q_weight, eps), rms_norm_ref(k, k_weight, eps)
    heads[:, :num_heads] = _rotate(q.float(), cos, sin).to(qkv.dtype)
    heads[:, num_heads : num_heads + num_kv_heads] = _rotate(k.float(), cos, sin).to(qkv.dtype)
    return qkv


@jit(do_not_specialize=["eps"])
def _qk_norm_rope(
    qkv: Ptr,
    positions: Ptr,
    table: Ptr,
    q_weight: Ptr,
    k_weight: Ptr,
    eps: Ptr,
    H: constexpr,
    G: constexpr,
    HEAD_DIM: constexpr,
    HALF: constexpr,
    HEADS: constexpr,
    NORM: constexpr,
    PDL: constexpr,
) -> None:
    """One program: HEADS neighbouring heads of one token, each as its two halves."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # All loads have the shape of the block, also of what its heads have in common: one layout, where a row that is
    # spread over the heads went by way of shared memory.
    token = tl.program_id(0)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    col = tl.arange(0, HALF)[None, :]
    mask = (head < H + G) & (col < HEAD_DIM // 2)
    if NORM:
        of_q, of_k = mask & (head < H), mask & (head >= H)
        at = head * 0 + col
        first_weight = tl.load(q_weight + at, mask=of_q, other=0.0) + tl.load(k_weight + at, mask=of_k, other=0.0)
        at += HEAD_DIM // 2
        second_weight = tl.load(q_weight + at, mask=of_q, other=0.0) + tl.load(k_weight + at, mask=of_k, other=0.0)
    row = table + tl.load(positions + token).to(tl.int64) * HEAD_DIM + head * 0 + col
    cos = tl.load(row, mask=mask, other=0.0)
    sin = tl.load(row + HEAD_DIM // 2, mask=mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    base = qkv + token.to(tl.int64) * ((H + 2 * G) * HEAD_DIM) + head * HEAD_DIM + col
    first = tl.load(base, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(base + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first + second * second, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        # Rounded to the stored type between norm and rotation, as the reference implementations do.
        first = (first * scale * first_weight.to(tl.float32)).to(qkv.dtype.element_ty).to(tl.float32)
        second = (second * scale * second_weight.to(tl.float32)).to(qkv.dtype.element_ty).to(tl.float32)
    tl.store(base, (first * cos - second * sin).to(qkv.dtype.element_ty), mask=mask)
    tl.store(base + HEAD_DIM // 2, (second * cos + first * sin).to(qkv.dtype.element_ty), mask=mask)


def qk_norm_rope_triton(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> Tensor:
    require_contiguous(qkv=qkv, positions=positions, table=table, q_weight=q_weight, k_weight=k_weight)
    head_dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    rotated = num_heads + num_kv_heads
    # About 512 elements a warp: 8 heads of 128 in two warps.
    heads = min(8, next_power_of_2(rotated))
    norm = q_weight is not None and k_weight is not None
    launch(
        _qk_norm_rope,
        (qkv.shape[0], cdiv(rotated, heads)),
        qkv,
        positions,
        table,
        q_weight if norm else table,
        k_weight if norm else table,
        eps,
        H=num_heads,
        G=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=next_power_of_2(head_dim // 2),
        HEADS=heads,
        NORM=norm,
        device=qkv.device,
        warps=max(1, min(4, heads * head_dim // 512)),
    )
    return qkv


def qk_norm_rope(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> Tensor:
    """q = rope(rmsnorm(q)), k = rope(rmsnorm(k)), written back into qkv; v is left as it is.

    Args:
        qkv: [T, (H + 2 G) head_dim], heads in the order q, k, v. Changed in place.
        positions: [T] int32.
        table: fp32 [max_positions, head_dim] of `rope_table`; rotate-half (NeoX) order.
        q_weight, k_weight: [head_dim], or both None for a family without QK norm.

    Returns:
        qkv itself.
    """
    run = qk_norm_rope_triton if runs_triton(qkv) else qk_norm_rope_ref
    return run(qkv, positions, table, q_weight, k_weight, eps, num_heads, num_kv_heads)
