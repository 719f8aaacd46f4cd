"""From id arrays to a packed batch: one host buffer, one copy to the device.

ids | positions | token types | cu_seqlens lie in one int32 buffer, page-locked on CUDA. Two such buffers are used in
turn; each is fenced by the ticket of the batch that read it last, because a copy in flight still reads it.
Padding becomes dummy sequences of valid ids behind the real ones. Knows arrays and devices; knows neither policy nor
models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rose.batch import Batch
from rose.engine.buckets import GraphKey, dummy_lengths
from rose.engine.execution import Ticket
from rose.engine.open_request import Work

# Rows of the packed buffer start at multiples of 128 bytes, which vector loads and bulk copies ask for.
ALIGN = 32


# Not frozen, though never changed: these are made in every step, and freezing doubles what making one costs.
@dataclass(slots=True)
class Layout:
    """Where each row of the packed buffer starts, in int32 elements."""

    tokens: int
    sequences: int
    token_types: bool

    @staticmethod
    def of(key: GraphKey) -> Layout:
        return Layout(key.tokens, key.sequences, key.token_types)

    @property
    def row(self) -> int:
        return -(-self.tokens // ALIGN) * ALIGN

    @property
    def boundaries(self) -> int:
        return self.row * (3 if self.token_types else 2)

    @property
    def size(self) -> int:
        return self.boundaries + self.sequences + 1


@dataclass(slots=True)
class Staged:
    """One batch on the host, ready to be copied.

    Attributes:
        packed: [layout.size] int32 on the host; may be read until the slot's fence.
        lengths: tokens of each sequence, dummies included and last.
        max_length: the key's bound for a padded batch, else its own longest sequence.
        rows, tokens: the real sequences and tokens, which come first.
    """

    key: GraphKey
    slot: int
    layout: Layout
    packed: Tensor
    lengths: tuple[int, ...]
    max_length: int
    rows: int
    tokens: int

    def batch(self, packed: Tensor, graph_key: GraphKey | None = None) -> Batch:
        """The batch whose tensors are views of `packed`, [layout.size] int32 on any device."""
        layout, row = self.layout, self.layout.row
        return Batch(
            ids=packed[: layout.tokens],
            positions=packed[row : row + layout.tokens],
            cu_seqlens=packed[layout.boundaries : layout.size],
            lengths=self.lengths,
            max_length=self.max_length,
            type_ids=packed[2 * row : 2 * row + layout.tokens] if layout.token_types else None,
            key=graph_key,
        )


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
        self._buffers = [self._buffer(1 << 12) for _ in range(slots)]
        self._fences: list[Ticket[Mapping[str, npt.NDArray[Any]]] | None] = [None] * slots
        self._ramp = np.arange(1 << 10, dtype=np.int32)

    def write(self, slot: int, work: Work, key: GraphKey) -> Staged:
        """Pack `work`, padded up to `key`, into the buffer of `slot`."""
        fence = self._fences[slot]
        if fence is not None:
            # Always over by now if batches end in order and no more than `slots` are in flight; never skipped.
            fence.wait()
        layout = Layout.of(key)
        lengths = [*work.lengths, *dummy_lengths(key, work.tokens, work.sequences)]
        packed = self._room(slot, layout.size)
        self._fill(packed.numpy(), layout, work, lengths)
        longest = key.max_length if key.padded else max(lengths)
        return Staged(key, slot, layout, packed, tuple(lengths), longest, work.sequences, work.tokens)

    def fence(self, slot: int, ticket: Ticket[Mapping[str, npt.NDArray[Any]]]) -> None:
        """`slot` may be written again once `ticket` is ready."""
        self._fences[slot] = ticket

    def _fill(self, packed: npt.NDArray[np.int32], layout: Layout, work: Work, lengths: list[int]) -> None:
        tokens, row = layout.tokens, layout.row
        ids, positions, boundaries = packed[:tokens], packed[row : row + tokens], packed[layout.boundaries :]
        boundaries[:] = list(accumulate(lengths, initial=0))
        positions[:] = self._ramp_of(tokens)
        if len(lengths) > 1:
            positions -= np.repeat(boundaries[:-1], lengths)
        np.concatenate([run.ids for run in work.runs], out=ids[: work.tokens])
        ids[work.tokens :] = self._pad_id
        if layout.token_types:
            types = packed[2 * row : 2 * row + tokens]
            types[:] = 0
            at = 0
            for run in work.runs:
                if run.token_types is not None:
                    types[at : at + len(run.ids)] = run.token_types
                at += len(run.ids)

    def _room(self, slot: int, size: int) -> Tensor:
        if len(self._buffers[slot]) < size:
            self._buffers[slot] = self._buffer(1 << (size - 1).bit_length())
        return self._buffers[slot][:size]

    def _buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, pin_memory=self._pin)

    def _ramp_of(self, tokens: int) -> npt.NDArray[np.int32]:
        if len(self._ramp) < tokens:
            self._ramp = np.arange(1 << (tokens - 1).bit_length(), dtype=np.int32)
        return self._ramp[:tokens]
