"""The gated feed-forward of the Llama family (SwiGLU)."""

from __future__ import annotations

from torch import Tensor, nn

from rose.layers.linear import GatedLinear, Linear


class GatedMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, activation: str, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = GatedLinear(hidden_size, intermediate_size, activation, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, D] -> pieces [P, T, D]."""
        return self.down_proj.pieces(self.gate_up_proj(x))
