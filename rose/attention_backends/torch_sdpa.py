"""torch's own attention, one call for each run of equal lengths: any device, any dtype, and the truth for the others.

No mask stands for causality, so that none can be lost: each call sees whole sequences of one length and says
`is_causal` itself. Only a window needs a mask, and only where a sequence is longer than it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from rose.attention_backends.base import AttentionSpec
from rose.batch import AttentionPlan, Batch


class TorchSdpa:
    name = "torch_sdpa"

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    def supports(self, spec: AttentionSpec) -> str | None:
        if spec.layout != "ragged":
            return f"it knows no {spec.layout} cache, only keys of the batch itself"
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} query heads do not share {spec.num_kv_heads} key heads evenly"
        return None

    def plan(self, batch: Batch, slot: int = 0) -> AttentionPlan:
        """Host lengths are all it needs; nothing is staged, so the slot does not matter."""
        return SdpaPlan(self.spec, batch.lengths)


class SdpaPlan:
    """Runs of neighbouring sequences of one length; a run is one strided view of the packed rows, never a copy."""

    def __init__(self, spec: AttentionSpec, lengths: Sequence[int]) -> None:
        self.spec = spec
        self.runs = [(length, sum(1 for _ in run)) for length, run in groupby(lengths)]
        self.rows = sum(lengths)
        self.masks = {length: window_mask(spec, length) for length, _ in self.runs}

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """q: [T, H, head_dim], k and v: [T, G, head_dim] -> [T, H, head_dim]; rows past the last sequence are zero."""
        if len(self.runs) == 1 and self.rows == q.shape[0]:
            return self._attend(q, k, v, *self.runs[0])
        out = q.new_empty(q.shape)
        start = 0
        for length, count in self.runs:
            rows = slice(start, start + length * count)
            out[rows] = self._attend(q[rows], k[rows], v[rows], length, count)
            start = rows.stop
        out[start:] = 0
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, length: int, count: int) -> Tensor:
        """Rows of `count` sequences of `length` tokens each."""
        spec = self.spec
        q, k, v = (x.view(count, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        mask = self.masks[length]
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=spec.causal and mask is None,
            scale=spec.scale,
            enable_gqa=spec.num_kv_heads != spec.num_heads,
        )
        return out.transpose(1, 2).flatten(0, 1).contiguous()


def window_mask(spec: AttentionSpec, length: int) -> Tensor | None:
    """[length, length], true where row i may see column j; None where a window excludes nothing."""
    if spec.window is None or length <= spec.window + 1:
        return None
    index = torch.arange(length, device=spec.device)
    distance = index[:, None] - index[None, :]
    seen = distance <= spec.window
    return seen & (distance >= 0) if spec.causal else seen & (distance >= -spec.window)
