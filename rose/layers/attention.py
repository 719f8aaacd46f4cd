"""Attention over one packed QKV product; which backend computes it is the batch's business."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rose.batch import Batch, HeadRotation, PackedAttentionPlan
from rose.kernels.qk_norm_rope import qk_norm_rope
from rose.layers.linear import Linear
from rose.layers.norm import RMSNorm


def attend_packed(qkv: Tensor, batch: Batch, layer: int, num_heads: int, num_kv_heads: int) -> Tensor:
    """qkv: [T, (H + 2 G) head_dim], heads in the order q, k, v -> [T, H head_dim]."""
    tokens = qkv.shape[0]
    heads = qkv.view(tokens, num_heads + 2 * num_kv_heads, -1)
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    return batch.attend(q, k, v, layer).view(tokens, -1)


def rotate_and_attend(
    qkv: Tensor, rotation: HeadRotation, batch: Batch, layer: int, num_heads: int, num_kv_heads: int
) -> Tensor:
    """`attend_packed` behind the rotation of q and k: in one pass where the batch's attention offers that.

    Args:
        qkv: [T, (H + 2 G) head_dim]; what it holds afterwards is not said.
    """
    if isinstance(batch.attention, PackedAttentionPlan):
        return batch.attention.run_packed(qkv, rotation, layer).flatten(1)
    weights = rotation.q_weight, rotation.k_weight
    qkv = qk_norm_rope(qkv, rotation.positions, rotation.table, *weights, rotation.eps, num_heads, num_kv_heads)
    return attend_packed(qkv, batch, layer, num_heads, num_kv_heads)


class SelfAttention(nn.Module):
    """Plain multi-head attention with biases, before its output projection."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv_proj = Linear(hidden_size, 3 * hidden_size, bias=True)

    def forward(self, x: Tensor, batch: Batch, layer: int) -> Tensor:
        """x: [T, D] -> [T, D]."""
        return attend_packed(self.qkv_proj(x), batch, layer, self.num_heads, self.num_heads)


class RotaryAttention(nn.Module):
    """Grouped-query attention with rotary embedding.

    Args:
        eps: of the per-head RMSNorm of q and k before it, or None for a family without.
        bias: of q, k and v; `output_bias` of the product behind, None for the same.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float | None,
        *,
        bias: bool,
        output_bias: bool | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.qkv_proj = Linear(hidden_size, (num_heads + 2 * num_kv_heads) * head_dim, bias=bias)
        self.q_norm = None if eps is None else RMSNorm(head_dim, eps)
        self.k_norm = None if eps is None else RMSNorm(head_dim, eps)
        self.o_proj = Linear(num_heads * head_dim, hidden_size, bias=bias if output_bias is None else output_bias)

    def forward(self, x: Tensor, batch: Batch, rotary: Tensor, layer: int) -> Tensor:
        """x: [T, D], rotary: the table of `Rotary` -> pieces [P, T, D] of the output projection."""
        rotation = HeadRotation(batch.positions, rotary)
        if self.q_norm is not None and self.k_norm is not None:
            rotation = HeadRotation(batch.positions, rotary, self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        heads = self.num_heads, self.num_kv_heads
        return self.o_proj.pieces(rotate_and_attend(self.qkv_proj(x), rotation, batch, layer, *heads))
