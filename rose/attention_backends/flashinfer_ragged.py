"""FlashInfer's ragged prefill (https://github.com/flashinfer-ai/flashinfer) behind the plan surface, for its fa2 and
fa3 kernels.

FlashInfer plans on the host: `plan` fills a schedule in page-locked memory and queues one copy of it to the device, and
`run` reads it there. A captured graph therefore replays whatever was planned last for its key. The memory is kept as
the engine needs it: what the graph reads belongs to the key, what the host writes belongs to the slot and is fenced.
Split-KV is off: sequences attend to themselves only, and a merge kernel would cost more than it saves; with it off the
float workspace is never touched, so all keys share a small one.
Knows lengths and FlashInfer's wrapper (0.7.2 to 0.7.4 read); knows no graphs and no weights.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rose.attention_backends.base import AttentionSpec, WorkspaceReport
from rose.attention_backends.probe import IMPORT_ERRORS, device_reason, package_reason, shape_reason
from rose.attention_backends.rows import row_offsets, zero_qkv
from rose.attention_backends.workspace import Arena, Fence, Staging
from rose.batch import AttentionPlan, Batch
from rose.errors import InternalError, StartupError

HEAD_DIMS = (64, 128, 256)
# FlashInfer's own size of an integer workspace; enough for a plain batch of any size that is served.
_LARGEST_PLAN_BYTES = 8 << 20
_FLOAT_BYTES = 1 << 20
_DEFAULT_LIMIT = 512 << 20
# Wrapper attribute that holds the page-locked buffer `plan` writes. There is no public way to swap it: the public
# reset_workspace_buffer pins a new one at every call.
_PINNED = "_pin_memory_int_workspace_buffer"


class RaggedPlan:
    """One planned batch."""

    capturable = True

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def run(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        out: Tensor = self._wrapper.run(q, k, v)
        return out


@dataclass(slots=True)
class _Place:
    """All device memory one graph key's attention reads, and the wrapper that points at it."""

    wrapper: Any
    indptr: Tensor
    blocks: tuple[Tensor, ...]
    tokens: int
    sequences: int
    launch: tuple[int, ...] | None = None


