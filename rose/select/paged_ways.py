"""Steps of generating: one token a sequence over caches in pages, 24 layers in one graph.

Every backend reads the same cache and stores the same keys and values into it. Knows pages and graphs; knows no models.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rose.attention_backends.base import (
    AttentionBackend,
    AttentionSpec,
    KeepsPlans,
    Paged,
    can_capture,
    load_backend,
    paged_backend_names,
)
from rose.attention_backends.check import check_backend
from rose.attention_backends.kv_cache import KVCache
from rose.attention_backends.rows import unpack
from rose.batch import AttentionPlan, Batch, PagedContext
from rose.engine.profiles import attention_shape
from rose.errors import StartupError
from rose.select.grid import GridLoad
from rose.select.layer_ways import LAYERS
from rose.select.ways import Ready, attention_ways

PAGE_SIZE = 16


class PagedWays:
    """The backends over pages. Attributes: see `Ways`."""

    of = f"{LAYERS} layers"
    reference = "torch_paged"

    def __init__(self, spec: AttentionSpec, *, cache_tokens: int, layers: int = LAYERS) -> None:
        """
        Args:
            spec: of layout "paged".
            cache_tokens: most tokens of all caches of a step.
        """
        self._spec, self._layers = spec, layers
        self.shape = attention_shape(spec)
        self.missing: Mapping[str, str]
        self.excluded: Mapping[str, str]
        self.missing, self.excluded = attention_ways(paged_backend_names(), lambda name: check_backend(name, spec))
        self.names = tuple(n for n in paged_backend_names() if n not in self.missing and n not in self.excluded)
        # Others than those that were checked: a cache is bound once.
        self._backends = {name: load_backend(name, spec) for name in self.names}
        # Page 0 belongs to nobody, and every sequence may end in a page that it does not fill.
        pages = 1 + cache_tokens // PAGE_SIZE + 512
        self._cache = KVCache(
            tuple(range(layers)), pages, PAGE_SIZE, spec.num_kv_heads, spec.head_dim, spec.dtype, spec.device
        )
        for backend in self._backends.values():
            if not isinstance(backend, Paged):
                raise StartupError(f"attention backend {backend.name} keeps no pages")
            backend.bind(self._cache)

    def serves(self, name: str, load: GridLoad) -> bool:
        return load.kind == "decode"

    def prepare(self, name: str, load: GridLoad, seed: int) -> Ready:
        generator = torch.Generator(self._spec.device).manual_seed(seed)
        for layer in range(self._layers):
            for half in self._cache.layer(layer):
                half.normal_(generator=generator)
        spec = self._spec
        heads = spec.num_heads + 2 * spec.num_kv_heads
        packed = torch.randn(load.sequences, heads, spec.head_dim, device=spec.device, generator=generator)
        qkv = unpack(packed.to(spec.dtype), spec.num_heads, spec.num_kv_heads)
        step = _Step(self._backends[name], paged_batch(load, spec.device), qkv, self._layers)
        return Ready(answer=step.answer(), sample=step.sample, close=step.close)


@dataclass(slots=True)
class _Step:
    """One load of one backend."""

    backend: AttentionBackend
    batch: Batch
    qkv: tuple[Tensor, Tensor, Tensor]
    layers: int
    graph: torch.cuda.CUDAGraph | None = None
    slot: int = 0

    def answer(self) -> Tensor:
        """[B, H * head_dim] fp32 of the first layer; afterwards all layers are captured where they can be."""
        q, k, v = self.qkv
        out = self.backend.plan(self.batch, 0).run(q, k, v, 0).float().flatten(1)
        if q.is_cuda:
            self._capture()
        self.sample()
        return out

    def sample(self) -> float:
        self.slot = 1 - self.slot
        if not self.qkv[0].is_cuda:
            start = time.perf_counter()
            self._run(self.backend.plan(self.batch, self.slot))
            return (time.perf_counter() - start) * 1e6
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        plan = self.backend.plan(self.batch, self.slot)
        if self.graph is None:
            self._run(plan)
        else:
            self.graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def close(self) -> None:
        self.graph = None
        if isinstance(self.backend, KeepsPlans) and self.batch.key is not None:
            self.backend.release(self.batch.key)

    def _capture(self) -> None:
        stream = torch.cuda.Stream(self.qkv[0].device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            plan = self.backend.plan(self.batch, 1)
            if not can_capture(plan):
                return
            self._run(plan)
            plan = self.backend.plan(self.batch, 0)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                self._run(plan)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = graph

    def _run(self, plan: AttentionPlan) -> None:
        q, k, v = self.qkv
        for layer in range(self.layers):
            q = plan.run(q, k, v, layer)


def paged_batch(load: GridLoad, device: torch.device) -> Batch:
    """One token for each sequence; the caches' pages follow one another."""
    counts = [-(-length // PAGE_SIZE) for length in load.lengths]
    # As wide as the bound: backends read that many entries whatever the lengths.
    table = torch.zeros(load.sequences, -(-load.max_length // PAGE_SIZE), dtype=torch.int32)
    first = 1
    slots = []
    for row, (count, length) in enumerate(zip(counts, load.lengths, strict=True)):
        table[row, :count] = torch.arange(first, first + count, dtype=torch.int32)
        slots.append(int(table[row, (length - 1) // PAGE_SIZE]) * PAGE_SIZE + (length - 1) % PAGE_SIZE)
        first += count
    lengths = torch.tensor(load.lengths, dtype=torch.int32)
    paged = PagedContext(
        page_table=table.to(device),
        kv_lengths=lengths.to(device),
        slots=torch.tensor(slots, dtype=torch.int32, device=device),
        page_size=PAGE_SIZE,
        max_kv_length=load.max_length,
        decodes=load.sequences,
        host_kv_lengths=load.lengths,
    )
    return Batch(
        ids=torch.zeros(load.sequences, dtype=torch.int32, device=device),
        positions=(lengths - 1).to(device),
        cu_seqlens=torch.arange(load.sequences + 1, dtype=torch.int32, device=device),
        lengths=(1,) * load.sequences,
        max_length=1,
        key=("select", load.name, load.tokens),
        paged=paged,
    )
