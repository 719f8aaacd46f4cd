"""From id arrays to a packed batch: one host buffer, one copy to the device.

ids | positions | token types | cu_seqlens | spans lie in one int32 buffer, page-locked on CUDA. Two such buffers are
used in turn; each is fenced by the ticket of the batch that read it last, because a copy in flight still reads it.
Single sequences, somebody's query each, come in few lengths: all that is not their ids is copied from one before.
Padding becomes dummy sequences of valid ids behind the real ones. Knows arrays and devices; knows neither policy nor
models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rose.batch import Batch
from rose.engine.buckets import BatchKey, GraphKey, dummy_lengths
from rose.engine.execution import Ticket
from rose.engine.open_request import Work

# Rows of the packed buffer start at multiples of 128 bytes, which vector loads and bulk copies ask for.
ALIGN = 32
# Single sequences up to this long are written from a form, of which each buffer keeps so many: at most 8 KiB each.
FORM_TOKENS = 1024
MAX_FORMS = 1024


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each part of the packed buffer starts and how long it is, in int32 elements.

    Attributes:
        row: start of the positions, and distance of the rows.
        boundaries: start of cu_seqlens.
        span_bounds: start of the spans' bounds.
        spans: how many there are room for.
        size: of the whole.
    """

    tokens: int
    sequences: int
    token_types: bool
    row: int
    boundaries: int
    span_bounds: int
    spans: int
    size: int


@lru_cache(maxsize=4096)
def layout_of(tokens: int, sequences: int, token_types: bool, spans: int = 0) -> Layout:
    """The layout of a batch of this shape; remembered, since the same few come again and again."""
    row = _aligned(tokens)
    boundaries = row * (3 if token_types else 2)
    end = boundaries + sequences + 1
    span_bounds = _aligned(end) if spans else end
    return Layout(tokens, sequences, token_types, row, boundaries, span_bounds, spans, span_bounds + 2 * spans)


