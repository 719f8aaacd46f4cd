"""Attention over one packed QKV product; which backend computes it is the batch's business."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rose.batch import Batch
from rose.kernels.qk_norm_rope import qk_norm_rope
from rose.layers.linear import Linear
from rose.layers.norm import RMSNorm


def attend_packed(qkv: Tensor, batch: Batch, layer: int, num_heads: int, num_kv_heads: int) -> Tensor:
    """qkv: [T, (H + 2 G) head_dim], heads in the order q, k, v -> [T, H head_dim]."""
    tokens = qkv.shape[0]
    heads = qkv.view(tokens, num_heads + 2 * num_kv_heads, -1)
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    return batch.attend(q, k, v, layer).view(tokens, -1)


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
        heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv_proj(x)
        if self.q_norm is None or self.k_norm is None:
            qkv = qk_norm_rope(qkv, batch.positions, rotary, None, None, 0.0, *heads)
        else:
            weights = self.q_norm.weight, self.k_norm.weight
            qkv = qk_norm_rope(qkv, batch.positions, rotary, *weights, self.q_norm.eps, *heads)
        return self.o_proj.pieces(attend_packed(qkv, batch, layer, *heads))
