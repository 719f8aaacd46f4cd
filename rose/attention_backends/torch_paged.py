"""torch's own attention over pages: any device, any dtype, and the truth for the other paged backends.

Keys and values of the batch are stored first, then each run of neighbouring sequences with equally many tokens gathers
its pages and attends in one call. Where lengths can be read without waiting (CPU) nothing is gathered beyond the run's
longest sequence; elsewhere everything comes from the batch's bounds, so that a graph may hold it.
Rows of a page that are not the sequence's own count as zeros: another sequence's leftovers may be NaN, and NaN times a
weight of zero is NaN.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rose.attention_backends.base import AttentionSpec
from rose.attention_backends.kv_cache import KVCache
from rose.batch import AttentionPlan, Batch, PagedContext
from rose.errors import InternalError


class TorchPaged:
    name = "torch_paged"

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.cache: KVCache | None = None

    def supports(self, spec: AttentionSpec) -> str | None:
        if spec.layout != "paged":
            return f"it attends over pages, not over {spec.layout} batches"
        if not spec.causal:
            return "it attends causally only: what is cached cannot have seen what came later"
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} query heads do not share {spec.num_kv_heads} key heads evenly"
        return None

    def bind(self, cache: KVCache) -> None:
        self.cache = cache

    def plan(self, batch: Batch, slot: int = 0) -> AttentionPlan:
        """Views and host numbers are all it needs; nothing is staged, so the slot does not matter."""
        if self.cache is None or batch.paged is None:
            raise InternalError(f"{self.name} needs a cache and a batch that says where its sequences lie in it")
        return TorchPagedPlan(self.spec, self.cache, batch, batch.paged)


class _Run(NamedTuple):
    """`size` neighbouring sequences of `length` tokens each.

    Attributes:
        first: of them, among the batch's sequences.
        bound: keys gathered for each.
        own: they all start in this batch, and it holds all they have: nothing needs to be gathered.
        full: each has exactly `bound` keys.
    """

    first: int
    size: int
    length: int
    bound: int
    own: bool
    full: bool


class TorchPagedPlan:
    """One batch. Its runs over the layers share what depends on lengths only.

    Attributes:
        capturable: it has decoding sequences only; how long chunks of prompts are comes from the host.
    """

    def __init__(self, spec: AttentionSpec, cache: KVCache, batch: Batch, paged: PagedContext) -> None:
        self.spec = spec
        self.cache = cache
        self.paged = paged
        self.runs = _runs(batch, paged, spec.window)
        self.capturable = paged.decodes == batch.num_sequences
        self._masks: dict[_Run, tuple[Tensor, Tensor | None]] = {}
        self._slots = paged.slots
        self._layer = cache.layers[-1]

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Store k and v, then attend: [T, H, head_dim] -> [T, H, head_dim]."""
        pages_k, pages_v = self.cache.layer(layer)
        if layer <= self._layer:
            # A pass over the layers begins. Here and not in the plan: a graph that captures the pass has to read anew
            # what each replay is given.
            self._masks.clear()
            self._slots = self.paged.slots.long()
        self._layer = layer
        pages_k.flatten(0, 1).index_copy_(0, self._slots, k.to(pages_k.dtype))
        pages_v.flatten(0, 1).index_copy_(0, self._slots, v.to(pages_v.dtype))
        out = q.new_empty(q.shape)
        start = 0
        for run in self.runs:
            rows = slice(start, start + run.size * run.length)
            start = rows.stop
            own = q[rows].view(run.size, run.length, *q.shape[1:])
            if run.own:
                keys, values = (x[rows].view(run.size, run.length, *x.shape[1:]) for x in (k, v))
                mask = None
            else:
                keys, values, mask = self._gather(run, pages_k, pages_v)
            out[rows] = self._attend(own, keys, values, mask, causal=run.own and run.length > 1).flatten(0, 1)
        out[start:] = 0
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
        """q: [n, L, H, head_dim], k, v: [n, K, G, head_dim] -> [n, L, H, head_dim]."""
        spec = self.spec
        q, k, v = (x.transpose(1, 2) for x in (q, k.to(q.dtype), v.to(q.dtype)))
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=causal,
            scale=spec.scale,
            enable_gqa=spec.num_kv_heads != spec.num_heads,
        )
        return out.transpose(1, 2)

    def _gather(self, run: _Run, pages_k: Tensor, pages_v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """(k, v, mask) of a run: [n, bound, G, head_dim] twice, and [n, 1, L, bound] or None where all is seen."""
        size = self.paged.page_size
        table = self.paged.page_table[run.first : run.first + run.size, : -(-run.bound // size)]
        keys, values = (pages[table].flatten(1, 2)[:, : run.bound] for pages in (pages_k, pages_v))
        if run not in self._masks:
            self._masks[run] = self._mask(run)
        foreign, mask = self._masks[run]
        if not run.full:
            keys, values = keys.masked_fill(foreign, 0), values.masked_fill(foreign, 0)
        return keys, values, mask

    def _mask(self, run: _Run) -> tuple[Tensor, Tensor | None]:
        """(rows that are not the sequence's own [n, bound, 1, 1], what each query sees [n, 1, L, bound] or None)."""
        lengths = self.paged.kv_lengths[run.first : run.first + run.size, None]
        key = torch.arange(run.bound, dtype=torch.int32, device=lengths.device)
        foreign = (key >= lengths)[:, :, None, None]
        window = self.spec.window
        if run.full and run.length == 1 and (window is None or run.bound <= window + 1):
            return foreign, None
        ahead = torch.arange(run.length, dtype=torch.int32, device=lengths.device) - run.length
        query = (lengths + ahead)[:, :, None]
        seen = key <= query
        if window is not None:
            seen &= key >= query - window
        return foreign, seen[:, None]


def _runs(batch: Batch, paged: PagedContext, window: int | None) -> list[_Run]:
    # A batch with a key may be replayed with other lengths.
    readable = paged.kv_lengths.device.type == "cpu" and batch.key is None
    host = paged.kv_lengths.tolist() if readable else None
    runs: list[_Run] = []
    first = 0
    for length, group in groupby(batch.lengths):
        count = sum(1 for _ in group)
        kv = None if host is None else host[first : first + count]
        bound = paged.max_kv_length if kv is None else max(kv)
        own = kv is not None and bound == length and (window is None or length <= window + 1)
        runs.append(_Run(first, count, length, bound, own, kv is not None and min(kv) == bound))
        first += count
    return runs
