"""A request that still has sequences waiting, and the work a batch takes from it.

Ids lie flat in one array with their boundaries beside them, so that taking any number of sequences is one slice.
Knows numpy; knows neither order nor budgets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat, starmap

import numpy as np
import numpy.typing as npt

from rose.engine.request import Item, Request

IntArray = npt.NDArray[np.int32]


# Not frozen, though never changed: one is made for every request of a step, and freezing doubles what that costs.
@dataclass(slots=True)
class Run:
    """Consecutive sequences of one request.

    Attributes:
        first: index of the first sequence in its request.
        lengths: tokens of each sequence.
        ids: [sum(lengths)] int32.
        token_types: the same shape, or None for all zero.
        spans: [n, 2] int32 of each sequence, counted from its own first token, or None.
    """

    request_id: int
    first: int
    lengths: list[int]
    ids: IntArray
    token_types: IntArray | None = None
    spans: list[IntArray] | None = None


@dataclass(slots=True)
class Work:
    """What one batch consists of: runs in batch order, and the outputs they ask for. All runs have spans, or none has.

    Attributes:
        lengths: tokens of each sequence of the batch.
        splits: their boundaries: 0, then the end of each sequence.
        token_types: whether any run has them.
        span_splits: boundaries of the spans: 0, then the end of each sequence's; empty where there are none.
    """

    runs: list[Run]
    outputs: tuple[str, ...]
    lengths: list[int] = field(init=False)
    splits: tuple[int, ...] = field(init=False)
    token_types: bool = field(init=False)
    span_splits: tuple[int, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        runs = self.runs
        first = runs[0]
        if len(runs) == 1:
            self.lengths, self.token_types = first.lengths, first.token_types is not None
        else:
            self.lengths = [length for run in runs for length in run.lengths]
            self.token_types = any(run.token_types is not None for run in runs)
        one = len(self.lengths) == 1
        self.splits = (0, self.lengths[0]) if one else tuple(accumulate(self.lengths, initial=0))
        if first.spans is not None:
            self.span_splits = tuple(accumulate(map(len, self.spans), initial=0))

    @property
    def sequences(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return self.splits[-1]

    @property
    def spans(self) -> list[IntArray]:
        """[n, 2] of each sequence; empty where the batch has none."""
        return [bounds for run in self.runs for bounds in run.spans or ()]

    @property
    def items(self) -> tuple[Item, ...]:
        """In batch order. Made once an answer: 256 of them take as long as the rest of a step."""
        first = self.runs[0]
        if len(self.lengths) == 1:
            return (Item(first.request_id, first.first),)
        runs = (zip(repeat(run.request_id), range(run.first, run.first + len(run.lengths))) for run in self.runs)
        return tuple(starmap(Item, chain.from_iterable(runs)))


class OpenRequest:
    """One request in the queue.

    Attributes:
        serial: order of arrival, never reused.
        turn: place in the round; smaller is served earlier.
        single: somebody waits for this one query, so batches stay small enough to answer it soon.
        ends: [sequences + 1], ends[i] .. ends[i + 1] are the ids of sequence i.
        next: index of the first sequence that waits.
    """

    __slots__ = (
        "alone",
        "closed",
        "ends",
        "id",
        "ids",
        "lengths",
        "next",
        "outputs",
        "priority",
        "serial",
        "single",
        "spans",
        "token_types",
        "turn",
    )

    def __init__(
        self, request: Request, outputs: tuple[str, ...], lengths: list[int], serial: int, *, single: bool
    ) -> None:
        types = request.token_types
        self.id = request.id
        self.serial = self.turn = serial
        self.priority = request.priority
        self.outputs = outputs
        self.alone = request.alone
        self.single = single
        self.lengths = lengths
        self.ends = [0, lengths[0]] if len(lengths) == 1 else list(accumulate(lengths, initial=0))
        self.ids = _flat(request.sequences)
        self.token_types: IntArray | None = None if types is None else _flat(types)
        self.spans: list[IntArray] | None = request.spans
        self.next = 0
        self.closed = False

    @property
    def sequences_left(self) -> int:
        return len(self.lengths) - self.next

    @property
    def tokens_left(self) -> int:
        return self.ends[-1] - self.ends[self.next]

    def take(self, stop: int) -> Run:
        """The waiting sequences before index `stop`, which then no longer wait."""
        first, self.next = self.next, stop
        if first == 0 and stop == len(self.lengths):
            return Run(self.id, 0, self.lengths, self.ids, self.token_types, self.spans)
        begin, end = self.ends[first], self.ends[stop]
        types = None if self.token_types is None else self.token_types[begin:end]
        spans = None if self.spans is None else self.spans[first:stop]
        return Run(self.id, first, self.lengths[first:stop], self.ids[begin:end], types, spans)

    def release(self) -> None:
        """Let go of the ids: a closed request may stay in a queue a while."""
        self.ids, self.token_types, self.spans = self.ids[:0], None, None


def _flat(arrays: list[IntArray]) -> IntArray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