def _aligned(elements: int) -> int:
    return -(-elements // ALIGN) * ALIGN


# Not frozen, though never changed: one is made in every step, and freezing doubles what making one costs.
@dataclass(slots=True)
class Staged:
    """One batch on the host, ready to be copied.

    Attributes:
        packed: [layout.size] int32 on the host; may be read until the slot's fence.
        lengths: tokens of each sequence, dummies included and last.
        max_length: the key's bound for a padded batch, else its own longest sequence.
        rows: real rows of pooled outputs: sequences, or spans where the batch has any; they come first.
        tokens: the real tokens, which come first.
    """

    key: GraphKey
    slot: int
    layout: Layout
    packed: Tensor
    lengths: tuple[int, ...]
    max_length: int
    rows: int
    tokens: int

    @property
    def pooled_rows(self) -> int:
        """Rows of pooled outputs as the model gives them."""
        return self.layout.spans or self.layout.sequences

    def batch(self, packed: Tensor, graph_key: BatchKey | None = None, like: Batch | None = None) -> Batch:
        """The batch whose tensors are views of `packed`, [layout.size] int32 on any device.

        Args:
            like: another batch of the same layout out of the same `packed`, whose views it takes.
        """
        if like is not None:
            ids, positions, boundaries = like.ids, like.positions, like.cu_seqlens
            longest = self.max_length
            return Batch(ids, positions, boundaries, self.lengths, longest, like.type_ids, like.spans, key=graph_key)
        layout = self.layout
        row, tokens = layout.row, layout.tokens
        return Batch(
            ids=packed[:tokens],
            positions=packed[row : row + tokens],
            cu_seqlens=packed[layout.boundaries : layout.boundaries + layout.sequences + 1],
            lengths=self.lengths,
            max_length=self.max_length,
            type_ids=packed[2 * row : 2 * row + tokens] if layout.token_types else None,
            spans=packed[layout.span_bounds :].view(-1, 2) if layout.spans else None,
            key=graph_key,
        )


@dataclass(slots=True)
class _Form:
    """All batches of one single sequence of one length, but for their ids.

    Attributes:
        packed: what the buffer holds beside them.
    """

    staged: Staged
    packed: npt.NDArray[np.int32]


@dataclass(slots=True)
class _Slot:
    """One host buffer, as torch and as numpy see it, and the ticket of the batch that read it last.

    Attributes:
        forms: of single sequences, by key and tokens.
        form: the one whose rest the buffer holds, or None.
    """

    tensor: Tensor
    array: npt.NDArray[np.int32]
    fence: Ticket[Mapping[str, npt.NDArray[Any]]] | None = None
    forms: dict[tuple[GraphKey, int], _Form] = field(default_factory=dict)
    form: _Form | None = None


class Staging:
    """The host buffers of one engine."""

    def __init__(self, *, pin: bool, slots: int = 2, pad_id: int = 0) -> None:
        """
        Args:
            pin: page-lock the buffers, which asynchronous copies to a CUDA device need.
            slots: batches that may be in flight at once.
            pad_id: id of dummy tokens; any valid one will do.
        """
        self._pin = pin
        self._pad_id = pad_id
        self._slots = [self._slot(1 << 12) for _ in range(slots)]
        self._ramp = np.arange(1 << 10, dtype=np.int32)

    def write(self, slot: int, work: Work, key: GraphKey) -> Staged:
        """Pack `work`, padded up to `key`, into the buffer of `slot`."""
        fence = self._slots[slot].fence
        if fence is not None:
            # Always over by now if batches end in order and no more than `slots` are in flight; never skipped.
            fence.wait()
        # A key that is padded has no spans.
        if len(work.lengths) == 1 and key.padded and key.tokens <= FORM_TOKENS and not key.token_types:
            return self._write_single(slot, work, key)
        return self._write(slot, work, key)

    def _write_single(self, slot: int, work: Work, key: GraphKey) -> Staged:
        room, tokens = self._slots[slot], work.lengths[0]
        form = room.forms.get((key, tokens))
        if form is None:
            staged = self._write(slot, work, key)
            room = self._slots[slot]
            if len(room.forms) >= MAX_FORMS:
                room.forms.clear()
            form = _Form(staged, room.array[: staged.layout.size].copy())
            room.forms[key, tokens] = form
            return staged
        if room.form is not form:
            room.array[: len(form.packed)] = form.packed
            room.form = form
        room.array[:tokens] = work.runs[0].ids
        return form.staged

    def _write(self, slot: int, work: Work, key: GraphKey) -> Staged:
        spans = work.span_splits
        # A batch without a single span still pools one row, which nobody gets: kernels fail on empty outputs.
        layout = layout_of(key.tokens, key.sequences, key.token_types, max(spans[-1], 1) if spans else 0)
        room = self._room(slot, layout.size)
        room.form = None
        lengths = self._fill(room.array, layout, work, key)
        longest = key.max_length if key.padded else max(lengths)
        rows = spans[-1] if spans else work.sequences
        return Staged(key, slot, layout, room.tensor[: layout.size], lengths, longest, rows, work.tokens)

    def fence(self, slot: int, ticket: Ticket[Mapping[str, npt.NDArray[Any]]]) -> None:
        """`slot` may be written again once `ticket` is ready."""
        self._slots[slot].fence = ticket

    def _fill(self, packed: npt.NDArray[np.int32], layout: Layout, work: Work, key: GraphKey) -> tuple[int, ...]:
        """Write everything; returns the lengths, dummies included."""
        tokens, row, real = layout.tokens, layout.row, work.tokens
        lengths, ends = work.lengths, work.splits
        if layout.sequences > len(lengths):
            dummies = dummy_lengths(key, real, len(lengths))
            lengths, ends = lengths + dummies, ends + tuple(accumulate(dummies, initial=real))[1:]
        packed[layout.boundaries : layout.boundaries + len(ends)] = ends
        packed[row : row + tokens] = self._ramp_of(tokens)
        if len(lengths) > 1:
            packed[row : row + tokens] -= np.repeat(np.array(ends[:-1], dtype=np.int32), lengths)
        if len(work.runs) == 1:
            packed[:real] = work.runs[0].ids
        else:
            np.concatenate([run.ids for run in work.runs], out=packed[:real])
        if real < tokens:
            packed[real:tokens] = self._pad_id
        if layout.token_types:
            self._fill_types(packed[2 * row : 2 * row + tokens], work)
        if layout.spans:
            self._fill_spans(packed[layout.span_bounds : layout.size].reshape(-1, 2), work)
        return tuple(lengths)

    def _fill_types(self, types: npt.NDArray[np.int32], work: Work) -> None:
        types[:] = 0
        at = 0
        for run in work.runs:
            if run.token_types is not None:
                types[at : at + len(run.ids)] = run.token_types
            at += len(run.ids)

    def _fill_spans(self, bounds: npt.NDArray[np.int32], work: Work) -> None:
        """Counted from the start of the batch, where the requests count from that of the sequence."""
        if not work.span_splits[-1]:
            bounds[:] = (0, 1)
            return
        np.concatenate(work.spans, out=bounds)
        bounds += np.repeat(np.array(work.splits[:-1], np.int32), np.diff(work.span_splits))[:, None]

    def _room(self, slot: int, size: int) -> _Slot:
        if len(self._slots[slot].array) < size:
            self._slots[slot] = self._slot(1 << (size - 1).bit_length())
        return self._slots[slot]

    def _slot(self, size: int) -> _Slot:
        tensor = torch.zeros(size, dtype=torch.int32, pin_memory=self._pin)
        return _Slot(tensor, tensor.numpy())

    def _ramp_of(self, tokens: int) -> npt.NDArray[np.int32]:
        if len(self._ramp) < tokens:
            self._ramp = np.arange(1 << (tokens - 1).bit_length(), dtype=np.int32)
        return self._ramp[:tokens]
