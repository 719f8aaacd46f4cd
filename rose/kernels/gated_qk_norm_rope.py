"""Per-head RMSNorm of queries and keys and rotary embedding of their first dimensions, on a packed product whose query
heads each have an output gate beside them.

The row of a token is [q_0 | gate_0 | q_1 | gate_1 | ... | k_0 ... | v_0 ...], as the checkpoint's q_proj has it.
Queries come out as a tensor of their own, so that attention finds its heads side by side; keys are changed in place.
"""

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


def gated_qk_norm_rope_ref(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> Tensor:
    heads = qkv.unflatten(-1, (2 * (num_heads + num_kv_heads), -1))
    cos, sin = table[positions].unsqueeze(1).chunk(2, dim=-1)
    keys = heads[:, 2 * num_heads : 2 * num_heads + num_kv_heads]
    keys[:] = _rotate(rms_norm_ref(keys, k_weight, eps), cos, sin)
    return _rotate(rms_norm_ref(heads[:, : 2 * num_heads : 2], q_weight, eps), cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    first, second = first.float(), second.float()
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


@jit(do_not_specialize=["eps"])
def _gated_qk_norm_rope(
    qkv: Ptr,
    positions: Ptr,
    table: Ptr,
    q_weight: Ptr,
    k_weight: Ptr,
    queries: Ptr,
    eps: Ptr,
    H: constexpr,
    G: constexpr,
    HEAD_DIM: constexpr,
    ROTARY: constexpr,
    HALF: constexpr,
    REST: constexpr,
    HEADS: constexpr,
    PDL: constexpr,
) -> None:
    """One program: HEADS neighbouring heads of one token, queries first; each as two turned halves and the rest."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_query = (head < H)[:, None]
    there = (head < H + G)[:, None]
    turn, keep = tl.arange(0, HALF), ROTARY + tl.arange(0, REST)
    turns, keeps = turn < ROTARY // 2, keep < HEAD_DIM
    angle = table + tl.load(positions + token).to(tl.int64) * ROTARY + turn
    cos = tl.load(angle, mask=turns, other=0.0)[None, :]
    sin = tl.load(angle + ROTARY // 2, mask=turns, other=0.0)[None, :]
    q_first = tl.load(q_weight + turn, mask=turns, other=0.0).to(tl.float32)[None, :]
    q_second = tl.load(q_weight + ROTARY // 2 + turn, mask=turns, other=0.0).to(tl.float32)[None, :]
    q_rest = tl.load(q_weight + keep, mask=keeps, other=0.0).to(tl.float32)[None, :]
    k_first = tl.load(k_weight + turn, mask=turns, other=0.0).to(tl.float32)[None, :]
    k_second = tl.load(k_weight + ROTARY // 2 + turn, mask=turns, other=0.0).to(tl.float32)[None, :]
    k_rest = tl.load(k_weight + keep, mask=keeps, other=0.0).to(tl.float32)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    # Query head h lies at 2 h, its gate behind it; key head g at 2 H + g.
    place = tl.where(head < H, 2 * head, H + head)[:, None] * HEAD_DIM
    base = qkv + token * (2 * (H + G) * HEAD_DIM) + place
    first = tl.load(base + turn[None, :], mask=there & turns[None, :], other=0.0).to(tl.float32)
    second = tl.load(base + ROTARY // 2 + turn[None, :], mask=there & turns[None, :], other=0.0).to(tl.float32)
    rest = tl.load(base + keep[None, :], mask=there & keeps[None, :], other=0.0).to(tl.float32)
    squares = tl.sum(first * first + second * second, 1) + tl.sum(rest * rest, 1)
    scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
    # Rounded to the stored type between norm and rotation, as the reference implementations do.
    kind = qkv.dtype.element_ty
    first = (first * scale * tl.where(is_query, q_first, k_first)).to(kind).to(tl.float32)
    second = (second * scale * tl.where(is_query, q_second, k_second)).to(kind).to(tl.float32)
    rest = (rest * scale * tl.where(is_query, q_rest, k_rest)).to(kind)
    left, right = (first * cos - second * sin).to(kind), (second * cos + first * sin).to(kind)
    to = queries + (token * H + head[:, None]) * HEAD_DIM
    tl.store(to + turn[None, :], left, mask=is_query & turns[None, :])
    tl.store(to + ROTARY // 2 + turn[None, :], right, mask=is_query & turns[None, :])
    tl.store(to + keep[None, :], rest, mask=is_query & keeps[None, :])
    is_key = there & (head >= H)[:, None]
    tl.store(base + turn[None, :], left, mask=is_key & turns[None, :])
    tl.store(base + ROTARY // 2 + turn[None, :], right, mask=is_key & turns[None, :])
    tl.store(base + keep[None, :], rest, mask=is_key & keeps[None, :])


def gated_qk_norm_rope_triton(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> Tensor:
    require_contiguous(qkv=qkv, positions=positions, table=table, q_weight=q_weight, k_weight=k_weight)
    tokens, rotary = qkv.shape[0], table.shape[1]
    head_dim = qkv.shape[1] // (2 * (num_heads + num_kv_heads))
    queries = torch.empty(tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    heads = min(8, next_power_of_2(num_heads + num_kv_heads))
    launch(
        _gated_qk_norm_rope,
        (tokens, cdiv(num_heads + num_kv_heads, heads)),
        qkv,
        positions,
        table,
        q_weight,
        k_weight,
        queries,
        eps,
        H=num_heads,
        G=num_kv_heads,
        HEAD_DIM=head_dim,
        ROTARY=rotary,
        HALF=next_power_of_2(rotary // 2),
        REST=next_power_of_2(max(head_dim - rotary, 1)),
        HEADS=heads,
        device=qkv.device,
        warps=max(1, min(4, heads * head_dim // 512)),
    )
    return queries


def gated_qk_norm_rope(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> Tensor:
    """q = rope(rmsnorm(q)) as a tensor of its own, k = rope(rmsnorm(k)) in place; gates and v are left as they are.

    Args:
        qkv: [T, 2 (H + G) head_dim], each query head followed by its gate, then keys, then values.
        positions: [T] int32.
        table: fp32 [max_positions, R] of `rope_table`, R <= head_dim: the dimensions of a head that are turned, the
            first ones, in rotate-half (NeoX) order.
        q_weight, k_weight: [head_dim].

    Returns:
        queries [T, H, head_dim].
    """
    run = gated_qk_norm_rope_triton if runs_triton(qkv) else gated_qk_norm_rope_ref
    return run(qkv, positions, table, q_weight, k_weight, eps, num_heads, num_kv_heads)
