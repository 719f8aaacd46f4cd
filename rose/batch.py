"""`Batch`: all that a model ever sees, and the attention surface it reaches through it.

Sequences lie one after another in one packed token axis T; there is no padding inside. Knows neither requests nor text.
Shape letters used throughout: T tokens of the batch, B sequences, D hidden size, H query heads, G key/value heads,
N output features, K input features, P pieces of a split-K sum, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class AttentionPlan(Protocol):
    """Attention for one batch, planned once and run by every layer."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Attention within each sequence of the batch.

        Args:
            q: [T, H, head_dim], k and v: [T, G, head_dim]; may be strided views of one packed QKV tensor, with the last
                axis contiguous.
            layer: index of the layer, for backends that keep a cache.

        Returns:
            [T, H, head_dim], contiguous.
        """
        ...


@dataclass(slots=True)
class Batch:
    """Packed token sequences.

    Attributes:
        ids: [T] int32, token ids.
        positions: [T] int32, index of each token in its own sequence, from 0.
        cu_seqlens: [B + 1] int32, on the device: sequence i takes rows cu_seqlens[i] .. cu_seqlens[i + 1].
        lengths: the same on the host: tokens of each sequence.
        max_length: upper bound of the longest sequence; inside a graph the bucket's bound, not this batch's.
        type_ids: [T] int32 token types (BERT pairs), or None for all zero.
        spans: [S, 2] int32 on the device, or None: rows [start, end) of the packed axis that are pooled each by itself,
            in the order of the sequences; pooled outputs then have S rows instead of B.
        attention: set by the engine before the model runs.
        key: the graph key this batch is padded to, or None for a batch that no graph will ever replay. All batches of
            one key have the same tokens, sequences, max_length and buffers, and plans of that key reuse one set of
            device memory (a later plan replaces the earlier one in stream order).
    """

    ids: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    lengths: tuple[int, ...]
    max_length: int
    type_ids: Tensor | None = None
    spans: Tensor | None = None
    attention: AttentionPlan | None = field(default=None, repr=False)
    key: Hashable | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.ids.shape[0])

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        if self.attention is None:
            raise RuntimeError("this batch has no attention plan: the engine sets one before the model runs")
        return self.attention.run(q, k, v, layer)

    @staticmethod
    def pack(sequences: list[list[int]], device: torch.device | str = "cpu") -> Batch:
        """A batch of plain id lists, for tests, tools and library users; the engine stages its own."""
        lengths = tuple(len(sequence) for sequence in sequences)
        if not lengths or 0 in lengths:
            raise ValueError("a batch needs at least one sequence, and every sequence at least one token")
        ids = torch.tensor([i for sequence in sequences for i in sequence], dtype=torch.int32, device=device)
        positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths]).to(device)
        cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
        return Batch(ids, positions, cu_seqlens, lengths, max(lengths))
