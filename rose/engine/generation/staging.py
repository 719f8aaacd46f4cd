"""From a plan to a packed batch: one host buffer, one copy to the device.

Two such buffers are used in turn; each is fenced by the ticket of the batch that read it last, because a copy in flight
still reads it. What a batch is rounded up by becomes dummy sequences, of tokens at position 0, in page 0, of lane 0:
behind the decoding sequences with one token each, behind the chunks of prompts with all the tokens that are missing.
Knows plans and arrays; knows neither policy nor models.
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
        lengths: tokens of each sequence, dummies included.
        decodes: leading sequences that have exactly one token each, dummies included.
        rows: drawn tokens that are no dummies'; they come first, in the order of the plan.
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
        lengths = _lengths(work, tokens, key)
        self._fill_tokens(parts, work, lengths, key)
        self._fill_sequences(parts, work, lengths, layout, key)
        if draw.sampled:
            self._fill_settings(parts, lanes, steps)
        if draw.banned:
            _fill_bans(parts["banned"], parts["penalties"], bans)
        return Staged(key, slot, layout, room.tensor[: layout.size], lengths, key.decodes, len(chunks))

    def write_dummies(self, slot: int, key: GenerationKey) -> Staged:
        """A batch of padded `key` of nothing but dummies: those that decode have as many keys as the key allows, page
        0 again and again; chunks of prompts share the other tokens, and have no others."""
        layout = layout_of(key, self._page_size)
        room = self._room(slot, layout.size)
        room.array[: layout.size] = 0
        parts = host_parts(room.array, layout)
        chunks = key.sequences - key.decodes
        each, more = divmod(key.tokens - key.decodes, chunks) if chunks else (0, 0)
        lengths = (*[1] * key.decodes, *[each + 1] * more, *[each] * (chunks - more))
        np.cumsum(lengths, out=parts["cu_seqlens"][1:])
        np.subtract(parts["cu_seqlens"][1:], 1, out=parts["rows"])
        parts["kv_lengths"][:] = (*[key.kv_bound] * key.decodes, *lengths[key.decodes :])
        parts["positions"][: key.decodes] = key.kv_bound - 1
        return Staged(key, slot, layout, room.tensor[: layout.size], lengths, key.decodes, key.sequences)

    def fence(self, slot: int, ticket: Ticket[Any]) -> None:
        """`slot` may be written again once `ticket` is ready."""
        self._slots[slot].fence = ticket

    def renew(self) -> None:
        """Take other buffers: a launch that broke off has no ticket, and its copy may not have been made yet."""
        self._slots = [self._slot(len(slot.array)) for slot in self._slots]

    def _fill_tokens(self, parts: Parts, work: _Work, lengths: tuple[int, ...], key: GenerationKey) -> None:
        """Ids, positions, slots and boundaries."""
        ids, positions, slots = parts["ids"], parts["positions"], parts["slots"]
        chunks, decodes, leading = work.chunks, work.decodes, key.decodes
        ids[:decodes] = [
            -1 - chunk.sequence.lane if chunk.from_device else chunk.sequence.ids[chunk.start]
            for chunk in (chunks if decodes == len(chunks) else chunks[:decodes])
        ]
        positions[:decodes] = work.ends[:decodes]
        positions[:decodes] -= 1
        lanes = np.array(work.lanes, np.intp)
        self._fill_slots(lanes[:decodes], positions[:decodes], slots[:decodes])
        _clear(decodes, leading, ids, positions, slots)
        if leading == len(lengths):
            parts["cu_seqlens"][:] = self._ramp_of(leading + 1)
            return
        ramp = self._ramp_of(max(work.ends))
        at = leading
        for chunk in chunks[decodes:]:
            end, last = at + chunk.length, chunk.start + chunk.length
            ids[at:end] = chunk.sequence.ids[chunk.start : last]
            positions[at:end] = ramp[chunk.start : last]
            at = end
        own = np.repeat(lanes[decodes:], [chunk.length for chunk in chunks[decodes:]])
        self._fill_slots(own, positions[leading:at], slots[leading:at])
        _clear(at, key.tokens, ids, positions, slots)
        parts["cu_seqlens"][0] = 0
        np.cumsum(lengths, out=parts["cu_seqlens"][1:])

    def _fill_slots(self, lanes: npt.NDArray[np.intp], positions: Array, slots: Array) -> None:
        pages, offsets = np.divmod(positions, self._page_size)
        np.add(self._lanes.pages[lanes, pages] * self._page_size, offsets, out=slots)

    def _fill_sequences(
        self, parts: Parts, work: _Work, lengths: tuple[int, ...], layout: Layout, key: GenerationKey
    ) -> None:
        """What each sequence has, and where the row of its last token is."""
        decodes, leading, count = work.decodes, key.decodes, len(work.lanes)
        # Of decoding sequences, dummies behind them, chunks, and dummies behind these.
        dummies, last = leading - decodes, leading + count - decodes
        parts["kv_lengths"][:] = (*work.ends[:decodes], *[1] * dummies, *work.ends[decodes:], *lengths[last:])
        parts["lanes"][:] = lanes = [
            *work.lanes[:decodes],
            *[0] * dummies,
            *work.lanes[decodes:],
            *[0] * (key.sequences - last),
        ]
        parts["table"][:] = self._lanes.pages[lanes, : layout.width]
        ends = parts["cu_seqlens"][1:] - 1
        if "drawn_lanes" in parts:
            order = [*range(decodes), *range(leading, last), *range(decodes, leading), *range(last, key.sequences)]
            parts["rows"][:], parts["drawn_lanes"][:] = ends[order], parts["lanes"][order]
        else:
            parts["rows"][:] = ends

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


def _lengths(work: _Work, tokens: int, key: GenerationKey) -> tuple[int, ...]:
    """Tokens of each sequence of the batch, dummies included."""
    leading, sequences = key.decodes, key.sequences
    if leading == sequences:
        return (1,) * sequences
    lengths = [1] * leading + [chunk.length for chunk in work.chunks[work.decodes :]]
    dummies = sequences - len(lengths)
    if dummies:
        missing = key.tokens - leading - (tokens - work.decodes)
        lengths += [*[1] * (dummies - 1), missing - dummies + 1]
    return tuple(lengths)


def _clear(start: int, end: int, *parts: Array) -> None:
    if start < end:
        for part in parts:
            part[start:end] = 0


def _fill_bans(ids: Array, penalties: Array, bans: Bans) -> None:
    ids[:], penalties[:] = 0, 0
    for row, banned in bans:
        ids[row, : len(banned)] = banned
        penalties[row, : len(banned)] = -np.inf
