"""The rotary table, computed once for all layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rose.kernels.qk_norm_rope import rope_table


class Rotary(nn.Module):
    """cos and sin of every position, fp32 [max_positions, head_dim]; no checkpoint holds it."""

    table: Tensor

    def __init__(self, max_positions: int, head_dim: int, theta: float) -> None:
        super().__init__()
        self.max_positions, self.head_dim, self.theta = max_positions, head_dim, theta
        self.register_buffer("table", torch.empty(max_positions, head_dim), persistent=False)

    def build(self, device: torch.device) -> None:
        """Fill in the table: models are built on `meta`, where nothing can be computed.

        Computed on the CPU for every device: a last bit of the frequencies is a thousandth at position 10,000.
        """
        self.table = rope_table(self.max_positions, self.head_dim, self.theta).to(device)
