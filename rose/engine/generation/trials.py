"""Sequences whose batch failed, until each has shown alone whether the fault is its own.

A sequence on trial is computed anew, in batches of its own: the tokens it has, of which the next one is drawn, then one
decoding step, since that runs other kernels. If both end well it goes back among the others; if either fails, the
sequence ends with the error and the others of the failed batch are cleared. Plain Python; knows neither pages nor
devices.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike

from rose.engine.generation.running import age
from rose.engine.generation.sequence import Sequence, State

# How often a sequence is tried again after a failure that nobody was found guilty of. What fails in company only, again
# and again, would else be computed anew for every other token.
MOST_UNEXPLAINED = 4


class Trials:
    """The sequences on trial; a waiting one is in no other line."""

    def __init__(self) -> None:
        self._open: dict[int, Sequence] = {}
        self._companies: dict[int, list[Sequence]] = {}
        self._begun_with: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.serial in self._open

    def begin(self, company: ListLike[Sequence]) -> None:
        """A batch of these has failed; for now that counts against each of them."""
        shared = list(company)
        for sequence in shared:
            sequence.unexplained += 1
            self._open[sequence.serial] = sequence
            self._companies[sequence.serial] = shared

    def next(self) -> Sequence | None:
        """The one whose batch comes next: the oldest of those that have pages, else the oldest that waits.

        One that still waits for a launched batch is left out, and one whose batches are all launched.
        """
        due = [sequence for sequence in self._open.values() if self._is_due(sequence)]
        return min(due, key=lambda sequence: (sequence.state is State.WAITING, age(sequence)), default=None)

    def started(self, sequence: Sequence) -> None:
        """It has got pages for the tokens it has."""
        self._begun_with[sequence.serial] = sequence.known

    def convict(self, sequence: Sequence) -> None:
        """The fault is its own: the failure that began its trial counts against nobody any more."""
        company = self._companies[sequence.serial]
        for other in company:
            other.unexplained -= 1
        company.clear()  # another of them that is guilty too explains nothing more

    def end(self, sequence: Sequence) -> None:
        """It was cleared, or has ended. One not on trial is no error."""
        if self._open.pop(sequence.serial, None) is not None:
            del self._companies[sequence.serial]
            self._begun_with.pop(sequence.serial, None)

    def _is_due(self, sequence: Sequence) -> bool:
        if sequence.state is State.WAITING:
            return not sequence.in_flight
        # Decoding: its one step is still to come.
        step_to_come = sequence.state is State.DECODE and sequence.computed == self._begun_with[sequence.serial]
        return sequence.state is State.PREFILL or step_to_come
