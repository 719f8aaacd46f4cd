"""Sequences that wait for a lane and pages, and the deadlines of all that are open.

Knows order and times; knows neither pages nor budgets.
"""

from __future__ import annotations

import heapq

from rose.engine.generation.sequence import Sequence, State

Entry = tuple[int, Sequence]
RANKS = 2


class WaitingLine:
    """By rank, then in the order of arrival; a sequence whose pages were taken from it comes back to its old place."""

    def __init__(self) -> None:
        self._heaps: list[list[Entry]] = [[] for _ in range(RANKS)]
        self._gone = 0

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heaps[sequence.rank], (sequence.serial, sequence))

    def first(self, rank: int) -> Sequence | None:
        heap = self._heaps[rank]
        while heap:
            sequence = heap[0][1]
            if _waits(sequence, rank):
                return sequence
            heapq.heappop(heap)
            self._gone -= 1
        return None

    def pop(self, rank: int) -> None:
        """Take out what `first` returned."""
        heapq.heappop(self._heaps[rank])

    def remove(self, sequence: Sequence) -> None:
        """Take one out of the middle, so that it may come back; O(n)."""
        heap = self._heaps[sequence.rank]
        heap[:] = [entry for entry in heap if entry[1] is not sequence]
        heapq.heapify(heap)

    def forget_one(self) -> None:
        """A sequence of the line ended or changed its rank. Searching for it costs O(n): they are swept by the half."""
        self._gone += 1
        if self._gone > 64 and 2 * self._gone > sum(map(len, self._heaps)):
            for rank, heap in enumerate(self._heaps):
                heap[:] = [entry for entry in heap if _waits(entry[1], rank)]
                heapq.heapify(heap)
            self._gone = 0


class Deadlines:
    """When somebody stops wanting an answer."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []

    def push(self, sequence: Sequence) -> None:
        deadline = sequence.request.deadline
        if deadline is not None:
            heapq.heappush(self._heap, (deadline, sequence.serial, sequence))

    def due(self, now: float) -> list[Sequence]:
        """Take out those whose deadline has passed, earliest first."""
        due: list[Sequence] = []
        while self._heap and self._heap[0][0] <= now:
            sequence = heapq.heappop(self._heap)[2]
            if not sequence.finished:
                due.append(sequence)
        return due

    def earliest(self) -> float | None:
        while self._heap:
            deadline, _, sequence = self._heap[0]
            if not sequence.finished:
                return deadline
            heapq.heappop(self._heap)
        return None

    def sweep(self, open_requests: int) -> None:
        """Ended requests stay until their deadline: without this a long default one would keep millions of them."""
        if len(self._heap) > 64 + 2 * open_requests:
            self._heap = [entry for entry in self._heap if not entry[2].finished]
            heapq.heapify(self._heap)


def _waits(sequence: Sequence, rank: int) -> bool:
    return sequence.state is State.WAITING and not sequence.finished and sequence.rank == rank