class FlashInferRagged(ABC):
    """Base of `flashinfer2` and `flashinfer3`.

    One wrapper in graph mode for each key, one in plain mode for each slot.
    """

    name: str
    kernels: Literal["fa2", "fa3"]
    capability: tuple[tuple[int, int], tuple[int, int] | None]

    def __init__(
        self, spec: AttentionSpec, *, arena: Arena | None = None, new_fence: Callable[[], Fence] | None = None
    ) -> None:
        self._spec = spec
        self._arena = Arena(spec.device, _DEFAULT_LIMIT) if arena is None else arena
        self._new_fence = new_fence
        self._staging: dict[int, Staging] = {}
        self._keyed: dict[Hashable, _Place] = {}
        self._plain: dict[int, _Place] = {}
        self._float: Tensor | None = None

    @abstractmethod
    def plan_bytes(self, tokens: int, sequences: int) -> int:
        """Upper bound of the integer workspace for any split of `tokens` rows into `sequences`."""

    def supports(self, spec: AttentionSpec) -> str | None:
        reason = (
            shape_reason(spec, HEAD_DIMS)
            or _window_reason(spec)
            or device_reason(spec, *self.capability)
            or package_reason("flashinfer-python", (0, 7, 2), "masks the padding blocks of a replayed graph")
        )
        if reason is not None:
            return reason
        try:
            wrapper = importlib.import_module("flashinfer").BatchPrefillWithRaggedKVCacheWrapper
        except IMPORT_ERRORS as error:
            return f"flashinfer cannot be imported: {error}"
        return None if callable(wrapper) else "this flashinfer has no ragged prefill"

    def plan(self, batch: Batch, slot: int = 0) -> AttentionPlan:
        offsets = row_offsets(batch)
        staging = self._slot(slot)
        place = self._keyed_place(batch) if batch.key is not None else self._plain_place(batch, offsets, slot)
        host = staging.acquire()
        try:
            self._fill(place, host, offsets, batch.num_tokens)
        finally:
            staging.release()
        if batch.key is not None:
            self._same_launch(place)
        return RaggedPlan(place.wrapper)

    def warm_up(self, max_sequences: int) -> None:
        """Load (or compile) the module and launch it once; the number of sequences does not matter here."""
        spec = self._spec
        cu_seqlens = torch.tensor([0, 1], dtype=torch.int32, device=spec.device)
        batch = Batch(cu_seqlens[:1], cu_seqlens[:1], cu_seqlens, (1,), 1)
        try:
            self.plan(batch).run(*zero_qkv(spec, 1), 0)
            torch.cuda.synchronize(spec.device)
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

    def _fill(self, place: _Place, host: Tensor, offsets: tuple[int, ...], tokens: int) -> None:
        spec = self._spec
        # Rows past the last sequence form one more: FlashInfer wants the last offset to be the number of rows. A graph
        # key needs the same number of offsets every time, so an empty sequence is planned where it has no such rows.
        if len(offsets) < place.indptr.shape[0]:
            offsets = (*offsets, tokens)
        indptr = host[_LARGEST_PLAN_BYTES:].view(torch.int32)[: len(offsets)]
        indptr.copy_(torch.tensor(offsets, dtype=torch.int32))
        place.indptr.copy_(indptr, non_blocking=True)
        setattr(place.wrapper, _PINNED, host[:_LARGEST_PLAN_BYTES])
        try:
            place.wrapper.plan(
                place.indptr,
                place.indptr,
                spec.num_heads,
                spec.num_kv_heads,
                spec.head_dim,
                causal=spec.causal,
                window_left=-1 if spec.window is None else spec.window,
                sm_scale=spec.scale,
                q_data_type=spec.dtype,
                kv_data_type=spec.dtype,
                disable_split_kv=True,
                qo_indptr_cpu=indptr,
                kv_indptr_cpu=indptr,
            )
        except (RuntimeError, ValueError, AssertionError) as error:
            raise InternalError(
                f"{self.name} could not plan {tokens} tokens in {place.sequences} sequences: {error}"
            ) from error

    def _same_launch(self, place: _Place) -> None:
        launch = tuple(int(n) for n in getattr(place.wrapper, "_plan_info", ()))
        if place.launch is None:
            place.launch = launch
        elif launch != place.launch:
            # A graph replays the grid and offsets of its capture; with others it would read stale entries.
            raise InternalError(
                f"{self.name} planned another launch for the same graph key ({place.tokens} tokens, "
                f"{place.sequences} sequences): {launch} after {place.launch}"
            )

    def _slot(self, slot: int) -> Staging:
        if slot not in self._staging:
            nbytes = _LARGEST_PLAN_BYTES + (1 << 20)
            self._staging[slot] = Staging(self._spec.device, nbytes, self._new_fence)
        return self._staging[slot]

    def _keyed_place(self, batch: Batch) -> _Place:
        place = self._keyed.get(batch.key)
        if place is None:
            place = self._keyed[batch.key] = self._new_place(batch.num_tokens, batch.num_sequences)
        elif (place.tokens, place.sequences) != (batch.num_tokens, batch.num_sequences):
            raise InternalError(
                f"graph key {batch.key!r} was planned for {place.tokens} tokens in {place.sequences} sequences, now "
                f"for {batch.num_tokens} in {batch.num_sequences}"
            )
        return place

    def _plain_place(self, batch: Batch, offsets: tuple[int, ...], slot: int) -> _Place:
        place = self._plain.get(slot)
        if place is None:
            plan = self._arena.take(_LARGEST_PLAN_BYTES)
            wrapper = self._new_wrapper(plan, None)
            place = self._plain[slot] = _Place(wrapper, torch.empty(0), (plan,), 0, 0)
        place.tokens, place.sequences = batch.num_tokens, batch.num_sequences
        # The wrapper keeps the offsets until its next plan; the allocator's reuse is in stream order.
        count = len(offsets) + (offsets[-1] < batch.num_tokens)
        place.indptr = torch.empty(count, dtype=torch.int32, device=self._spec.device)
        return place

    def _new_place(self, tokens: int, sequences: int) -> _Place:
        nbytes = self.plan_bytes(tokens, sequences + 1)
        if nbytes > _LARGEST_PLAN_BYTES:
            raise InternalError(f"a plan of {tokens} tokens in {sequences} sequences takes {nbytes} bytes, too many")
        blocks = [self._arena.take(nbytes)]
        try:
            blocks.append(self._arena.take(4 * (sequences + 2)))
            indptr = blocks[1].view(torch.int32)[: sequences + 2]
            wrapper = self._new_wrapper(blocks[0], indptr)
        except Exception:
            for block in blocks:
                self._arena.give_back(block)
            raise
        return _Place(wrapper, indptr, tuple(blocks), tokens, sequences)

    def _new_wrapper(self, plan: Tensor, indptr: Tensor | None) -> Any:
        if self._float is None:
            self._float = self._arena.take(_FLOAT_BYTES)
        wrapper = importlib.import_module("flashinfer").BatchPrefillWithRaggedKVCacheWrapper(
            self._float,
            "NHD",
            use_cuda_graph=indptr is not None,
            qo_indptr_buf=indptr,
            kv_indptr_buf=indptr,
            backend=self.kernels,
        )
        if not hasattr(wrapper, _PINNED):
            raise StartupError(
                f"this flashinfer keeps its staging buffer elsewhere than in {_PINNED}; {self.name} is out"
            )
        wrapper.reset_workspace_buffer(self._float, plan)
        return wrapper


def _window_reason(spec: AttentionSpec) -> str | None:
    if spec.window is not None and not spec.causal:
        return "serves sliding windows in causal models only"
    return None


def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors, or 1 where there is no CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def aligned(*sizes: int) -> int:
    """Bytes of several arrays behind each other, each aligned to 16."""
    return sum(-(-size // 16) * 16 for size in sizes)
