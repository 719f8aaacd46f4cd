"""Attention whose answer is gated: the query projection gives each head a gate beside its query (Qwen3.5)."""

from __future__ import annotations

from torch import Tensor, nn

from rose.batch import Batch
from rose.kernels.gated_qk_norm_rope import gated_qk_norm_rope
from rose.kernels.sigmoid_gate import sigmoid_gate
from rose.layers.linear import Linear
from rose.layers.norm import ZeroCentredRMSNorm


class GatedAttention(nn.Module):
    """Grouped-query attention with per-head RMSNorm, rotary embedding of a head's first dimensions and output gates.

    qkv_proj's rows are q_proj's, which alternate between a query head and its gate, then k_proj's and v_proj's.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, *, bias: bool
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.qkv_proj = Linear(hidden_size, 2 * (num_heads + num_kv_heads) * head_dim, bias=bias)
        self.q_norm = ZeroCentredRMSNorm(head_dim, eps)
        self.k_norm = ZeroCentredRMSNorm(head_dim, eps)
        self.o_proj = Linear(num_heads * head_dim, hidden_size, bias=bias)

    def forward(self, x: Tensor, batch: Batch, rotary: Tensor, layer: int) -> Tensor:
        """x: [T, D], rotary: the table of `Rotary`, of the dimensions that are turned -> pieces [P, T, D]."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        gains = self.q_norm.gain, self.k_norm.gain
        packed = self.qkv_proj(x)
        q = gated_qk_norm_rope(packed, batch.positions, rotary, *gains, self.q_norm.eps, heads, kv_heads)
        k, v = packed[:, 2 * heads * self.head_dim :].unflatten(1, (2, kv_heads, self.head_dim)).unbind(1)
        return self.o_proj.pieces(sigmoid_gate(batch.attend(q, k, v, layer), packed))
