"""Sequences whose batch failed, until each has shown alone whether the fault is its own.

A sequence on trial is computed anew, in batches of its own: the tokens it has, of which the next one is drawn, then one
decoding step, since that runs other kernels. If both end well it goes back among the others; if either fails, the
sequence ends with the error. A failure counts against those it befell, until one that was in it ends before it was
cleared, in whatever way: that one may have been at fault. Plain Python; knows neither pages nor devices.
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
        # Of each on trial: for each failed batch it was in, those whom that counts against; shared by all of them.
        self._counted: dict[int, list[list[Sequence]]] = {}
        self._begun_with: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.serial in self._open

    def begin(self, company: ListLike[Sequence], beside: ListLike[Sequence] = (), *, explained: bool = False) -> None:
        """A batch has failed; for now that counts against each of the company.

        Args:
            company: those that are on trial from now on.
            beside: those on trial already, for a batch before it that failed; this one may be their fault too.
            explained: somebody who was in it has ended, and may have been at fault: it counts against nobody.
        """
        counted = [] if explained else list(company)
        for sequence in counted:
            sequence.unexplained += 1
        for sequence in company:
            self._open[sequence.serial] = sequence
            self._counted[sequence.serial] = [counted]
        for sequence in beside:
            self._counted[sequence.serial].append(counted)

    def next(self) -> Sequence | None:
        """The one whose batch comes next: the oldest of those that have pages, else the oldest that waits.

        One that still waits for a launched batch is left out, and one whose batches are all launched.
        """
        due = [sequence for sequence in self._open.values() if self._is_due(sequence)]
        return min(due, key=lambda sequence: (sequence.state is State.WAITING, age(sequence)), default=None)

    def started(self, sequence: Sequence) -> None:
        """It has got pages for the tokens it has."""
        self._begun_with[sequence.serial] = sequence.known

    def clear(self, sequence: Sequence) -> None:
        """It was not at fault; what it was in goes on counting against the others. One not on trial is no error."""
        if self._open.pop(sequence.serial, None) is not None:
            del self._counted[sequence.serial]
            self._begun_with.pop(sequence.serial, None)

    def leave(self, sequence: Sequence) -> None:
        """It has ended, found guilty or not tried to the end: what it was in counts against nobody any more.

        However often that happens, tries stay bounded: each time a request is gone. One not on trial is no error.
        """
        for counted in self._counted.get(sequence.serial, ()):
            for other in counted:
                other.unexplained -= 1
            counted.clear()  # another of them that ends explains nothing more
        self.clear(sequence)

    def _is_due(self, sequence: Sequence) -> bool:
        if sequence.state is State.WAITING:
            return not sequence.in_flight
        # Decoding: its one step is still to come.
        step_to_come = sequence.state is State.DECODE and sequence.computed == self._begun_with[sequence.serial]
        return sequence.state is State.PREFILL or step_to_come
