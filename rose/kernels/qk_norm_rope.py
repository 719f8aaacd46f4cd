"""Per-head RMSNorm of queries and keys and rotary embedding, in place on the packed QKV."""

from __future__ import annotations

import torch
from torch import Tensor

from rose.kernels.add_norm import rms_norm_ref


def rope_table(max_positions: int, head_dim: int, theta: float, device: torch.device | str = "cpu") -> Tensor:
    """cos then sin of every position (arXiv:2104.09864): fp32 [max_positions, head_dim], each half of it one of them."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
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
    return qk_norm_rope_ref(qkv, positions, table, q_weight, k_weight, eps, num_heads, num_kv_heads)
