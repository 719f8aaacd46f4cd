"""Attention over pages against the float64 reference over whole sequences, whatever the pages, chunks and company."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from rose.attention_backends import AttentionSpec, KVCache, Paged, load_backend, paged_backend_names
from rose.attention_backends.reference import TOLERANCE, reference_attention, row_error
from rose.batch import Batch, PagedContext
from rose.errors import InternalError, StartupError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PAGE = 4


def spec_of(device: str = "cpu", **changes) -> AttentionSpec:
    spec = AttentionSpec(
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        dtype=torch.float32,
        device=torch.device(device),
        causal=True,
        scale=0.3,
        layout="paged",
    )
    return dataclasses.replace(spec, **changes)


class Pages:
    """Sequences of known keys and values, kept in scattered pages of a poisoned cache, computed chunk by chunk."""

    def __init__(self, spec: AttentionSpec, lengths: list[int], *, layers: tuple[int, ...] = (0,), seed: int = 0):
        self.spec = spec
        generator = torch.Generator().manual_seed(seed)
        self.cache = KVCache(layers, 64, PAGE, spec.num_kv_heads, spec.head_dim, spec.dtype, spec.device)
        for layer in layers:
            for part in self.cache.layer(layer):
                part[1:] = torch.nan  # page 0 is what dummies and table entries beyond a sequence's pages point at
        self.backend = load_backend("torch_paged", spec)
        assert isinstance(self.backend, Paged)
        self.backend.bind(self.cache)
        heads = spec.num_heads + 2 * spec.num_kv_heads
        split = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self.qkv = []
        for length in lengths:
            packed = torch.randn(length, heads, spec.head_dim, generator=generator).to(spec.device, spec.dtype)
            self.qkv.append(torch.split(packed, split, dim=1))
        free = (1 + torch.randperm(63, generator=generator)).tolist()
        self.tables = [[free.pop() for _ in range(-(-length // PAGE))] for length in lengths]
        self.done = [0] * len(lengths)

    def run(self, chunks: list[tuple[int, int]], *, layer: int = 0, bound: int | None = None) -> list[Tensor]:
        """Attention of the next tokens of some sequences: (sequence, how many)."""
        width = max(len(table) for table in self.tables) + 1
        tables = np.zeros((len(chunks), width), np.int32)
        slots, positions, kv = [], [], []
        for row, (i, length) in enumerate(chunks):
            tables[row, : len(self.tables[i])] = self.tables[i]
            own = range(self.done[i], self.done[i] + length)
            positions += own
            slots += [self.tables[i][p // PAGE] * PAGE + p % PAGE for p in own]
            kv.append(own.stop)
        rows = [tuple(x[self.done[i] : self.done[i] + n] for x in self.qkv[i]) for i, n in chunks]
        q, k, v = (torch.cat([row[part] for row in rows]) for part in range(3))
        ints = [torch.tensor(x, dtype=torch.int32, device=self.spec.device) for x in (positions, kv, slots)]
        table = torch.from_numpy(tables).to(self.spec.device)
        lengths = tuple(length for _, length in chunks)
        batch = Batch.pack([[0] * length for length in lengths], device=self.spec.device)
        decodes = next((n for n, length in enumerate(lengths) if length > 1), len(lengths))
        batch.positions = ints[0]
        batch.paged = PagedContext(table, ints[1], ints[2], PAGE, bound or max(kv), decodes)
        out = self.backend.plan(batch).run(q, k, v, layer)
        for i, length in chunks:
            self.done[i] += length
        return list(out.split(lengths))

    def expected(self, i: int) -> Tensor:
        spec = self.spec
        length = len(self.qkv[i][0])
        return reference_attention(*self.qkv[i], [length], causal=True, scale=spec.scale, window=spec.window)


def check(pages: Pages, parts: dict[int, list[Tensor]]) -> None:
    for i, found in parts.items():
        assert row_error(torch.cat(found), pages.expected(i)) <= TOLERANCE[pages.spec.dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 0, 3, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_any_chunking_gives_whole_sequences(device, window, kv_heads):
    pages = Pages(spec_of(device, window=window, num_kv_heads=kv_heads), [19, 7, 30, 1])
    parts: dict[int, list[Tensor]] = {i: [] for i in range(4)}
    for chunks in (
        [(0, 19), (1, 2), (2, 5)],
        [(1, 1), (3, 1), (2, 8)],
        [(2, 1), (1, 1)],
        [(1, 3), (2, 16)],
    ):
        for (i, _), out in zip(chunks, pages.run(chunks), strict=True):
            parts[i].append(out)
    check(pages, parts)


@pytest.mark.parametrize("device", DEVICES)
def test_decoding_in_company_up_to_a_bound(device):
    """Tokens one by one beside others of other lengths; the bound is the bucket's, not the batch's."""
    pages = Pages(spec_of(device), [12, 20, 5])
    parts = {i: [out] for i, out in enumerate(pages.run([(0, 6), (1, 14), (2, 1)]))}
    for _ in range(4):
        for i, out in enumerate(pages.run([(0, 1), (1, 1), (2, 1)], bound=24)):
            parts[i].append(out)
    for i, out in zip((0, 1), pages.run([(0, 1), (1, 1)]), strict=True):
        parts[i].append(out)
    parts[0].append(pages.run([(0, 1)])[0])
    parts[1].append(pages.run([(1, 1)])[0])
    check(pages, parts)


def test_bfloat16():
    pages = Pages(spec_of(dtype=torch.bfloat16), [40])
    check(pages, {0: [*pages.run([(0, 33)]), *pages.run([(0, 1)]), *pages.run([(0, 6)])]})


def test_layers_keep_apart_and_only_those_that_have_a_cache_attend():
    pages = Pages(spec_of(), [9], layers=(1, 3))
    one = pages.run([(0, 9)], layer=1)
    assert torch.isnan(pages.cache.layer(3)[0][1:]).all()
    pages.done = [0]
    check(pages, {0: one})
    check(pages, {0: pages.run([(0, 9)], layer=3)})
    pages.done = [0]
    with pytest.raises(InternalError, match=r"layer 0 keeps no keys and values; layers \(1, 3\) do"):
        pages.run([(0, 9)], layer=0)
    assert pages.cache.nbytes == 64 * KVCache.page_bytes(2, PAGE, 2, 16, torch.float32)


def test_dummies_write_to_page_zero_and_stay_finite():
    pages = Pages(spec_of(), [10])
    parts = {0: pages.run([(0, 8)])}
    cache = [part.clone() for part in pages.cache.layer(0)]
    pages.tables.append([0])
    pages.qkv.append(tuple(torch.ones_like(x[:1]) for x in pages.qkv[0]))
    pages.done.append(0)
    real, dummy, other = pages.run([(0, 1), (1, 1), (1, 1)])
    parts[0].append(real)
    torch.testing.assert_close(dummy, torch.ones_like(dummy))
    assert torch.isfinite(other).all()
    for before, after in zip(cache, pages.cache.layer(0), strict=True):
        changed = (before != after) & ~(before.isnan() & after.isnan())
        touched = changed.flatten(0, 1).any(-1).any(-1).nonzero().flatten().tolist()
        assert set(touched) <= {0, 1, pages.tables[0][8 // PAGE] * PAGE}
    parts[0].append(pages.run([(0, 1)])[0])
    check(pages, parts)


def test_refusals_are_in_words():
    with pytest.raises(StartupError, match="it attends over pages, not over ragged batches"):
        load_backend("torch_paged", spec_of(layout="ragged"))
    with pytest.raises(StartupError, match="it attends causally only"):
        load_backend("torch_paged", spec_of(causal=False))
    with pytest.raises(StartupError, match="4 query heads do not share 3 key heads evenly"):
        load_backend("torch_paged", spec_of(num_kv_heads=3))
    with pytest.raises(InternalError, match="needs a cache"):
        load_backend("torch_paged", spec_of()).plan(Batch.pack([[1]]))


def test_auto_takes_the_first_that_serves_a_paged_model():
    assert paged_backend_names()[-1] == "torch_paged"
    assert load_backend("auto", spec_of()).name == "torch_paged"
    with pytest.raises(StartupError, match=r"auto does not serve this model: .*torch_paged: it attends causally only"):
        load_backend("auto", spec_of(causal=False))
