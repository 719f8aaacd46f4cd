"""One batch through the model and the sampler: take the ids that lie on the device, run, draw, keep what was drawn.

Knows the model, its backend and the buffers that stay on the device; knows neither queues nor graphs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rose.attention_backends.base import AttentionBackend, can_capture, plans_on_host
from rose.batch import Batch, PagedContext
from rose.engine.buckets import BatchKey
from rose.engine.generation.buckets import GenerationKey
from rose.engine.generation.layout import device_parts
from rose.engine.generation.sampler import draw_tokens
from rose.engine.generation.staging import Staged
from rose.engine.generation.states import StatePools
from rose.engine.graphs import Forward, Outputs
from rose.kernels.latest import keep_latest, take_latest
from rose.models.base import GenerativeModel

# Name of the one output of a batch.
DRAWN = "drawn"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSide:
    """What stays on the device from batch to batch, and who works with it.

    Attributes:
        latest: [lanes] int32, the latest token drawn for each lane.
        states: pools of recurrent state, or None.
        vocab_limit: only ids below it are drawn.
    """

    model: GenerativeModel
    backend: AttentionBackend
    latest: Tensor
    states: StatePools | None
    page_size: int
    vocab_limit: int

    def copy_states(self, rows: Iterable[tuple[int, int]]) -> None:
        """Queue copies (from, to) between rows of the pools."""
        for source, target in rows:
            assert self.states is not None  # a scheduler without saved states plans none
            self.states.copy(source, target)


class GenerationForward:
    """A staged batch, ready for `LazyGraphs.run`."""

    def __init__(self, side: DeviceSide, staged: Staged) -> None:
        self._side = side
        self._staged = staged
        self._parts: dict[str, Tensor]
        self._batch: Batch

    def load(self, packed: Tensor, graph_key: BatchKey | None, like: Forward | None = None) -> None:
        side, staged = self._side, self._staged
        self._parts = like._parts if isinstance(like, GenerationForward) else device_parts(packed, staged.layout)
        parts, lengths, key = self._parts, staged.lengths, staged.key
        self._batch = Batch(
            ids=parts["ids"],
            positions=parts["positions"],
            cu_seqlens=parts["cu_seqlens"],
            lengths=lengths,
            max_length=_longest(key, lengths),
            key=graph_key,
            paged=PagedContext(
                page_table=parts["table"],
                kv_lengths=parts["kv_lengths"],
                slots=parts["slots"],
                page_size=side.page_size,
                max_kv_length=key.kv_bound,
                decodes=staged.decodes,
                states=None if side.states is None else parts["lanes"],
                host_kv_lengths=staged.kv_lengths() if plans_on_host(side.backend) else None,
            ),
            states=side.states,
        )
        self._batch.attention = side.backend.plan(self._batch, staged.slot)

    @property
    def capturable(self) -> bool:
        return self._batch.attention is not None and can_capture(self._batch.attention)

    def run(self) -> Outputs:
        """-> `DRAWN`: [S, columns] int32, see rose.engine.generation.sampler."""
        side, parts = self._side, self._parts
        self._batch.ids = take_latest(parts["ids"], side.latest)
        key = self._staged.key
        logits = side.model(self._batch, None if key.decodes == key.tokens else parts["rows"])
        drawn = draw_tokens(logits, parts, key.draw, side.vocab_limit)
        # A row that gave no token ends, but its next batch may be launched already and has to start from some id.
        keep_latest(drawn[:, 0], parts.get("drawn_lanes", parts["lanes"]), side.latest)
        return {DRAWN: drawn}


def _longest(key: GenerationKey, lengths: tuple[int, ...]) -> int:
    """Bound of the tokens of one sequence; of a padded key, for every batch of it."""
    if key.decodes == key.sequences:
        return 1
    return key.tokens - key.decodes if key.padded else max(lengths)


class HostRows:
    """Where drawn tokens arrive on the host: a buffer for each batch in flight, read before its next use."""

    def __init__(self, *, pin: bool, slots: int) -> None:
        self._pin = pin
        self._buffers = [self._buffer(1 << 10) for _ in range(slots)]

    def copy(self, slot: int, drawn: Tensor, rows: int) -> npt.NDArray[np.int32]:
        """Queue the copy of the first `rows` of [S, columns]; filled once the stream has come this far."""
        columns = drawn.shape[1]
        if rows * columns > len(self._buffers[slot]):
            self._buffers[slot] = self._buffer(1 << (rows * columns - 1).bit_length())
        host = self._buffers[slot][: rows * columns].view(rows, columns)
        host.copy_(drawn if rows == len(drawn) else drawn[:rows], non_blocking=True)
        return host.numpy()

    def _buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, pin_memory=self._pin)
