"""From a plan to a packed batch: one host buffer, one copy to the device.

Two such buffers are used in turn; each is fenced by the ticket of the batch that read it last, because a copy in flight
still reads it. What a decoding batch is rounded up by becomes dummy sequences behind the real ones: one token at
position 0, in page 0, of lane 0. Knows plans and arrays; knows neither policy nor models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rose.engine.execution import Ticket
from rose.engine.generation.buckets import GenerationBuckets, GenerationKey
from rose.engine.generation.lanes import Bans, Lanes
from rose.engine.generation.layout import Array, Layout, host_parts, layout_of
from rose.engine.generation.sequence import BatchPlan, Chunk

Parts = dict[str, Array]


# Not frozen, though never changed: one is made in every step, and freezing doubles what making one costs.
@dataclass(slots=True)
class Staged:
    """One batch on the host, ready to be copied.

    Attributes:
        packed: [layout.size] int32 on the host; may be read until the slot's fence.
        lengths: tokens of each sequence, dummies included and last.
        decodes: leading sequences that have exactly one token each.
        rows: sequences that are not dummies; they come first, in the order of the plan.
    """

    key: GenerationKey
    slot: int
    layout: Layout
    packed: Tensor
    lengths: tuple[int, ...]
    decodes: int
    rows: int

    def kv_lengths(self) -> list[int]:
        """Tokens of each sequence in the cache once the batch is stored, dummies included."""
        lengths: list[int] = host_parts(self.packed.numpy(), self.layout)["kv_lengths"].tolist()
        return lengths


class _Work(NamedTuple):
    """A plan, and of each of its chunks the lane and the position behind its last token."""

    chunks: list[Chunk]
    decodes: int
    lanes: list[int]
    ends: list[int]

@dataclass(slots=True)
class _Slot:
    """One host buffer, as torch and as numpy see it, and the ticket of the batch that read it last."""

    tensor: Tensor
    array: npt.NDArray[np.int32]
    fence: Ticket[Any] | None = None


class GenerationStaging:
    """The host buffers of one engine."""

    def __init__(self, lanes: Lanes, buckets: GenerationBuckets, page_size: int, *, pin: bool, slots: int = 2) -> None:
        """
        Args:
            pin: page-lock the buffers, which asynchronous copies to a CUDA device need.
            slots: batches that may be in flight at once.
        """
        self._lanes = lanes
        self._buckets = buckets
        self._page_size = page_size
        self._pin = pin
        self._slots = [self._slot(1 << 14) for _ in range(slots)]
        self._ramp = np.arange(1 << 10, dtype=np.int32)

    def write(self, slot: int, plan: BatchPlan) -> Staged:
        """Pack `plan`, rounded up where a graph may serve it, into the buffer of `slot`."""
        chunks, decodes = plan.chunks, plan.decodes
        update, lanes, ends = self._lanes.update, [], []
        for chunk in chunks:
            sequence = chunk.sequence
            update(sequence)
            lanes.append(sequence.lane)
            ends.append(chunk.start + chunk.length)
        work = _Work(chunks, decodes, lanes, ends)
        steps = ends - self._lanes.prompt_length[lanes]
        bans = self._lanes.bans(lanes, steps) if self._lanes.banning else ()
        tokens = decodes if decodes == len(chunks) else plan.tokens
        draw = self._lanes.draw(lanes, bans)
        key = self._buckets.key(decodes, len(chunks) - decodes, tokens, max(ends), draw)
        layout = layout_of(key, self._page_size)
        room = self._room(slot, layout.size)
        parts = host_parts(room.array, layout)
        lengths = self._fill_tokens(parts, work, tokens, key)
        self._fill_sequences(parts, work, layout)
        if draw.sampled:
            self._fill_settings(parts, lanes, steps)
        if draw.banned:
            _fill_bans(parts["banned"], parts["penalties"], bans)
        decodes = key.sequences if key.padded else decodes
        return Staged(key, slot, layout, room.tensor[: layout.size], lengths, decodes, len(chunks))

    def write_dummies(self, slot: int, key: GenerationKey) -> Staged:
        """A batch of padded `key` of nothing but dummies, each with as many keys as the key allows: page 0, again and
        again."""
        layout = layout_of(key, self._page_size)
        room = self._room(slot, layout.size)
        room.array[: layout.size] = 0
        parts = host_parts(room.array, layout)
        parts["cu_seqlens"][:] = self._ramp_of(key.sequences + 1)
        parts["rows"][:] = self._ramp_of(key.sequences)
        parts["positions"][:], parts["kv_lengths"][:] = key.kv_bound - 1, key.kv_bound
        packed = room.tensor[: layout.size]
        return Staged(key, slot, layout, packed, (1,) * key.sequences, key.sequences, key.sequences)

    def fence(self, slot: int, ticket: Ticket[Any]) -> None:
        """`slot` may be written again once `ticket` is ready."""
        self._slots[slot].fence = ticket

    def _fill_tokens(self, parts: Parts, work: _Work, real: int, key: GenerationKey) -> tuple[int, ...]:
        """Ids, positions, slots and boundaries; returns the lengths, dummies included."""
        ids, positions, slots = parts["ids"], parts["positions"][:real], parts["slots"]
        chunks, decodes, size = work.chunks, work.decodes, self._page_size
        ids[:decodes] = [
            -1 - chunk.sequence.lane if chunk.from_device else chunk.sequence.ids[chunk.start]
            for chunk in (chunks if decodes == len(chunks) else chunks[:decodes])
        ]
        positions[:decodes] = work.ends[:decodes]
        positions[:decodes] -= 1
        lanes = np.array(work.lanes, np.intp)
        if decodes < len(chunks):
            lengths = [chunk.length for chunk in chunks]
            lanes = np.repeat(lanes, lengths)
            ramp = self._ramp_of(max(work.ends))
            at = decodes
            for chunk in chunks[decodes:]:
                end, last = at + chunk.length, chunk.start + chunk.length
                ids[at:end] = chunk.sequence.ids[chunk.start : last]
                positions[at:end] = ramp[chunk.start : last]
                at = end
            parts["cu_seqlens"][0] = 0
            np.cumsum(lengths, out=parts["cu_seqlens"][1:])
        else:
            lengths = [1] * key.sequences
            parts["cu_seqlens"][:] = self._ramp_of(key.sequences + 1)
        pages, offsets = np.divmod(positions, size)
        np.add(self._lanes.pages[lanes, pages] * size, offsets, out=slots[:real])
        if real < key.tokens:
            ids[real:], parts["positions"][real:], slots[real:] = 0, 0, 0
        return tuple(lengths)

    def _fill_sequences(self, parts: Parts, work: _Work, layout: Layout) -> None:
        count = len(work.lanes)
        kv, lanes, table = parts["kv_lengths"], parts["lanes"], parts["table"]
        kv[:count], lanes[:count] = work.ends, work.lanes
        table[:count] = self._lanes.pages[work.lanes, : layout.width]
        if count < len(kv):
            kv[count:], lanes[count:], table[count:] = 1, 0, 0
        np.subtract(parts["cu_seqlens"][1:], 1, out=parts["rows"])

    def _fill_settings(self, parts: Parts, lanes: list[int], steps: Array) -> None:
        count, size = len(lanes), len(parts["steps"])
        parts["steps"][:count], parts["steps"][count:] = steps, 0
        lanes = lanes + [0] * (size - count)
        for name in ("temperature", "top_k", "top_p", "min_p", "seeds"):
            parts[name][:] = getattr(self._lanes, name)[lanes]

    def _room(self, slot: int, size: int) -> _Slot:
        fence = self._slots[slot].fence
        if fence is not None:
            # Always over by now if batches end in order and no more than `slots` are in flight; never skipped.
            fence.wait()
        if len(self._slots[slot].array) < size:
            self._slots[slot] = self._slot(1 << (size - 1).bit_length())
        return self._slots[slot]

    def _slot(self, size: int) -> _Slot:
        tensor = torch.zeros(size, dtype=torch.int32, pin_memory=self._pin)
        return _Slot(tensor, tensor.numpy())

    def _ramp_of(self, count: int) -> npt.NDArray[np.int32]:
        if len(self._ramp) < count:
            self._ramp = np.arange(1 << (count - 1).bit_length(), dtype=np.int32)
        return self._ramp[:count]


def _fill_bans(ids: Array, penalties: Array, bans: Bans) -> None:
    ids[:], penalties[:] = 0, 0
    for row, banned in bans:
        ids[row, : len(banned)] = banned
        penalties[row, : len(banned)] = -np.inf
