"""When a sequence of class BULK has yielded long enough.

Knows batches and ages; knows neither pages nor tokens.
"""

from __future__ import annotations

from rose.engine.generation.sequence import Sequence

# Batches the oldest one may be left out of, all in all: seconds, at the 5 to 20 ms of a batch.
BULK_PATIENCE = 256
# How often one may lose its pages.
BULK_PREEMPTIONS = 4


class BulkPatience:
    """The open sequences of class BULK that still yield, oldest first.

    Attributes:
        promotions: sequences that came to count as ONLINE, since start.
    """

    def __init__(self, batches: int = BULK_PATIENCE, preemptions: int = BULK_PREEMPTIONS) -> None:
        self._batches = batches
        self._preemptions = preemptions
        self._yielding: dict[int, Sequence] = {}
        self._oldest: Sequence | None = None
        self._computed = 0
        self._passed_over = 0
        self.promotions = 0

    def __len__(self) -> int:
        return len(self._yielding)

    def add(self, sequence: Sequence) -> None:
        self._yielding[sequence.serial] = sequence

    def discard(self, sequence: Sequence) -> None:
        self._yielding.pop(sequence.serial, None)

    def is_worn(self, sequence: Sequence) -> bool:
        """Whether it has lost its pages too often."""
        return sequence.preemptions >= self._preemptions

    def promote(self, sequence: Sequence) -> None:
        """From now on it counts as ONLINE, with the age it has."""
        del self._yielding[sequence.serial]
        sequence.rank = 0
        self.promotions += 1

    def overdue(self) -> Sequence | None:
        """Count a batch; the oldest one, if it was left out of too many."""
        oldest = next(iter(self._yielding.values()), None)
        if oldest is not self._oldest:
            self._oldest, self._passed_over = oldest, 0
        elif oldest is not None:
            self._passed_over += oldest.computed <= self._computed
        if oldest is None or self._passed_over >= self._batches:
            return oldest
        self._computed = oldest.computed
        return None
