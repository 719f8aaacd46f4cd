"""Sequences served batch by batch by a paged backend, over scattered and poisoned pages."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rose.attention_backends import AttentionSpec, KVCache
from rose.attention_backends.reference import TOLERANCE, reference_attention, row_error
from rose.batch import Batch, PagedContext

PAGE = 16


def spec_of(device: str = "cpu", **changes) -> AttentionSpec:
    spec = AttentionSpec(
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        dtype=torch.bfloat16,
        device=torch.device(device),
        causal=True,
        scale=0.125,
        layout="paged",
        max_length=4096,
    )
    return replace(spec, **changes)


class Served:
    """Sequences with a history, served batch by batch by one backend over scattered, poisoned pages."""

    def __init__(self, spec: AttentionSpec, lengths: list[int], backend, poison: float = torch.nan) -> None:
        self.spec = spec
        self.layers = layers = (1, 3)
        generator = torch.Generator().manual_seed(sum(lengths))
        pages = sum(-(-n // PAGE) for n in lengths) + 3
        self.cache = KVCache(layers, pages + 1, PAGE, spec.num_kv_heads, spec.head_dim, spec.dtype, spec.device)
        for layer in layers:
            for part in self.cache.layer(layer):
                part[:] = poison
        self.backend = backend(spec)
        self.backend.bind(self.cache)
        heads = spec.num_heads + 2 * spec.num_kv_heads
        self.packed = [
            torch.randn(n, heads, spec.head_dim, generator=generator).to(spec.device, spec.dtype) for n in lengths
        ]
        free = (1 + torch.randperm(pages, generator=generator)).tolist()
        self.tables = [[free.pop() for _ in range(-(-n // PAGE))] for n in lengths]
        self.done = [0] * len(lengths)

    def batch(self, chunks: list[tuple[int, int]], *, bound=None, key=None, dummies: int = 0) -> tuple[Batch, Tensor]:
        """(batch, packed QKV) of the next tokens of some sequences, (sequence, how many); decodes first."""
        width = -(-(bound or max(map(len, self.packed))) // PAGE)
        table = torch.zeros(len(chunks) + dummies, width, dtype=torch.int32)
        slots, positions, kv, rows = [], [], [], []
        for row, (i, n) in enumerate(chunks):
            table[row, : len(self.tables[i])] = torch.tensor(self.tables[i])
            own = range(self.done[i], self.done[i] + n)
            positions += own
            slots += [self.tables[i][p // PAGE] * PAGE + p % PAGE for p in own]
            kv.append(own.stop)
            rows.append(self.packed[i][own.start : own.stop])
            self.done[i] = own.stop
        lengths = [n for _, n in chunks] + [1] * dummies
        rows += [torch.ones_like(rows[0][:1])] * dummies
        kv, slots, positions = kv + [1] * dummies, slots + [0] * dummies, positions + [0] * dummies
        batch = Batch.pack([[0] * n for n in lengths], device=self.spec.device)
        ints = [torch.tensor(x, dtype=torch.int32, device=self.spec.device) for x in (positions, kv, slots)]
        decodes = next((at for at, n in enumerate(lengths) if n > 1), len(lengths))
        batch.positions = ints[0]
        table = table.to(self.spec.device)
        bound = bound or max(kv)
        batch.paged = PagedContext(table, ints[1], ints[2], PAGE, bound, decodes, host_kv_lengths=tuple(kv))
        batch.key = key
        return batch, torch.cat(rows)

    def run(self, chunks: list[tuple[int, int]], **options) -> list[Tensor]:
        batch, packed = self.batch(chunks, **options)
        plan = self.backend.plan(batch)
        heads = self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads
        outs = [plan.run(*packed.split(list(heads), dim=1), layer) for layer in self.layers]
        for out in outs:
            assert out.is_contiguous()
            assert torch.equal(out, outs[0])
        return list(outs[0][: sum(n for _, n in chunks)].split([n for _, n in chunks]))

    def expected(self, i: int) -> Tensor:
        spec, done = self.spec, self.done[i]
        heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        q, k, v = self.packed[i][:done].split(heads, dim=1)
        return reference_attention(q, k, v, [done], causal=True, scale=spec.scale, window=spec.window)


def check(served: Served, parts: dict[int, list[Tensor]]) -> None:
    for i, found in parts.items():
        assert row_error(torch.cat(found), served.expected(i)) <= TOLERANCE[served.spec.dtype]
