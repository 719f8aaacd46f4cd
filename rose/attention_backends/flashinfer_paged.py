"""FlashInfer over pages (https://github.com/flashinfer-ai/flashinfer): its fa2 kernels for decoding sequences, whose
query heads of one key/value head share a tensor-core tile and whose keys are split, and fa3 (fa2 elsewhere than on
Hopper) for chunks of prompts.

Both go through its paged prefill wrapper: a decoding sequence is a prompt of one token. FlashInfer plans on the host,
from lengths the engine has to state there (`PagedContext.host_kv_lengths`); page numbers never leave the device, where
they are gathered into the list it wants. Keys and values are stored by ROSE's own kernels first.
What a captured graph reads belongs to its key, what the host writes to the slot; the workspace of split keys is shared,
since layers and batches run after one another.
Knows lengths, pages and FlashInfer's wrapper (0.7.2 to 0.7.4 read); knows no graphs and no weights.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rose.attention_backends.base import AttentionSpec, WorkspaceReport
from rose.attention_backends.kv_cache import KVCache
from rose.attention_backends.probe import IMPORT_ERRORS, device_reason, package_reason, paged_reason
from rose.attention_backends.rows import row_offsets, unpack
from rose.attention_backends.workspace import Arena, Fence, Staging
from rose.batch import AttentionPlan, Batch, HeadRotation, PagedContext
from rose.errors import InternalError, StartupError
from rose.kernels.store_kv import qk_norm_rope_store, store_kv

HEAD_DIMS = (64, 128, 256)
# FlashInfer's own size of an integer workspace, for chunks of any number and length; a step of some thousand decoding
# sequences takes a fraction of the smaller one.
_PLAN_BYTES = 8 << 20
_STEP_PLAN_BYTES = 1 << 20
# Partial results of split keys.
_FLOAT_BYTES = 128 << 20
_LIMIT = 1 << 30
# Host room for a batch's offsets beside the plan.
_OFFSET_BYTES = 1 << 20
# Wrapper attribute that holds the page-locked buffer `plan` writes; see flashinfer_ragged.py.
_PINNED = "_pin_memory_int_workspace_buffer"


@dataclass(slots=True)
class _Place:
    """A wrapper and the arena's blocks it points at; `launch`: what a graph of its key has captured."""

    wrapper: Any
    blocks: list[Tensor]
    sequences: int
    launch: tuple[int, ...] | None = None


class FlashInferPagedPlan:
    """One batch: its decoding sequences by one wrapper, its chunks by another."""

    def __init__(
        self, spec: AttentionSpec, cache: KVCache, paged: PagedContext, step: Any | None, chunks: Any | None
    ) -> None:
        self._spec = spec
        self._cache = cache
        self._paged = paged
        self._step = step
        self._chunks = chunks
        self.capturable = chunks is None

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        store_kv(k, v, *self._cache.layer(layer), self._paged.slots)
        return self._attend(q, layer)

    def run_packed(self, qkv: Tensor, rotation: HeadRotation, layer: int) -> Tensor:
        spec = self._spec
        qk_norm_rope_store(qkv, rotation, *self._cache.layer(layer), self._paged.slots)
        q, _, _ = unpack(qkv.view(qkv.shape[0], -1, spec.head_dim), spec.num_heads, spec.num_kv_heads)
        return self._attend(q, layer)

    def _attend(self, q: Tensor, layer: int) -> Tensor:
        pages, count = self._cache.layer(layer), self._paged.decodes
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self._step is not None:
            self._step.run(q[:count], pages, out=out[:count])
        if self._chunks is not None:
            self._chunks.run(q[count:], pages, out=out[count:])
        return out


