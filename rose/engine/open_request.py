"""A request that still has sequences waiting, and the work a batch takes from it.

Ids lie flat in one array with their boundaries beside them, so that taking any number of sequences is one slice.
Knows numpy; knows neither order nor budgets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat, starmap

import numpy as np
import numpy.typing as npt

from rose.engine.request import Item, Priority, Request

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
    """

    request_id: int
    first: int
    lengths: list[int]
    ids: IntArray
    token_types: IntArray | None = None


@dataclass(slots=True)
class Work:
    """What one batch consists of: runs in batch order, and the outputs they ask for.

    Attributes:
        lengths: tokens of each sequence of the batch.
        tokens: their sum.
    """

    runs: list[Run]
    outputs: tuple[str, ...]
    lengths: list[int] = field(init=False)
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = [length for run in self.runs for length in run.lengths]
        self.tokens = sum(self.lengths)

    @property
    def sequences(self) -> int:
        return len(self.lengths)

    @property
    def items(self) -> tuple[Item, ...]:
        """In batch order. Made once an answer: 256 of them take as long as the rest of a step."""
        runs = (zip(repeat(run.request_id), range(run.first, run.first + len(run.lengths))) for run in self.runs)
        return tuple(starmap(Item, chain.from_iterable(runs)))


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One request in the queue.

    Attributes:
        serial: order of arrival, never reused.
        turn: place in the round; smaller is served earlier.
        single: somebody waits for this one query, so batches stay small enough to answer it soon.
        ends: [sequences + 1], ends[i] .. ends[i + 1] are the ids of sequence i.
        next: index of the first sequence that waits.
    """

    id: int
    serial: int
    turn: int
    priority: Priority
    outputs: tuple[str, ...]
    alone: bool
    single: bool
    deadline: float | None
    lengths: list[int]
    ids: IntArray
    token_types: IntArray | None
    next: int = 0
    closed: bool = False
    ends: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.ends = list(accumulate(self.lengths, initial=0))

    @staticmethod
    def of(request: Request, outputs: tuple[str, ...], lengths: list[int], serial: int, *, single: bool) -> OpenRequest:
        types = request.token_types
        return OpenRequest(
            id=request.id,
            serial=serial,
            turn=serial,
            priority=request.priority,
            outputs=outputs,
            alone=request.alone,
            single=single,
            deadline=request.deadline,
            lengths=lengths,
            ids=_flat(request.sequences),
            token_types=None if types is None else _flat(types),
        )

    @property
    def sequences_left(self) -> int:
        return len(self.lengths) - self.next

    @property
    def tokens_left(self) -> int:
        return self.ends[-1] - self.ends[self.next]

    def take(self, stop: int) -> Run:
        """The waiting sequences before index `stop`, which then no longer wait."""
        first, begin, end = self.next, self.ends[self.next], self.ends[stop]
        self.next = stop
        types = None if self.token_types is None else self.token_types[begin:end]
        return Run(self.id, first, self.lengths[first:stop], self.ids[begin:end], types)

    def release(self) -> None:
        """Let go of the ids: a closed request may stay in a queue a while."""
        self.ids, self.token_types = self.ids[:0], None


def _flat(arrays: list[IntArray]) -> IntArray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
