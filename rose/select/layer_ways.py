"""Attention alone, 24 layers in one graph: for a shape of heads without a model, and for models that generate.

Each layer takes the result before it as its queries, so that launch and replay are spread as in a model. A sample
starts with the device idle, before the plan. Knows backends and graphs; knows no models.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping

import torch

from rose.attention_backends.auto import spec_for
from rose.attention_backends.base import (
    AttentionBackend,
    AttentionSpec,
    KeepsPlans,
    WarmsUp,
    backend_names,
    try_backend,
)
from rose.attention_backends.check import StaticAttention, check_backend
from rose.attention_backends.choose import LONGEST
from rose.attention_backends.rows import unpack
from rose.engine.profiles import attention_shape
from rose.errors import StartupError
from rose.select.grid import GridLoad
from rose.select.model_ways import MAX_SEQUENCES
from rose.select.ways import Ready, attention_ways

LAYERS = 24


class LayerWays:
    """The backends of whole sequences. Attributes: see `Ways`."""

    of = f"{LAYERS} layers"
    reference = "torch_sdpa"

    def __init__(self, spec: AttentionSpec, layers: int = LAYERS) -> None:
        self._spec = spec
        self._layers = layers
        self._backends: dict[str, AttentionBackend] = {}
        self.shape = attention_shape(spec)
        self.missing: Mapping[str, str]
        self.excluded: Mapping[str, str]
        self.missing, self.excluded = attention_ways(backend_names(), lambda name: check_backend(name, spec))
        self.names = tuple(n for n in backend_names() if n not in self.missing and n not in self.excluded)

    def serves(self, name: str, load: GridLoad) -> bool:
        return load.max_length <= LONGEST.get(name, load.max_length)

    def prepare(self, name: str, load: GridLoad, seed: int) -> Ready:
        spec, backend = self._spec, self._backend(name)
        generator = torch.Generator(spec.device).manual_seed(seed)
        heads = spec.num_heads + 2 * spec.num_kv_heads
        packed = torch.randn(load.tokens, heads, spec.head_dim, device=spec.device, generator=generator)
        qkv = unpack(packed.to(spec.dtype), spec.num_heads, spec.num_kv_heads)
        key = (load.name, load.tokens, load.max_length)
        attention = StaticAttention(backend, qkv, load.sequences, load.max_length, key=key, calls=self._layers)
        # Of one layer: over many the rounding of half precision adds up.
        one = StaticAttention(backend, qkv, load.sequences, load.max_length, key=None)
        answer = one.plain(load.lengths).float()
        if attention.captures(load.lengths):
            attention.capture(load.lengths)
        timed = _Timed(backend, attention, load.lengths, key)
        timed.sample()
        return Ready(answer=answer, sample=timed.sample, close=timed.close)

    def _backend(self, name: str) -> AttentionBackend:
        if name not in self._backends:
            found = try_backend(name, spec_for(name, self._spec))
            if isinstance(found, str):
                raise StartupError(f"attention backend {name}: {found}")
            if isinstance(found, WarmsUp):
                found.warm_up(MAX_SEQUENCES)
            self._backends[name] = found
        return self._backends[name]


class _Timed:
    """One load of one backend, run once a call."""

    def __init__(
        self, backend: AttentionBackend, attention: StaticAttention, lengths: tuple[int, ...], key: Hashable
    ) -> None:
        self._backend, self._attention, self._lengths, self._key = backend, attention, lengths, key
        self._slot = 0

    def sample(self) -> float:
        attention, self._slot = self._attention, 1 - self._slot
        if attention.stream is None:
            start = time.perf_counter()
            attention.plain(self._lengths, self._slot)
            return (time.perf_counter() - start) * 1e6
        with torch.cuda.stream(attention.stream):
            batch = attention.batch(self._lengths)
            attention.stream.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            plan = self._backend.plan(batch, self._slot)
            if attention.graph is None:
                attention.run_layers(plan)
            else:
                attention.graph.replay()
            end.record()
            end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def close(self) -> None:
        # A graph holds its buffers for as long as it lives, and a key its plan.
        self._attention.graph = None
        if isinstance(self._backend, KeepsPlans):
            self._backend.release(self._key)
