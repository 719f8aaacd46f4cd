"""Which rows belong to which sequence, checked before a kernel is told.

Knows lengths and the packed layout; knows no backend.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from rose.attention_backends.base import AttentionSpec
from rose.batch import Batch
from rose.errors import InternalError


def row_offsets(batch: Batch) -> tuple[int, ...]:
    """0, then the end row of each sequence.

    Raises:
        InternalError: an empty sequence (some kernels hang or write NaN on one), one longer than `max_length` (it would
            be cut off silently), or more rows than the batch has, naming the sequence.
    """
    shortest, longest = min(batch.lengths, default=0), max(batch.lengths, default=0)
    if shortest < 1:
        index = batch.lengths.index(shortest) if batch.lengths else 0
        raise InternalError(f"attention was given an empty sequence: number {index} of {batch.num_sequences}")
    if longest > batch.max_length:
        index = batch.lengths.index(longest)
        raise InternalError(
            f"sequence {index} has {longest} tokens, more than the {batch.max_length} this batch was bounded to"
        )
    offsets = tuple(accumulate(batch.lengths, initial=0))
    if offsets[-1] > batch.num_tokens:
        raise InternalError(f"the sequences have {offsets[-1]} tokens together, the batch has {batch.num_tokens} rows")
    return offsets


def unpack(packed: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, H, head_dim], k and v [T, G, head_dim] as views of packed [T, H + 2 G, head_dim]."""
    keys, values = num_heads, num_heads + num_kv_heads
    return packed[:, :keys], packed[:, keys:values], packed[:, values:]


def zero_qkv(spec: AttentionSpec, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of zeros laid out as a model lays them out: to run a kernel once before serving."""
    heads = spec.num_heads + 2 * spec.num_kv_heads
    packed = torch.zeros(tokens, heads, spec.head_dim, dtype=spec.dtype, device=spec.device)
    return unpack(packed, spec.num_heads, spec.num_kv_heads)
