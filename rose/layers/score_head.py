"""From hidden rows to the raw scores of a pair: one row of logits a sequence, in fp32, not squashed."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from rose.kernels.pool import pool
from rose.layers.linear import Linear
from rose.layers.parameter import parameter


class _Pooler(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.dense = Linear(size, size, bias=True)


class BertClassifier(nn.Module):
    """classifier(tanh(pooler(first row))): BertForSequenceClassification."""

    def __init__(self, size: int, labels: int) -> None:
        super().__init__()
        self.pooler = _Pooler(size)
        self.classifier = Linear(size, labels, bias=True)

    def forward(self, hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
        """hidden: [T, D], cu_seqlens: [B + 1] int32 -> [B, labels] fp32."""
        pooled = torch.tanh(self.pooler.dense(pool(hidden, cu_seqlens, "cls")))
        return cast(Tensor, self.classifier(pooled))


class RobertaClassifier(nn.Module):
    """out_proj(tanh(dense(first row))): the RoBERTa family, which has no pooler."""

    def __init__(self, size: int, labels: int) -> None:
        super().__init__()
        self.dense = Linear(size, size, bias=True)
        self.out_proj = Linear(size, labels, bias=True)

    def forward(self, hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
        """hidden: [T, D], cu_seqlens: [B + 1] int32 -> [B, labels] fp32."""
        return cast(Tensor, self.out_proj(torch.tanh(self.dense(pool(hidden, cu_seqlens, "cls")))))


class LastTokenScore(nn.Module):
    """last row @ weight.T: a converted reranker's `score`, or yes minus no of a language model's head.

    The sum is one product a label in fp32; the difference of two logits that were each rounded to bf16 first would be
    right to 1/256 of their size only.
    """

    def __init__(self, size: int, labels: int) -> None:
        super().__init__()
        self.weight = parameter(labels, size)

    def forward(self, hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
        """hidden: [T, D], cu_seqlens: [B + 1] int32 -> [B, labels] fp32."""
        return pool(hidden, cu_seqlens, "last") @ self.weight.T
