"""`Batch`: all that a model ever sees, and the attention surface it reaches through it.

Sequences lie one after another in one packed token axis T; there is no padding inside. Knows neither requests nor text.
Shape letters used throughout: T tokens of the batch, B sequences, D hidden size, H query heads, G key/value heads,
N output features, K input features, P pieces of a split-K sum, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

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


@dataclass(frozen=True, slots=True)
class HeadRotation:
    """What happens to heads between the QKV product and attention: RMSNorm of each head, then rotary embedding.

    Attributes:
        positions: [T] int32.
        table: fp32 [max_positions, rotary dims]: cos, then sin, a half each; rotary dims below head_dim turn the first
            ones only.
        q_weight, k_weight: [head_dim] of the norms, or both None for a family without.
        eps: of the norms.
    """

    positions: Tensor
    table: Tensor
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 0.0


@runtime_checkable
class PackedAttentionPlan(Protocol):
    """A plan that can take a layer's QKV product as it is, and does on the way what else would be a pass of its own."""

    def run_packed(self, qkv: Tensor, rotation: HeadRotation, layer: int) -> Tensor:
        """The rotation of q and k, then `run`.

        Args:
            qkv: [T, (H + 2 G) head_dim], contiguous, heads in the order q, k, v. What it holds afterwards is not said.

        Returns:
            [T, H, head_dim], contiguous.
        """
        ...


@dataclass(slots=True)
class PagedContext:
    """Where the sequences of a batch keep what later batches of theirs will read: pages of keys and values, and rows of
    recurrent state.

    Row `page * page_size + offset` of a layer's cache holds one token. Page 0 and state row 0 belong to nobody: dummy
    sequences write there.

    Attributes:
        page_table: [B, M] int32: pages of each sequence, in the order of its tokens; entries beyond them are 0.
        kv_lengths: [B] int32: tokens of each sequence in the cache once this batch is stored, its own included. A
            sequence whose kv_length equals its tokens in this batch starts here.
        slots: [T] int32: row of the cache each token of the batch is stored in.
        page_size: tokens a page.
        max_kv_length: upper bound of kv_lengths on the host; inside a graph the bucket's bound.
        decodes: leading sequences of the batch that have exactly one token each; the others are chunks of prompts.
        states: [B] int32: row of each sequence in the pools of recurrent state; None where the model has none.
        host_kv_lengths: kv_lengths on the host, for backends that plan there; None where nobody asked for them.
    """

    page_table: Tensor
    kv_lengths: Tensor
    slots: Tensor
    page_size: int
    max_kv_length: int
    decodes: int
    states: Tensor | None = None
    host_kv_lengths: Sequence[int] | None = None


class RecurrentStates(Protocol):
    """Pools of recurrent state, a row a running sequence, read and written by layers that keep one."""

    def conv(self, layer: int) -> Tensor:
        """[rows, channels, kernel - 1]: the latest inputs of a layer's causal convolution, oldest first."""
        ...

    def recurrent(self, layer: int) -> Tensor:
        """[rows, value heads, key dim, value dim] fp32."""
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
        paged: where generating sequences keep their cache; None where every sequence is whole in this batch.
        states: pools of recurrent state beside it; None for models without, and where sequences are whole.
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
    paged: PagedContext | None = None
    states: RecurrentStates | None = field(default=None, repr=False)

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
