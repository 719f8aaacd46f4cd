"""When a sequence of class BULK has yielded long enough.

Knows batches and ages; knows neither pages nor tokens.
"""

from __future__ import annotations

from rose.engine.generation.sequence import Sequence

# Batches the oldest one may be left out of: seconds, at the 5 to 20 ms of a batch.
BULK_PATIENCE = 256
# How often one may lose its pages.
BULK_PREEMPTIONS = 4


class BulkPatience:
    """The open sequences of class BULK that still yield, oldest first.

    Attributes:
        promotions: sequences that came to count as ONLINE, since start.
    """

    def __init__(self) -> None:
        self._yielding: dict[int, Sequence] = {}
        self._mark = (0, 0)
        self._passed_over = 0
        self.promotions = 0

    def __len__(self) -> int:
        return len(self._yielding)

    def add(self, sequence: Sequence) -> None:
        self._yielding[sequence.serial] = sequence

    def discard(self, sequence: Sequence) -> None:
        self._yielding.pop(sequence.serial, None)

    def promote(self, sequence: Sequence) -> None:
        """From now on it counts as ONLINE, with the age it has."""
        del self._yielding[sequence.serial]
        sequence.rank = 0
        self.promotions += 1

    def overdue(self) -> Sequence | None:
        """Count a batch; the oldest one, if it was left out of too many in a row."""
        oldest = next(iter(self._yielding.values()), None)
        if oldest is None:
            return None
        mark = (oldest.serial, oldest.computed)
        if mark != self._mark:
            self._mark, self._passed_over = mark, 0
            return None
        self._passed_over += 1
        return oldest if self._passed_over >= BULK_PATIENCE else None
