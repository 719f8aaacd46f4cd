"""What is open, whoever asked for it: found by its deadline and by the id its client gave it.

Knows clients and deadlines; knows neither what was asked for nor the engine.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from rose.server.connection import Connection


class Entry(Protocol):
    """Something open: an OpenRequest or an OpenGeneration.

    Attributes:
        peer, wire_id: whose it is, and the id its client gave it.
        arrived: when its frame was read, time.monotonic().
        deadline: when its client stops waiting, or None.
        launched: when the first batch with a part of it was launched, or None.
        serial: unique in this process; set when it is entered.
    """

    peer: Connection
    wire_id: int
    arrived: float
    deadline: float | None
    launched: float | None
    serial: int


E = TypeVar("E", bound=Entry)


class Ledger(ABC, Generic[E]):
    """All open entries."""

    def __init__(self) -> None:
        self._by_serial: dict[int, E] = {}
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._by_serial)

    def all(self) -> list[E]:
        return list(self._by_serial.values())

    def of(self, peer: Connection) -> list[E]:
        """What a client waits for."""
        return [self._by_serial[entry.serial] for entry in peer.open.values()]

    def find(self, peer: Connection, wire_id: int) -> E | None:
        """What a client asked for under an id of its own, or None if that is not open."""
        entry = peer.open.get(wire_id)
        return None if entry is None else self._by_serial[entry.serial]

    @abstractmethod
    def close(self, entry: E) -> None:
        """Forget an entry; whatever the engine still owes of it is cancelled."""

    @property
    def next_deadline(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None

    def expired(self, now: float) -> list[E]:
        """Open entries whose deadline has passed; each is told of once. Asked every turn, mostly in vain."""
        late: list[E] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            entry = self._by_serial.get(heapq.heappop(self._deadlines)[1])
            if entry is not None:
                late.append(entry)
        return late

    def _enter(self, entry: E, serial: int) -> None:
        entry.serial = serial
        self._by_serial[serial] = entry
        entry.peer.open[entry.wire_id] = entry
        if entry.deadline is not None:
            heapq.heappush(self._deadlines, (entry.deadline, serial))
            # Answered requests leave their entry behind: with deadlines of minutes these would add up.
            if len(self._deadlines) > 1024 + 2 * len(self._by_serial):
                self._deadlines = [mark for mark in self._deadlines if mark[1] in self._by_serial]
                heapq.heapify(self._deadlines)

    def _leave(self, entry: E) -> bool:
        """Whether it was open."""
        if self._by_serial.pop(entry.serial, None) is None:
            return False
        del entry.peer.open[entry.wire_id]
        if not self._by_serial:
            self._deadlines.clear()
        return True
