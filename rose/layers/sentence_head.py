"""From hidden rows to one vector a sequence: pooling, the Dense chain, normalisation. All of it in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from rose.kernels.pool import Finish, PoolMode, finish, pool, pool_finish, pool_spans
from rose.layers.linear import Linear

# What the linear kernel has no epilogue for; the rest goes into the kernel.
_OUTSIDE = {"tanh": torch.tanh, "sigmoid": torch.sigmoid}


class DenseHead(nn.Module):
    """activation(linear(x)), with the input added (through `residual` where the widths differ) if asked for.

    Args:
        activation: "tanh", "sigmoid", or one of rose.kernels.linear.activate.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, activation: str | None, residual: bool
    ) -> None:
        super().__init__()
        inside = None if activation in _OUTSIDE else activation
        self.activation = activation
        self.linear = Linear(in_features, out_features, bias=bias, activation=inside)
        self.adds_input = residual
        self.residual = Linear(in_features, out_features) if residual and in_features != out_features else None

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, K] fp32 -> [B, N] fp32."""
        y = self.linear(x)
        if self.activation in _OUTSIDE:
            y = _OUTSIDE[self.activation](y)
        if not self.adds_input:
            return cast(Tensor, y)
        return cast(Tensor, y + (x if self.residual is None else self.residual(x)))


class SentenceHead(nn.Module):
    """Pooled rows, projected, cut, and of unit length if `normalize`.

    Args:
        keep: leading numbers of a vector that stay; None: all.

    Attributes:
        spans_unavailable: why parts of a sequence cannot be pooled each by itself, or None.
    """

    def __init__(
        self, modes: Sequence[str], dense: Sequence[DenseHead], *, normalize: bool, keep: int | None = None
    ) -> None:
        super().__init__()
        self.keep = keep
        self.modes = cast(Sequence[PoolMode], tuple(modes))
        self.dense = nn.ModuleList(dense)
        self.normalize = normalize
        # A part of a sequence has no first or last token of its own that the model was trained to answer by.
        mean = self.modes == ("mean",)
        self.spans_unavailable = None if mean else f"parts are pooled by their mean, this model by {' + '.join(modes)}"

    def forward(self, hidden: Tensor, cu_seqlens: Tensor, spans: Tensor | None = None) -> Tensor:
        """hidden: [T, D], cu_seqlens: [B + 1] int32 -> [B, dimension] fp32.

        Args:
            spans: [S, 2] int32, first row and end of each part; the answer is then [S, dimension]. An empty part
                pools to zeros.
        """
        how: Finish = "l2" if self.normalize else "none"
        if spans is None and len(self.modes) == 1 and not self.dense and self.keep is None:
            return pool_finish(hidden, cu_seqlens, self.modes[0], how)
        if spans is None:
            x = torch.cat([pool(hidden, cu_seqlens, mode) for mode in self.modes], dim=-1)
        else:
            x = pool_spans(hidden, spans)
        for dense in self.dense:
            x = dense(x)
        return finish(x if self.keep is None else x[:, : self.keep].contiguous(), how)
