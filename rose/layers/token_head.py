"""BGE-M3's heads over token rows (arXiv:2402.03216, sections 3.1 and 3.2), in fp32; memory grows with tokens alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from rose.kernels.pool import finish
from rose.layers.linear import Linear


class LexicalHead(nn.Module):
    """relu(w · row + b) a token, and 0 for tokens that are no words.

    A token's weight stays at its token: adding up equal tokens (their maximum) is for whoever has the ids, and a
    vector of vocabulary size is never made.
    """

    unweighted: Tensor

    def __init__(self, size: int, unweighted_ids: Sequence[int]) -> None:
        super().__init__()
        self.linear = Linear(size, 1, bias=True, activation="relu")
        self.unweighted_ids = tuple(unweighted_ids)
        self.register_buffer("unweighted", torch.empty(len(unweighted_ids), dtype=torch.int32), persistent=False)

    def build(self, device: torch.device) -> None:
        """Fill in the ids: models are built on `meta`."""
        self.unweighted = torch.tensor(self.unweighted_ids, dtype=torch.int32, device=device)

    def forward(self, rows: Tensor, ids: Tensor) -> Tensor:
        """rows: [T, D] fp32, ids: [T] int32 -> [T, 1] fp32."""
        silent = (ids[:, None] == self.unweighted).any(dim=-1, keepdim=True)
        return cast(Tensor, self.linear(rows)).masked_fill(silent, 0.0)


class ColbertHead(nn.Module):
    """A unit vector a token."""

    def __init__(self, size: int, dimension: int) -> None:
        super().__init__()
        self.linear = Linear(size, dimension, bias=True)

    def forward(self, rows: Tensor) -> Tensor:
        """rows: [T, D] fp32 -> [T, dimension] fp32."""
        return finish(self.linear(rows), "l2")