class FlashInferPaged:
    name = "flashinfer_paged"
    plans_on_host = True

    def __init__(
        self, spec: AttentionSpec, *, arena: Arena | None = None, new_fence: Callable[[], Fence] | None = None
    ) -> None:
        self._spec = spec
        self._cache: KVCache | None = None
        self._arena = Arena(spec.device, _LIMIT) if arena is None else arena
        self._new_fence = new_fence
        self._staging: dict[tuple[int, str], Staging] = {}
        self._keyed: dict[Hashable, _Place] = {}
        self._plain: dict[tuple[int, str], _Place] = {}
        self._float: Tensor | None = None

    def supports(self, spec: AttentionSpec) -> str | None:
        reason = (
            paged_reason(spec, HEAD_DIMS)
            or device_reason(spec, (8, 0))
            or package_reason("flashinfer-python", (0, 7, 2), "masks the padding blocks of a replayed graph")
        )
        if reason is not None:
            return reason
        try:
            wrapper = importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        except IMPORT_ERRORS as error:
            return f"flashinfer cannot be imported: {error}"
        return None if callable(wrapper) else "this flashinfer has no paged prefill"

    def bind(self, cache: KVCache) -> None:
        if cache.dtype != self._spec.dtype:
            raise StartupError(f"{self.name} reads a cache of {self._spec.dtype}, this one holds {cache.dtype}")
        self._cache = cache

    def plan(self, batch: Batch, slot: int = 0) -> AttentionPlan:
        paged = batch.paged
        if self._cache is None or paged is None:
            raise InternalError(f"{self.name} needs a cache and a batch that says where its sequences lie in it")
        if row_offsets(batch)[-1] != batch.num_tokens:
            raise InternalError(f"{self.name} needs every row to belong to a sequence")
        lengths, count = _host_lengths(paged), paged.decodes
        step = chunks = None
        # What a graph may hold has no chunks.
        key = batch.key if count == batch.num_sequences else None
        if count:
            place = self._plain_place(slot, "fa2") if key is None else self._keyed_place(key, paged)
            self._fill(place, slot, "step", batch.lengths[:count], lengths[:count], paged, 0)
            if key is not None:
                _same_launch(place, key)
            step = place.wrapper
        if count < batch.num_sequences:
            place = self._plain_place(slot, self._chunk_kernels(), "chunks")
            self._fill(place, slot, "chunks", batch.lengths[count:], lengths[count:], paged, count)
            chunks = place.wrapper
        return FlashInferPagedPlan(self._spec, self._cache, paged, step, chunks)

    def warm_up(self, max_sequences: int) -> None:
        """Load (or compile) both modules and run them once; the number of sequences does not matter here."""
        if self._cache is None:
            raise StartupError(f"{self.name} has no cache to run on")
        spec, device = self._spec, self._spec.device
        ints = torch.zeros(3, dtype=torch.int32, device=device)
        cu_seqlens = torch.tensor([0, 1, 3], dtype=torch.int32, device=device)
        table = torch.zeros(2, 1, dtype=torch.int32, device=device)
        paged = PagedContext(table, cu_seqlens.diff(), ints, self._cache.page_size, 2, 1, host_kv_lengths=(1, 2))
        qkv = torch.zeros(3, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim, dtype=spec.dtype, device=device)
        try:
            plan = self.plan(Batch(ints, ints, cu_seqlens, (1, 2), 2, paged=paged))
            plan.run(*unpack(qkv, spec.num_heads, spec.num_kv_heads), self._cache.layers[0])
            torch.cuda.synchronize(device)
        except Exception as error:  # a compiler raises kinds of its own
            raise StartupError(f"attention backend {self.name} does not run: {error}") from error

    def release(self, key: Hashable) -> None:
        place = self._keyed.pop(key, None)
        if place is not None:
            for block in place.blocks:
                self._arena.give_back(block)

    def workspace(self) -> WorkspaceReport:
        return WorkspaceReport(
            device_bytes=self._arena.device_bytes,
            used_bytes=self._arena.used_bytes,
            limit_bytes=self._arena.limit_bytes,
            pinned_bytes=sum(staging.host.numel() for staging in self._staging.values()),
            keys=len(self._keyed),
            fence_waits=sum(staging.waits for staging in self._staging.values()),
        )

    def _chunk_kernels(self) -> str:
        hopper = self._spec.device.type == "cuda" and torch.cuda.get_device_capability(self._spec.device)[0] == 9
        return "fa3" if hopper else "fa2"

    def _fill(
        self,
        place: _Place,
        slot: int,
        part: str,
        lengths: Sequence[int],
        kv_lengths: Sequence[int],
        paged: PagedContext,
        first: int,
    ) -> None:
        """Plan the sequences from `first` on, which have `lengths` tokens here and `kv_lengths` in the cache."""
        spec, size = self._spec, paged.page_size
        pages = [-(-n // size) for n in kv_lengths]
        staging = self._slot(slot, part)
        host = staging.acquire()
        try:
            offsets = host[_PLAN_BYTES:].view(torch.int32)
            count = len(lengths)
            rows, indptr, last = offsets[: count + 1], offsets[count + 1 : 2 * count + 2], offsets[2 * count + 2 :]
            rows.copy_(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32))
            indptr.copy_(torch.tensor([0, *accumulate(pages)], dtype=torch.int32))
            last[:count].copy_(torch.tensor([(n - 1) % size + 1 for n in kv_lengths], dtype=torch.int32))
            setattr(place.wrapper, _PINNED, host[:_PLAN_BYTES])
            place.wrapper.plan(
                rows,
                indptr,
                self._page_list(paged, first, pages),
                last[:count],
                spec.num_heads,
                spec.num_kv_heads,
                spec.head_dim,
                size,
                causal=True,
                window_left=-1 if spec.window is None else spec.window,
                sm_scale=spec.scale,
                q_data_type=spec.dtype,
                kv_data_type=spec.dtype,
            )
        except (RuntimeError, ValueError, AssertionError) as error:
            raise InternalError(
                f"{self.name} could not plan {sum(lengths)} tokens of {count} sequences: {error}"
            ) from error
        finally:
            staging.release()

    def _page_list(self, paged: PagedContext, first: int, pages: Sequence[int]) -> Tensor:
        """The used entries of the page table one after another, gathered on the device."""
        device = paged.page_table.device
        starts = torch.tensor([(first + i) * paged.page_table.shape[1] for i in range(len(pages))])
        counts = torch.tensor(pages)
        before = counts.cumsum(0) - counts
        at = torch.arange(int(counts.sum())) + torch.repeat_interleave(starts - before, counts)
        at = at.pin_memory() if device.type == "cuda" else at
        return paged.page_table.flatten()[at.to(device, non_blocking=True)]

    def _slot(self, slot: int, part: str) -> Staging:
        if (slot, part) not in self._staging:
            nbytes = _PLAN_BYTES + _OFFSET_BYTES
            self._staging[slot, part] = Staging(self._spec.device, nbytes, self._new_fence)
        return self._staging[slot, part]

    def _plain_place(self, slot: int, kernels: str, part_name: str = "step") -> _Place:
        """For batches that no graph replays: a wrapper for each slot and part of a batch."""
        part = slot, part_name
        if part not in self._plain:
            block = self._arena.take(_PLAN_BYTES)
            self._plain[part] = _Place(self._new_wrapper(block, kernels, None), [block], 0)
        return self._plain[part]

    def _keyed_place(self, key: Hashable, paged: PagedContext) -> _Place:
        count, width = paged.decodes, paged.page_table.shape[1]
        place = self._keyed.get(key)
        if place is None:
            blocks = [self._arena.take(n) for n in (_STEP_PLAN_BYTES, 4 * (3 * count + 2), 4 * count * width)]
            offsets, pages = blocks[1].view(torch.int32), blocks[2].view(torch.int32)[: count * width]
            buffers = (
                offsets[: count + 1],
                offsets[count + 1 : 2 * count + 2],
                pages,
                offsets[2 * count + 2 : 3 * count + 2],
            )
            place = self._keyed[key] = _Place(self._new_wrapper(blocks[0], "fa2", buffers), blocks, count)
        elif place.sequences != count:
            raise InternalError(f"graph key {key!r} was planned for {place.sequences} sequences, now for {count}")
        return place

    def _new_wrapper(self, ints: Tensor, kernels: str, buffers: tuple[Tensor, ...] | None) -> Any:
        """Args: buffers: of a graph: offsets of rows, offsets of pages, pages, tokens in last pages."""
        if self._float is None:
            self._float = self._arena.take(_FLOAT_BYTES)
        rows, indptr, pages, last = buffers or (None, None, None, None)
        wrapper = importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(
            self._float,
            "NHD",
            use_cuda_graph=buffers is not None,
            qo_indptr_buf=rows,
            paged_kv_indptr_buf=indptr,
            paged_kv_indices_buf=pages,
            paged_kv_last_page_len_buf=last,
            backend=kernels,
        )
        if not hasattr(wrapper, _PINNED):
            raise StartupError(
                f"this flashinfer keeps its staging buffer elsewhere than in {_PINNED}; {self.name} is out"
            )
        wrapper.reset_workspace_buffer(self._float, ints)
        return wrapper


def _host_lengths(paged: PagedContext) -> Sequence[int]:
    if paged.host_kv_lengths is not None:
        return paged.host_kv_lengths
    if paged.kv_lengths.device.type == "cpu":
        return [int(n) for n in paged.kv_lengths.tolist()]
    raise InternalError("flashinfer_paged plans on the host and needs host_kv_lengths of the batch")


def _same_launch(place: _Place, key: Hashable) -> None:
    launch = tuple(int(n) for n in getattr(place.wrapper, "_plan_info", ()))
    if place.launch is None:
        place.launch = launch
    elif launch != place.launch:
        # A graph replays the grid and offsets of its capture; with others it would read stale entries.
        raise InternalError(
            f"flashinfer_paged planned another launch for graph key {key!r}: {launch}, was {place.launch}"
        )
