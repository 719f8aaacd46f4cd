"""The language model's head: a matrix of its own, where it is not the token table once more."""

from __future__ import annotations

from torch import Tensor, nn

from rose.kernels.logits import logits
from rose.layers.embedding import Embedding
from rose.layers.parameter import parameter


class LMHead(nn.Module):
    """weight: [V, D]."""

    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.weight = parameter(rows, size)

    def forward(self, x: Tensor) -> Tensor:
        """x: [S, D] -> [S, V] fp32."""
        return logits(x, self.weight)


class TiedHead(nn.Module):
    """The same with the token table's matrix, which it does not own: one tensor, and one entry among the weights."""

    def __init__(self, table: Embedding) -> None:
        super().__init__()
        self._table = (table,)  # in a tuple, so that it is no submodule and its weight is not listed twice

    def forward(self, x: Tensor) -> Tensor:
        """x: [S, D] -> [S, V] fp32."""
        return logits(x, self._table[0].weight)
