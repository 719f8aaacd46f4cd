"""Which rows of the recurrent-state pools hold the state behind a beginning that somebody may ask for again.

Pages of keys and values say how to go on after them only to layers that attend. A layer with recurrent state needs the
state itself, as it was behind the last of these pages: a row more in its pools, found by the same digest. A row is
free, or being written by a launched batch, or found by its digest; of these the least recently used one goes first. One
stream: a row that is given away may still be read by what was launched before. Plain Python; knows neither devices nor
sequences.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class SavedStates:
    """The rows `first` .. `first + count - 1`."""

    def __init__(self, first: int, count: int) -> None:
        self._free = list(range(first + count - 1, first - 1, -1))
        self._rows: OrderedDict[bytes, int] = OrderedDict()
        self._wanted: dict[int, int] = {}
        self.count = count

    def __bool__(self) -> bool:
        return self.count > 0

    def __len__(self) -> int:
        """Rows that can be found."""
        return len(self._rows)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._rows

    def want(self, digest: bytes) -> int:
        """A row that is there, for a sequence that starts; it stays what it is until `unwant`."""
        self._rows.move_to_end(digest)
        row = self._rows[digest]
        self._wanted[row] = self._wanted.get(row, 0) + 1
        return row

    def unwant(self, row: int) -> None:
        """The copy of a wanted row is planned, or nobody needs it any more."""
        left = self._wanted[row] - 1
        if left:
            self._wanted[row] = left
            return
        del self._wanted[row]
        if row not in self._rows.values():
            self._free.append(row)

    def take(self) -> int | None:
        """A row to be written to; None if all are being written to, or wanted."""
        if self._free:
            return self._free.pop()
        for digest, row in self._rows.items():
            if row not in self._wanted:
                del self._rows[digest]
                return row
        return None

    def keep(self, row: int, digest: bytes) -> bool:
        """Let a written row be found; False where another holds the same already, which stays instead."""
        if digest in self._rows:
            self._rows.move_to_end(digest)
            self.give_back(row)
            return False
        self._rows[digest] = row
        return True

    def give_back(self, row: int) -> None:
        """What was written to a row is of no use."""
        self._free.append(row)

    def forget(self, digests: Iterable[bytes]) -> None:
        """Let nobody find these any more; those that are not there are no error."""
        for digest in digests:
            row = self._rows.pop(digest, None)
            if row is not None and row not in self._wanted:
                self._free.append(row)
