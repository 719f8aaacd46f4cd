"""What one adapter does to one tensor, applied to a run of its rows at a time.

    linear      W + s B A                  LoRA, arXiv:2106.09685
    rsLoRA      s = alpha / sqrt(r)        arXiv:2312.03732
    DoRA        m / |W + s B A| (W + s B A), the norm of each row (of each column, for an embedding); arXiv:2402.09353
    embedding   W + s (B A)^T

Rows are done in blocks that stay in the processor's cache; only an embedding's DoRA asks for all rows twice. Knows
tensors; knows neither names nor files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rose.convert.offline.adapter import Change

_BLOCK = 1 << 20  # bytes of fp32


class Delta:
    """
    Args:
        kind: "weight" or "bias".
    """

    def __init__(self, change: Change, kind: str) -> None:
        self._replacement = change.replaced.get(kind)
        self._bias = None if kind == "weight" or change.bias is None else change.scale * change.bias.float()
        self._left: Tensor | None = None
        self._row_lengths: Tensor | None = None
        self.column_lengths: Tensor | None = None
        self._by_column: Tensor | None = None
        if kind == "weight" and change.a is not None and change.b is not None:
            left, right = (change.a.T, change.b.T) if change.embedding else (change.b, change.a)
            self._left, self._right = left.float().contiguous(), change.scale * right.float().contiguous()
            if change.magnitude is not None and change.embedding:
                self.column_lengths = change.magnitude.float().reshape(-1)
            elif change.magnitude is not None:
                self._row_lengths = change.magnitude.float().reshape(-1, 1)

    def apply(self, rows: Tensor, at: slice) -> None:
        """Change `rows` (fp32) in place; they are those of `at`."""
        if self._replacement is not None:
            rows.copy_(self._replacement[at])
        if self._bias is not None:
            rows += self._bias[at]
        if self._left is None:
            return
        rows.addmm_(self._left[at], self._right)
        if self._row_lengths is not None:
            rows *= self._row_lengths[at] / torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        if self._by_column is not None:
            rows *= self._by_column

    def settle(self, stored: Tensor, earlier: Sequence[Delta]) -> None:
        """For an embedding's DoRA: the length of each column, over what `earlier` ones and this make of `stored`."""
        if self.column_lengths is None:
            return
        squares = torch.zeros(stored.shape[1], dtype=torch.float64)
        for at in row_blocks(stored):
            rows = stored[at].to(torch.float32, copy=True)
            for delta in (*earlier, self):
                delta.apply(rows, at)
            squares += rows.square().sum(0, dtype=torch.float64)
        self._by_column = (self.column_lengths / squares.sqrt()).float()


def row_blocks(tensor: Tensor) -> Iterator[slice]:
    """All rows of a tensor, in runs of at most 1 MB of fp32, or one by one."""
    size = max(1, _BLOCK // (4 * max(1, tensor[:1].numel())))
    return (slice(at, at + size) for at in range(0, len(tensor), size))
