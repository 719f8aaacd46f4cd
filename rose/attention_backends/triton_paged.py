"""ROSE's own attention over pages: a step of generating in one kernel and a merge, chunks of prompts in two kernels.

Nothing to plan: grids come from tokens, sequences and the bound of the lengths; the lengths themselves, pages and slots
are read on the device. A batch may hold both kinds: decoding sequences come first and are attended by the one kernel,
the chunks behind them by the others. Where a layer hands over its packed QKV product, QK norm, rotary embedding and
storing happen on the way.
Knows lengths and the cache; knows no graphs and no weights.
"""

from __future__ import annotations

import importlib
from collections.abc import Hashable

import torch
from torch import Tensor

from rose.attention_backends.base import AttentionSpec, WorkspaceReport
from rose.attention_backends.kv_cache import KVCache
from rose.attention_backends.probe import IMPORT_ERRORS, device_reason, paged_reason
from rose.attention_backends.rows import row_offsets, unpack
from rose.attention_backends.workspace import Arena
from rose.batch import AttentionPlan, Batch, HeadRotation, PagedContext
from rose.errors import InternalError, StartupError
from rose.kernels.paged_attention import paged_decode, paged_prefill
from rose.kernels.paged_decode import HEAD_DIMS, decode_tile, scratch_bytes
from rose.kernels.store_kv import qk_norm_rope_store, store_kv

_WORKSPACE_LIMIT = 256 << 20


class TritonPagedPlan:
    """One batch. Of its key it knows tokens, sequences, decoding ones and the bound of their keys, and no more."""

    capturable = True

    def __init__(
        self, spec: AttentionSpec, cache: KVCache, batch: Batch, paged: PagedContext, scratch: Tensor | None
    ) -> None:
        self._spec = spec
        self._cache = cache
        self._paged = paged
        self._cu_seqlens = batch.cu_seqlens
        self._scratch = scratch
        self._only_decodes = paged.decodes == batch.num_sequences

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._decode(q, k, v, layer, out, None)
        if not self._only_decodes:
            store_kv(k, v, *self._cache.layer(layer), self._paged.slots, self._paged.decodes)
            self._prefill(q, layer, out)
        return out

    def run_packed(self, qkv: Tensor, rotation: HeadRotation, layer: int) -> Tensor:
        spec, paged = self._spec, self._paged
        q, k, v = unpack(qkv.view(qkv.shape[0], -1, spec.head_dim), spec.num_heads, spec.num_kv_heads)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._decode(q, k, v, layer, out, rotation)
        if not self._only_decodes:
            qk_norm_rope_store(qkv, rotation, *self._cache.layer(layer), paged.slots, paged.decodes)
            self._prefill(q, layer, out)
        return out

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, layer: int, out: Tensor, rotation: HeadRotation | None) -> None:
        spec, paged, count = self._spec, self._paged, self._paged.decodes
        if count == 0:
            return
        k_cache, v_cache = self._cache.layer(layer)
        paged_decode(
            q[:count],
            k[:count],
            v[:count],
            k_cache,
            v_cache,
            paged.page_table,
            paged.kv_lengths,
            paged.slots,
            paged.max_kv_length,
            spec.scale,
            spec.window,
            rotation,
            out[:count],
            self._scratch,
        )

    def _prefill(self, q: Tensor, layer: int, out: Tensor) -> None:
        spec, paged = self._spec, self._paged
        k_cache, v_cache = self._cache.layer(layer)
        tables, lengths = paged.page_table, paged.kv_lengths
        decodes = paged.decodes
        paged_prefill(q, k_cache, v_cache, tables, lengths, self._cu_seqlens, decodes, spec.scale, spec.window, out)


