"""Attention written down plainly in float64, and how far an answer may be from it.

The truth the backends are checked against; shares no code with any of them. Knows tensors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from rose.attention_backends.rows import unpack

# Largest relative L2 distance of any row (one token, one head). Rounding weights and result once each, as every
# tensor-core kernel does, leaves about 0.0016 in bf16 (8 bits) and an eighth of that in fp16: five times as much.
TOLERANCE = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-16}


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    *,
    causal: bool,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """softmax(q @ k.T * scale) @ v within each sequence.

    Args:
        q: [T, H, head_dim]; k, v: [T, G, head_dim]; rows past the last sequence are not looked at.
        window: tokens seen to either side (left only if causal), or None for all.

    Returns:
        [sum(lengths), H, head_dim] float64.
    """
    group = q.shape[1] // k.shape[1]
    parts = []
    for start, end in pairwise(accumulate(lengths, initial=0)):
        queries, keys, values = (x[start:end].double() for x in (q, k, v))
        hidden = _hidden(end - start, causal, window, q.device)
        # One key/value head at a time: 4096 tokens of all heads would be gigabytes of scores.
        heads = []
        for head in range(k.shape[1]):
            mine = queries[:, head * group : (head + 1) * group]
            scores = torch.einsum("qhd,kd->hqk", mine, keys[:, head]) * scale
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            heads.append(torch.einsum("hqk,kd->qhd", weights, values[:, head]))
        parts.append(torch.cat(heads, dim=1))
    return torch.cat(parts)


def row_error(out: Tensor, expected: Tensor) -> float:
    """The largest relative L2 distance of any row; infinite if any value is not finite.

    Args:
        out: [at least T, H, head_dim]; only the first T rows count.
        expected: [T, H, head_dim] float64.
    """
    got = out[: expected.shape[0]].double()
    if not bool(got.isfinite().all()):
        return float("inf")
    distance = (got - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
    return float(distance.max())


def poisoned_qkv(
    tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    margin: int = 256,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as views of one packed [tokens, (H + 2 G) head_dim] tensor of normal values, with `margin` rows of NaN
    before and after it in memory, so that whatever reads beyond its rows shows.

    The same seed gives the same values on every device.
    """
    heads = num_heads + 2 * num_kv_heads
    memory = torch.full((tokens + 2 * margin, heads, head_dim), torch.nan, dtype=dtype, device=device)
    packed = memory[margin : margin + tokens]
    generator = torch.Generator().manual_seed(seed)
    packed.copy_(torch.randn(tokens, heads, head_dim, generator=generator).to(dtype))
    return unpack(packed, num_heads, num_kv_heads)


def even_split(tokens: int, sequences: int) -> tuple[int, ...]:
    """`tokens` in `sequences` parts that differ by one at most."""
    return tuple(tokens // sequences + (i < tokens % sequences) for i in range(sequences))


def greedy_split(tokens: int, sequences: int, longest: int) -> tuple[int, ...]:
    """`tokens` in `sequences` parts, the first as long as allowed, the others at least one token.

    Raises:
        ValueError: they do not fit.
    """
    if not sequences <= tokens <= sequences * longest:
        raise ValueError(f"{tokens} tokens do not make {sequences} sequences of 1 to {longest}")
    parts = []
    for left in range(sequences - 1, -1, -1):
        parts.append(min(longest, tokens - left))
        tokens -= parts[-1]
    return tuple(parts)


def _hidden(length: int, causal: bool, window: int | None, device: torch.device) -> Tensor:
    position = torch.arange(length, device=device)
    ahead = position[None, :] - position[:, None]
    hidden = torch.zeros(length, length, dtype=torch.bool, device=device)
    if causal:
        hidden |= ahead > 0
    if window is not None:
        hidden |= ahead.abs() > window
    return hidden
