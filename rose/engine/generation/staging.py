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
        rows: drawn tokens that somebody wants; they come first, in the order of the plan's chunks that sample.
    """

    key: GenerationKey
    slot: int
    layout: Layout
    packed: Tensor
    lengths: tuple[int, ...]
    decodes: int
    rows: int


class _Work(NamedTuple):
    """A plan, and of each of its chunks the lane and the position behind its last token.

    Attributes:
        drawn: indices of the chunks that sample.
    """

    chunks: list[Chunk]
    decodes: int
    lanes: list[int]
    ends: list[int]
    drawn: list[int]


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
        drawn = [row for row, chunk in enumerate(chunks) if chunk.samples]
        work = _Work(chunks, decodes, lanes, ends, drawn)
        drawing = lanes if len(drawn) == len(lanes) else [lanes[row] for row in drawn]
        steps = [ends[row] for row in drawn] - self._lanes.prompt_length[drawing]
        bans = self._lanes.bans(drawing, steps) if self._lanes.banning else ()
        tokens = decodes if decodes == len(chunks) else plan.tokens
        draw = self._lanes.draw(drawing, bans)
        key = self._buckets.key(decodes, len(chunks) - decodes, tokens, len(drawn), max(ends), draw)
        layout = layout_of(key, self._page_size)
        room = self._room(slot, layout.size)
        parts = host_parts(room.array, layout)
        lengths = self._fill_tokens(parts, work, tokens, key)
        self._fill_sequences(parts, work, layout)
        self._fill_rows(parts, work, drawing, steps)
        if draw.banned:
            _fill_bans(parts["banned"], parts["penalties"], bans)
        decodes = key.sequences if key.padded else decodes
        return Staged(key, slot, layout, room.tensor[: layout.size], lengths, decodes, len(drawn))

    def write_dummies(self, slot: int, key: GenerationKey) -> Staged:
        """A batch of padded `key` of nothing but dummies, each with as many keys as the key allows: page 0, again and
        again."""
        layout = layout_of(key, self._page_size)
        room = self._room(slot, layout.size)
        room.array[: layout.size] = 0
        parts = host_parts(room.array, layout)
        parts["cu_seqlens"][:] = self._ramp_of(key.sequences + 1)
        parts["rows"][:] = self._ramp_of(key.rows)
        parts["positions"][:], parts["kv_lengths"][:] = key.kv_bound - 1, key.kv_bound
        packed = room.tensor[: layout.size]
        return Staged(key, slot, layout, packed, (1,) * key.sequences, key.sequences, key.rows)

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
        kv, states, table = parts["kv_lengths"], parts["states"], parts["table"]
        kv[:count], states[:count] = work.ends, work.lanes
        table[:count] = self._lanes.pages[work.lanes, : layout.width]
        if count < len(kv):
            kv[count:], states[count:], table[count:] = 1, 0, 0

    def _fill_rows(self, parts: Parts, work: _Work, drawing: list[int], steps: Array) -> None:
        count = len(drawing)
        rows, lanes = parts["rows"], parts["lanes"]
        if work.decodes == len(work.chunks) == count:
            rows[:] = self._ramp_of(len(rows))
        else:
            rows[:count] = parts["cu_seqlens"][1:][work.drawn]
            rows[:count] -= 1
            rows[count:] = 0
        lanes[:count], lanes[count:] = drawing, 0
        if "seeds" not in parts:
            return
        parts["steps"][:count], parts["steps"][count:] = steps, 0
        drawing = drawing + [0] * (len(rows) - count)
        for name in ("temperature", "top_k", "top_p", "min_p", "seeds"):
            parts[name][:] = getattr(self._lanes, name)[drawing]

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