class TritonPaged:
    """
    Attributes:
        captures_prompts: see rose.attention_backends.base.captures_prompts.
    """

    name = "triton_paged"
    captures_prompts = True

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._cache: KVCache | None = None
        self._arena = Arena(spec.device, _WORKSPACE_LIMIT)
        # Partial results of the keys' steps: what a graph reads belongs to its key.
        self._scratch: dict[Hashable, Tensor] = {}

    def supports(self, spec: AttentionSpec) -> str | None:
        reason = paged_reason(spec, HEAD_DIMS) or device_reason(spec, (8, 0))
        if reason is not None:
            return reason
        try:
            importlib.import_module("triton")
        except IMPORT_ERRORS as error:
            return f"its kernels cannot be imported: {error}"
        return None

    def bind(self, cache: KVCache) -> None:
        if cache.dtype != self._spec.dtype:
            raise StartupError(f"{self.name} reads a cache of {self._spec.dtype}, this one holds {cache.dtype}")
        self._cache = cache

    def plan(self, batch: Batch, slot: int = 0) -> AttentionPlan:
        """Host numbers are all it needs; nothing is staged, so the slot does not matter."""
        paged = batch.paged
        if self._cache is None or paged is None:
            raise InternalError(f"{self.name} needs a cache and a batch that says where its sequences lie in it")
        row_offsets(batch)
        if any(length != 1 for length in batch.lengths[: paged.decodes]):
            raise InternalError(f"the first {paged.decodes} sequences should have one token each: {batch.lengths}")
        scratch = None if batch.key is None else self._keyed(batch.key, paged)
        return TritonPagedPlan(self._spec, self._cache, batch, paged, scratch)

    def warm_up(self, max_sequences: int) -> None:
        """Compile (or load) every kernel once. How many sequences there are decides between one share of the keys and
        several, and how many of these the merge has room for."""
        if self._cache is None:
            raise StartupError(f"{self.name} has no cache to run on")
        most = self._spec.max_length or 1 << 15
        try:
            for sequences, bound in _distinct_steps(self._spec, max_sequences, most):
                self._run_once((1,) * sequences, sequences, bound)
            # Chunks: blocks for few and for many tokens, and room for each power of two of their number.
            for count in (1, *(n for n in (32, 64, 128, 256, 512, 1024) if n < 2 * max_sequences)):
                for tokens in (1, 2048 // count):
                    self._run_once((1, *(tokens,) * count), 1, max(tokens, 1024))
            torch.cuda.synchronize(self._spec.device)
        except Exception as error:  # a compiler raises kinds of its own
            raise StartupError(f"attention backend {self.name} does not run: {error}") from error

    def release(self, key: Hashable) -> None:
        block = self._scratch.pop(key, None)
        if block is not None and block.numel():
            self._arena.give_back(block)

    def workspace(self) -> WorkspaceReport:
        return WorkspaceReport(
            device_bytes=self._arena.device_bytes,
            used_bytes=self._arena.used_bytes,
            limit_bytes=self._arena.limit_bytes,
            keys=len(self._scratch),
        )

    def _keyed(self, key: Hashable, paged: PagedContext) -> Tensor:
        need = _scratch_of(self._spec, paged.decodes, paged.max_kv_length)
        block = self._scratch.get(key)
        if block is None:
            # Shared by the layers, which run after one another.
            block = self._arena.take(need) if need else torch.empty(0, dtype=torch.uint8, device=self._spec.device)
            self._scratch[key] = block
        elif block.numel() < need:
            raise InternalError(f"graph key {key!r} was planned for smaller steps than {paged.decodes} sequences")
        return block

    def _run_once(self, lengths: tuple[int, ...], decodes: int, bound: int) -> None:
        """On dummy sequences in page 0, through both ways a layer may go."""
        spec, device = self._spec, self._spec.device
        assert self._cache is not None
        tokens, count = sum(lengths), len(lengths)
        ids = torch.zeros(tokens, dtype=torch.int32, device=device)
        cu_seqlens = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
        pages = torch.zeros(count, -(-bound // self._cache.page_size), dtype=torch.int32, device=device)
        paged = PagedContext(pages, cu_seqlens.diff(), ids, self._cache.page_size, bound, decodes)
        batch = Batch(ids, ids, cu_seqlens, lengths, max(lengths), paged=paged)
        plan = TritonPagedPlan(spec, self._cache, batch, paged, None)
        width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        qkv = torch.zeros(tokens, width, dtype=spec.dtype, device=device)
        heads = unpack(qkv.view(tokens, -1, spec.head_dim), spec.num_heads, spec.num_kv_heads)
        plan.run(*heads, self._cache.layers[0])
        table = torch.zeros(1, spec.head_dim, device=device)
        weight = torch.ones(spec.head_dim, dtype=spec.dtype, device=device)
        for norm in (None, weight):
            plan.run_packed(qkv, HeadRotation(ids, table, norm, norm, 1e-6), self._cache.layers[0])


def _scratch_of(spec: AttentionSpec, sequences: int, bound: int) -> int:
    if sequences == 0:
        return 0
    tile = decode_tile(sequences, spec.num_kv_heads, spec.head_dim, bound)
    return scratch_bytes(sequences, spec.num_heads, spec.head_dim, tile.splits)


def _distinct_steps(spec: AttentionSpec, max_sequences: int, most: int) -> list[tuple[int, int]]:
    """(sequences, bound), one for each kernel that is compiled by itself."""
    found: dict[int, tuple[int, int]] = {}
    sequences = 1
    while sequences < 2 * max_sequences:
        for bound in (1, 1024, most):
            splits = decode_tile(sequences, spec.num_kv_heads, spec.head_dim, bound).splits
            found.setdefault(1 << (splits - 1).bit_length(), (sequences, bound))
        sequences *= 2
    return list(found.values())
